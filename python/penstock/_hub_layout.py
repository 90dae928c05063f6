"""The place in huggingface_hub's cache of what the disk cache has whole: either program finds what the other fetched.

`_core` brings the files there (``store/disk_cache/hub.rs``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from . import _core
from ._hub import Expected, Reference, cache_folder, expected_of, is_true


def digest_in(about: Mapping[str, Any], source: str) -> Expected | None:
    """The hash of a file by what the Hub says of it: sha256 of an LFS file, otherwise git's sha1; None if neither."""
    lfs = about.get("lfs")
    digest = lfs.get("sha256") if isinstance(lfs, dict) else about.get("blobId")
    return expected_of(digest, source) if isinstance(digest, str) else None


def layout_of(
    reference: Reference, commit: str, base: str, files: Iterable[Mapping[str, Any]], asked: float
) -> _core.HubLayout:
    """The place of a commit's files.

    Args:
        reference: What was asked for. huggingface_hub keeps a repository by the name that it is asked for by.
        base: How the addresses of the files begin.
        files: What the Hub says of each: ``rfilename``, ``blobId``, ``lfs``. Files without a hash have no place.
        asked: When it was asked (Unix seconds).
    """
    hashed = [(str(about["rfilename"]), digest_in(about, "Hub")) for about in files]
    return _core.HubLayout(
        str(cache_folder().absolute()),
        reference.repository,
        commit,
        revision=None if reference.revision == commit else reference.revision,
        asked=asked,
        symlinks=not is_true(os.environ.get("HF_HUB_DISABLE_SYMLINKS")),
        files=[(base + quote(path), path, found.digest) for path, found in hashed if found is not None],
    )

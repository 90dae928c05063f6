"""The versions of a model's shards, as the process saw them that fetched its small files: ranks load these or none.

They lie in the folder with the small files, which is this user's alone. A reload takes what is there then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._checkpoint import Checkpoint
from .._errors import ChangedError
from .._paths import without_secrets

PINS = ".penstock-versions"
"""The file with them in the folder."""


def versions_of(checkpoint: Checkpoint) -> dict[str, str]:
    """By address, what tells the versions of a file apart."""
    return dict(zip(checkpoint.files, checkpoint._core.versions(), strict=True))


def pins_of(checkpoint: Checkpoint) -> bytes:
    """The content of the file."""
    return json.dumps(versions_of(checkpoint)).encode()


def pinned_in(folder: Any) -> Mapping[str, str] | None:
    """The pins of the process that made this folder; None if it is no such folder."""
    with suppress(OSError, ValueError, TypeError):
        found: Mapping[str, str] = json.loads(Path(folder, PINS).read_bytes())
        return found
    return None


def check_pinned(checkpoint: Checkpoint, pinned: Mapping[str, str], when: str) -> None:
    """Raises ChangedError if the checkpoint has another version of a file, or other files. ``when``: since when."""
    found = versions_of(checkpoint)
    for path in sorted(found.keys() | pinned.keys()):
        if found.get(path) != pinned.get(path):
            what = "it has changed" if path in found and path in pinned else "it was added or removed"
            what = f"{what} since {when}: start again, when nobody writes there any more"
            raise ChangedError(f"{without_secrets(path)}: {what}", path=without_secrets(path))

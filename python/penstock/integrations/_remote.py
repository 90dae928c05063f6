"""Weights on a server or in an object store, for engines whose loaders choose among files in a folder."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from .._checkpoint import Checkpoint, open_as
from .._checkpoint import open as open_checkpoint
from .._choices import Storage
from .._errors import NotFoundError, UnsupportedError, WriteError
from .._paths import is_web, without_secrets
from ._pins import check_pinned

_LONGEST = 250
"""Bytes of the name of a file."""


def temporary_directory() -> str:
    """The directory for temporary folders. It is made anew if it is gone: a process may be restored on another machine.

    Raises:
        WriteError: there is none that can be written to, as in a pod with a read-only root, or it cannot be made.
    """
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError as error:
        text = (
            f"the small files of a model at an address need a folder that can be written to, and there is none "
            f"({error}): mount one at /tmp (an emptyDir), or name one in TMPDIR"
        )
        raise WriteError(text, path="/tmp", errno=error.errno) from error
    try:
        Path(place).mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        text = f"the temporary directory is gone and cannot be made ({error}): make it, or start with another TMPDIR"
        raise WriteError(text, path=place, errno=error.errno) from error
    return place


def is_remote(place: str) -> bool:
    """Whether ``place`` is an address, of a server or of the Hub, and no folder."""
    return is_web(place) or place.startswith("hf://")


def file_name(address: str) -> str:
    """The name that the file at an address has in a folder.

    Raises:
        UnsupportedError: no file of a folder can be called so.
    """
    # In the key of an object these characters mean nothing
    path = re.split(r"[?#]", address)[0] if address.lower().startswith(("http://", "https://")) else address
    return checked_name(path.rpartition("/")[2], address)


def checked_name(name: str, address: str) -> str:
    """``name``, if a file of a folder can be called so, and written under a name that is 5 bytes longer.

    Raises:
        UnsupportedError: it cannot. The error names ``address``, where the file is.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > _LONGEST:
        text = f"no file can be called {name!r} in the folder that an engine gets: give the file another name"
        raise UnsupportedError(f"{without_secrets(address)}: {text}")
    return name


Files = Literal["model", "consolidated"]
"""The set of weights in a folder: those of transformers, or Mistral's own, which often lie beside them."""
_CONSOLIDATED = ("consolidated.safetensors.index.json", "consolidated.safetensors")


def open_files(place: str, storage: Storage | None, files: Files) -> Checkpoint:
    """The checkpoint at an address that has these files.

    Raises:
        PenstockError: as `penstock.open`.
        NotFoundError: there are no such files.
    """
    if files == "model" or place.endswith((".safetensors", ".json")):
        return open_checkpoint(place, storage=storage)
    for name in _CONSOLIDATED:
        with suppress(NotFoundError):
            return open_as("source", f"{place.removesuffix('/')}/{name}", storage=storage)
    text = f'it has neither {" nor ".join(_CONSOLIDATED)}, which files="consolidated" asks for'
    raise NotFoundError(text, path=without_secrets(place))


class RemoteWeights:
    """The checkpoint at an address, and a folder with an empty file in place of each of its files.

    An engine's loader searches this folder for files, and chooses those that it wants. Nothing can be read from them:
    a loader that bypasses Penstock fails. The folder lasts until `close`.

    Args:
        place: Its address.
        storage: How servers are asked.
        files: Which files of it are meant.

    Raises:
        PenstockError: as `penstock.open`.
        ChangedError: it is not the version that is ``pinned``.
        UnsupportedError: two of the files have one name, or one has a name that no file of a folder can have.
    """

    def __init__(
        self,
        place: str,
        storage: Storage | None,
        files: Files = "model",
        *,
        pinned: Mapping[str, str] | None = None,
    ) -> None:
        self.place = place
        self.checkpoint: Checkpoint = open_files(place, storage, files)
        if pinned is not None:
            check_pinned(self.checkpoint, pinned, "its configuration was fetched")
        self._by_name = {file_name(path): path for path in self.checkpoint.files}
        if len(self._by_name) < len(self.checkpoint.files):
            raise UnsupportedError(f"{without_secrets(place)}: two of its files have one name, in different folders")
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", dir=temporary_directory())
        self.folder = self._folder.name
        for name in self._by_name:
            Path(self.folder, name).touch()

    def close(self) -> None:
        """Removes the folder."""
        self._folder.cleanup()

    def keeping(self, files: Sequence[str]) -> Callable[[str], bool] | None:
        """A test for tensors in these files of the folder; None if those are all files."""
        chosen = {self._by_name[Path(file).name] for file in files}
        if len(chosen) == len(self._by_name):
            return None
        names = {info.name for info in self.checkpoint.values() if info.file in chosen}
        return names.__contains__

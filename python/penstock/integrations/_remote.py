"""Weights on a server or in an object store, for engines whose loaders choose among files in a folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .._checkpoint import Checkpoint
from .._checkpoint import open as open_checkpoint
from .._choices import Storage
from .._errors import UnsupportedError
from .._paths import is_web, without_secrets


def is_remote(place: str) -> bool:
    """Whether ``place`` is an address, of a server or of the Hub, and no folder."""
    return is_web(place) or place.startswith("hf://")


def file_name(address: str) -> str:
    """The name of the file at an address."""
    return re.split(r"[?#]", address)[0].rpartition("/")[2]


class RemoteWeights:
    """The checkpoint at an address, and a folder with an empty file in place of each of its files.

    An engine's loader searches this folder for files, and chooses those that it wants. Nothing can be read from them:
    a loader that passes by Penstock fails. The folder lasts until `close`.

    Raises:
        PenstockError: as `penstock.open`.
        UnsupportedError: two of the files have one name.
    """

    def __init__(self, place: str, storage: Storage | None) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(place, storage=storage)
        self._by_name = {file_name(path): path for path in self.checkpoint.files}
        if len(self._by_name) < len(self.checkpoint.files):
            raise UnsupportedError(f"{without_secrets(place)}: two of its files have one name, in different folders")
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self.folder = self._folder.name
        for name in self._by_name:
            Path(self.folder, name).touch()

    def close(self) -> None:
        """Removes the folder."""
        self._folder.cleanup()

    def keeping(self, files: Sequence[str]) -> Callable[[str], bool] | None:
        """Which tensors lie in these files of the folder; None if those are all files."""
        chosen = {self._by_name[Path(file).name] for file in files}
        if len(chosen) == len(self._by_name):
            return None
        names = {info.name for info in self.checkpoint.values() if info.file in chosen}
        return names.__contains__

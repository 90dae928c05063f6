"""Folders in buckets through the interface of the Run:ai model streamer: what is in them, and copies of their files."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from .. import _core
from .._errors import InvalidError, NotFoundError, PenstockError, WriteError
from .._options import make_options
from .._progress import INTERVAL
from .._pull import checked
from .._running import under_way
from .._tls import warn_of_unchecked
from ._errors import value_errors
from ._runai_settings import scheme_of, storage_for, warn_of_variables

_PATTERN = "*.safetensors"


class NothingPulledError(PenstockError, RuntimeError):
    """A folder of a bucket of which no file was copied."""

    kind = "NotFound"


def list_safetensors(path: str, s3_credentials: Any = None) -> list[str]:
    """The addresses or paths of all ``*.safetensors`` directly in a folder, sorted; none if there is no such folder.

    Args:
        path: A folder of this machine, or an address: s3://, gs://, az://.
        s3_credentials: `S3Credentials`, or None for those of the environment.

    Raises:
        ValueError: there is no such bucket, its server does not answer, or refuses. They are also errors of
            `penstock.open`.
    """
    if scheme_of(path) is None:
        found = (entry.name for entry in Path(path).glob(_PATTERN) if not entry.name.startswith("."))
        return sorted(os.path.join(path, name) for name in found)  # noqa: PTH118 - `path` as it is spelled
    with value_errors():
        warn_of_variables()
        folder = _Folder(path, s3_credentials)
        return sorted(folder.address(key) for key in folder.keys(recursive=False) if fnmatchcase(key, _PATTERN))


def pull_files(
    model_path: str,
    dst: str,
    allow_pattern: Sequence[str] | None = None,
    ignore_pattern: Sequence[str] | None = None,
    s3_credentials: Any = None,
) -> None:
    """Copies files of a folder in a bucket, and of the folders in it, to a folder of this machine.

    A file has its name when all of it is there. Files that are there already are replaced.

    Args:
        model_path: An address: s3://, gs://, az://.
        dst: The folder. It is made if there is something to copy.
        allow_pattern: Only files whose key one of these patterns of shells matches. A key is the whole path in the
            bucket, and ``*`` matches slashes too. None: all.
        ignore_pattern: Of these, no files whose key one of these patterns matches.
        s3_credentials: As in `list_safetensors`.

    Raises:
        NotImplementedError: ``model_path`` is a path of this machine.
        ValueError: as `list_safetensors`; a key leads out of the folder.
        WriteError: (an OSError) the folder cannot be written to.
    """
    if scheme_of(model_path) is None:
        raise NotImplementedError(f"{model_path}: files are pulled from s3://, gs:// and az://, not from a folder here")
    with value_errors():
        warn_of_variables()
        folder = _Folder(model_path, s3_credentials)
        keys = [key for key in folder.keys(recursive=True) if _is_wanted(key, allow_pattern, ignore_pattern)]
        if keys:
            folder.copy(keys, Path(dst))


def _is_wanted(key: str, allowed: Sequence[str] | None, ignored: Sequence[str] | None) -> bool:
    if allowed is not None and not any(fnmatchcase(key, pattern) for pattern in allowed):
        return False
    return not any(fnmatchcase(key, pattern) for pattern in ignored or ())


class _Folder:
    """A folder in a bucket or container: the objects whose keys begin with its path."""

    def __init__(self, address: str, credentials: Any) -> None:
        scheme, _, rest = address.partition("://")
        bucket, _, path = rest.partition("/")
        self._bucket, self._prefix = f"{scheme}://{bucket}/", path.rstrip("/") + "/" * bool(path.rstrip("/"))
        self._storage = storage_for([address], credentials)

    def address(self, key: str) -> str:
        """The address of an object."""
        return self._bucket + key

    def keys(self, recursive: bool) -> list[str]:
        """The keys of all objects in it, without those that stand for folders."""
        found, folders = [], [self._prefix]
        while folders:
            prefix = folders.pop()
            for name in self._names(prefix):
                if not name.endswith("/"):
                    found.append(prefix + name)
                elif recursive:
                    folders.append(prefix + name)
        return sorted(found)

    def _names(self, prefix: str) -> list[str]:
        try:
            return _core.names_in(self.address(prefix), None, self._storage, folders=True)
        except NotFoundError as error:
            if error.status is not None:  # there is no such bucket
                raise
            return []
        finally:
            warn_of_unchecked()

    def copy(self, keys: Sequence[str], into: Path) -> None:
        """Copies these objects into a folder of this machine, in folders as their keys say."""
        place = self.address(self._prefix)
        names = [checked(key.removeprefix(self._prefix), place) for key in keys]
        for name in names:
            try:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                text = f"cannot make the folder: {error}"
                raise WriteError(text, path=str((into / name).parent), errno=error.errno) from error
        asked = [
            (self.address(key), str(into / name), None) for key, name in zip(keys, names, strict=True)
        ]  # None: no version of it is there
        with under_way(f"a pull of {place}"):
            pull = _core.Pull.start(asked, make_options(None), self._storage)
            try:
                while not pull.wait(INTERVAL):
                    pass
            finally:
                pull.close()


class ObjectStorageModel:
    """A folder of this machine with the files of a model in a bucket, which one process of several copies.

    Use it as a context manager, and call `pull_files` in it. Processes with the same ``dst`` take turns, by a lock on
    ``dst`` + ".lock" (flock: processes of one machine only). The first one copies. When it leaves the context without
    an exception, the folder is complete: a file ``.runai_complete`` says so, and `pull_files` of the others does
    nothing. After an exception the next process empties the folder and copies anew. Lock and file are those of Run:ai's
    own streamer: programs with either may share a folder.

        with ObjectStorageModel(model_path=address, dst=folder) as model:
            model.pull_files(allow_pattern=["*.safetensors"])

    Args:
        model_path: An address: s3://, gs://, az://.
        dst: The folder. What is in it goes, unless it is complete.
        s3_credentials: As in `list_safetensors`.

    Attributes:
        dir: The folder.

    Raises:
        ValueError: ``model_path`` is a path of this machine.
        OSError: the lock file cannot be made, or the folder not be emptied.
    """

    SENTINEL_NAME = ".runai_complete"

    def __init__(self, model_path: str, dst: str, s3_credentials: Any = None) -> None:
        if scheme_of(model_path) is None:
            raise InvalidError(f"model_path={model_path!r} is no address of a bucket: give s3://, gs:// or az://")
        self.dir = dst.rstrip("/") or "/"
        self._model_path, self._credentials = model_path.rstrip("/") + "/", s3_credentials
        self._sentinel = Path(self.dir, self.SENTINEL_NAME)
        self._lock: TextIO | None = Path(f"{self.dir}.lock").open("a")  # noqa: SIM115 - `_release` closes it
        try:
            self._skip = self._is_complete()
        except BaseException:  # also Ctrl-C: others wait for the lock
            self._release()
            raise

    def _is_complete(self) -> bool:
        """Waits for the lock. True, with a lock that is shared, if the folder is complete. False: it is empty."""
        assert self._lock is not None
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        if self._sentinel.exists():
            return True
        # Not from shared to exclusive in one step: two that do so wait for each other for ever
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if self._sentinel.exists():
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return True
        folder = Path(self.dir)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return False

    def pull_files(
        self, allow_pattern: Sequence[str] | None = None, ignore_pattern: Sequence[str] | None = None
    ) -> None:
        """`pull_files` of the model into the folder; nothing if it is complete."""
        if not self._skip:
            pull_files(self._model_path, self.dir, allow_pattern, ignore_pattern, self._credentials)

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()  # which releases it

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self._release()

    def __enter__(self) -> ObjectStorageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Notes that the folder is complete, unless there was an exception, and releases the lock.

        Raises:
            RuntimeError: nothing was copied, or the note cannot be written.
        """
        try:
            if kind is None and not self._skip:
                self._note()
        finally:
            self._release()

    def _note(self) -> None:
        if not any(entry != self._sentinel for entry in Path(self.dir).iterdir()):
            text = f"no file of {self._model_path} was copied: look at the address and the patterns"
            raise NothingPulledError(text, path=self.dir)
        try:
            self._sentinel.touch()
        except OSError as error:
            text = f"cannot write {self._sentinel}, which says that the folder is complete: {error}"
            raise RuntimeError(text) from error

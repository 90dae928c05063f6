"""Weights of LoRA adapters for an engine's workers: from their address, or from a copy in memory. `_lora` finds them.

An engine evicts adapters, and opens them again in the middle of a step. vLLM ends if that fails. So each worker keeps
copies of tensors, up to a bound. An adapter with a copy needs no request.

To copy an adapter takes longer than to map it. So the copy of a local file is made after the load, in a thread, from
mapped files under a lease: a program that wants to write to the file, or truncate it, waits until the copy is there.
Where the kernel gives no lease, the copy is made before the engine gets the adapter.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .._checkpoint import Checkpoint
from .._checkpoint import open as open_checkpoint
from .._core import Options
from .._errors import ChangedError, InvalidError, PenstockError, UnknownTensorError
from .._paths import without_secrets
from ._lora import NOTE, WEIGHTS
from ._lora_settings import LoraSettings
from ._pins import check_pinned, pinned_in
from ._remote import is_remote

if TYPE_CHECKING:
    from ._mapped import Mapped

logger = logging.getLogger("penstock")

__all__ = ["AdapterWeights", "KeptAdapters", "weights_of"]


def weights_of(file: str, settings: LoraSettings) -> str | None:
    """The address of the weights for a file that an engine opens; None if the file is not from `Adapters`.

    Raises:
        InvalidError: the note beside the file names a place that is not below the prefix.
    """
    path = Path(file)
    if path.name != WEIGHTS:
        return None
    try:
        note = json.loads((path.parent / NOTE).read_bytes())
    except FileNotFoundError:
        return None
    address = str(note["weights"])
    if not settings.contains(address):
        raise InvalidError(f"{path.parent}: its weights are at {without_secrets(address)}, not below the prefix")
    return address


class Copying:
    """The copy of a leased file, which a thread makes: pages of the mapping become private memory in their places.

    Args:
        mapped: The file. All of its tensors have been given.
        file: The engine's name for it.
    """

    def __init__(self, mapped: Mapped, file: str) -> None:
        self._mapped: Mapped | None = mapped
        self._file = file
        self._owner = os.getpid()
        self._ended = threading.Event()
        self._good = False

    def start(self, failed: Callable[[], None]) -> None:
        """Starts the thread. `failed` is called, without a lock, if the copy cannot be used."""
        # Not a daemon: the interpreter waits for it
        thread = threading.Thread(target=self._copy, args=(failed,), name="penstock-adapter")
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter ends
            self._copy(failed)

    def _copy(self, failed: Callable[[], None]) -> None:
        mapped, self._mapped = self._mapped, None
        try:
            if mapped is not None:
                mapped.close()
            self._good = True
        except Exception as error:
            logger.warning("penstock: no copy of the adapter in %s is kept: %s", self._file, error)
        finally:
            self._ended.set()
            if not self._good:
                failed()

    def wait(self) -> bool:
        """Waits until the copy is made. False: it cannot be used. A forked child has no lease and no thread."""
        if os.getpid() != self._owner:
            return self._ended.is_set() and self._good
        self._ended.wait()
        return self._good


class Kept(NamedTuple):
    """A copy of an adapter in memory."""

    tensors: dict[str, Any]
    """In the order of the file. The engine never gets these tensors, only clones: it scales tensors in place."""
    metadata: dict[str, str]
    nbytes: int
    copying: Copying | None
    """The maker of the copy. None: the copy was complete before the engine got the adapter."""


class KeptAdapters:
    """Copies of the adapters that a worker used last.

    Args:
        most_bytes: The limit for all copies together. The least recently used copy goes first. A larger adapter is not
            kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        #: By the engine's file, which stands for one version. The most recently used copy is last.
        self._kept: dict[str, Kept] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(one.nbytes for one in self._kept.values())

    def get(self, file: str) -> Kept | None:
        """Returns the copy of an adapter, or None. Waits for a copy that a thread still makes."""
        with self._lock:
            found = self._kept.pop(file, None)
            if found is not None:
                self._kept[file] = found
        if found is None or found.copying is None or found.copying.wait():
            return found
        self._drop(file, found)
        return None

    def _drop(self, file: str, one: Kept) -> None:
        with self._lock:
            if self._kept.get(file) is one:
                del self._kept[file]

    def _make_room(self, file: str, nbytes: int) -> None:
        """Drops the copy of this file, and the least recently used copies. The caller holds the lock."""
        self._kept.pop(file, None)
        while self._kept and self.nbytes + nbytes > self._most_bytes:
            del self._kept[next(iter(self._kept))]

    def put(self, file: str, checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> None:
        """Keeps a copy of an adapter, unless the adapter is larger than the limit.

        Args:
            file: The file that the engine opens.
            checkpoint: The adapter.
            tensors: Its torch tensors in CPU memory, by name. Nothing has written to them.

        Raises:
            ChangedError: the adapter has changed since it was opened.
        """
        nbytes = checkpoint.nbytes
        if nbytes > self._most_bytes:
            return
        with self._lock:
            self._make_room(file, nbytes)
        copies, copying = self._copies(file, checkpoint, tensors)
        one = Kept(copies, checkpoint.metadata, nbytes, copying)
        with self._lock:
            self._make_room(file, nbytes)
            self._kept[file] = one
        if copying is not None:
            copying.start(lambda: self._drop(file, one))

    @staticmethod
    def _copies(file: str, checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Copying | None]:
        """A copy, and what makes it if it is not made yet."""
        if not any(map(is_remote, checkpoint.files)):
            from ._mapped import KEPT, Mapped, NotMapped

            if checkpoint.nbytes < KEPT:  # under one lease there is no more
                try:
                    mapped = Mapped(checkpoint, None, Options(), always=True)
                except ChangedError:
                    raise
                except NotMapped as why:
                    logger.debug("penstock: the adapter in %s is copied before it is given: %s", file, why)
                except PenstockError as error:  # the engine has its tensors: this must not fail the load
                    logger.warning("penstock: the adapter in %s is copied before it is given: %s", file, error)
                else:
                    return dict(mapped.weights()), Copying(mapped, file)
        return {name: tensor.clone() for name, tensor in tensors.items()}, None


class AdapterWeights:
    """The weights of an adapter, in place of the handle that `safetensors.safe_open` gives. One load brings all.

    Args:
        file: The file that the engine opens. It has the header only.
        address: The address of the weights.
        kept: The copies of this worker. A load adds one.

    Raises:
        ChangedError: the adapter was replaced since it was resolved.
        PenstockError: as `penstock.open`. An adapter with a copy raises neither.
    """

    def __init__(self, file: str, address: str, kept: KeptAdapters) -> None:
        self._file, self._place, self._keeper = file, without_secrets(address), kept
        self._tensors: Mapping[str, Any] | None = None
        self._kept = kept.get(file)
        if self._kept is not None:
            return
        self._checkpoint = open_checkpoint(address)
        pinned: Mapping[str, str] | None = pinned_in(Path(file).parent)
        try:
            check_pinned(self._checkpoint, pinned or {}, "it was resolved")
        except ChangedError as error:
            text = "the adapter was replaced since it was resolved: unload it in the engine, and ask again"
            raise ChangedError(f"{self._place}: {text}", path=self._place) from error

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return self._checkpoint.keys() if self._kept is None else list(self._kept.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def metadata(self) -> dict[str, str]:
        """The ``__metadata__`` of the file."""
        return self._checkpoint.metadata if self._kept is None else dict(self._kept.metadata)

    def get_tensor(self, name: str) -> Any:
        """A tensor, in CPU memory, that the caller may write to. The first call loads all of them.

        Raises:
            UnknownTensorError: there is none of this name.
            PenstockError: as `Checkpoint.load`.
        """
        tensors = self._loaded() if self._kept is None else self._kept.tensors
        if name not in tensors:
            raise UnknownTensorError(f"no tensor {name!r}", path=self._place, tensor=name)
        return tensors[name] if self._kept is None else tensors[name].clone()

    def _loaded(self) -> Mapping[str, Any]:
        if self._tensors is None:
            self._tensors = self._checkpoint.load("cpu")
            self._keeper.put(self._file, self._checkpoint, self._tensors)
        return self._tensors

    def __enter__(self) -> AdapterWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors = None

"""LoRA adapters by name, below one prefix: found, checked, and loaded without being written to a disk.

An engine wants a folder for an adapter. It gets one with the adapter's configuration, and with the header of its
weights: so names and shapes are there, and whatever reads a tensor from that file fails, because it ends there. A note
beside them says where the weights are, and `_lora_weights` loads them from there, in the version that was found.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

from .. import _core
from .._checkpoint import Checkpoint
from .._checkpoint import open as open_checkpoint
from .._errors import ChangedError, InvalidError, LimitError, NotFoundError
from .._paths import without_secrets
from .._running import under_way
from ._fetched import headers_of
from ._lora_settings import BASES, MOST_ADAPTERS, MOST_BYTES, LoraSettings
from ._pins import PINS, pins_of
from ._remote import temporary_directory

logger = logging.getLogger("penstock")

CONFIGURATION = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: Beside them: where the weights are.
NOTE = ".penstock-adapter"
#: Bytes of a configuration. One with a thousand names of modules has 50 KB.
_LONGEST = 1 << 20
#: How often the configuration is read until it is the same before and after the weights' header.
_TRIES = 3
#: An unknown name is remembered for this many seconds, and at most this many names are.
_UNKNOWN_SECONDS = 10.0
_MOST_UNKNOWN = 10_000
#: A folder that was released is removed after so many seconds: the engine may not have heard yet that a request ended.
_RELEASED_SECONDS = 600.0


class Adapters:
    """The adapters of one server.

    Args:
        settings: Where they are, and what they may be.
    """

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._root: str | None = None
        self._number = 0
        self._folders: dict[str, str] = {}
        #: Folders that nobody refers to, the oldest first, and the time when each is removed. Without the lock: a
        #: collector may call `release` on a thread that has it.
        self._released: deque[tuple[str, float]] = deque()
        #: Names and base models without an adapter, the oldest first, and the time when each is forgotten.
        self._unknown: dict[tuple[str, str], float] = {}
        atexit.register(self.close)

    def find(self, name: str, base: str) -> str | None:
        """The folder for an adapter, or None if there is none of this name for this base model.

        After None the same question gets None for `_UNKNOWN_SECONDS`, without a request.

        Args:
            name: From a request: it never leads out of the prefix.
            base: What the engine calls the model that it serves.

        Raises:
            LimitError: the adapter is too large, or there are too many.
            ChangedError: it is being replaced.
            PenstockError: as `penstock.open`; whatever keeps it from being read, except that it is not there.
        """
        place = self._settings.place_of(name)
        if place is None:
            logger.debug("penstock: no adapter can be called %r", name[:80])
            return None
        if self._is_unknown(name, base):
            return None
        try:
            with under_way(f"a search for the adapter {name}"):
                found = self._read(place)
        except NotFoundError as error:
            logger.debug("penstock: there is no adapter %s: %s", name, error)
            found = None
        if found is None or not self._suits(name, found[0], base):
            self._remember_unknown(name, base)
            return None
        configuration, address, checkpoint = found
        if checkpoint.nbytes > self._settings.most_bytes:
            text = f"the adapter has {checkpoint.nbytes} bytes, and {MOST_BYTES} allows {self._settings.most_bytes}"
            raise LimitError(text, path=without_secrets(checkpoint.files[0]))
        return self._folder(name, configuration, address, checkpoint)

    def release(self, folder: str) -> None:
        """Says that nothing in this process refers to a folder any more: it may be removed, when another one is made.

        It stays for `_RELEASED_SECONDS`. May be called on any thread, at any time.
        """
        self._released.append((folder, time.monotonic() + _RELEASED_SECONDS))

    def _remove_released(self) -> None:
        """Removes the folders that were released long ago. The caller holds the lock."""
        if os.getpid() != self._owner:
            return
        while self._released and self._released[0][1] <= time.monotonic():
            folder, _ = self._released.popleft()
            shutil.rmtree(folder, ignore_errors=True)
            for name in [name for name, newest in self._folders.items() if newest == folder]:
                del self._folders[name]

    def close(self) -> None:
        """Removes the folders. A forked child has none of its own."""
        if os.getpid() == self._owner and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def _is_unknown(self, name: str, base: str) -> bool:
        with self._lock:
            return time.monotonic() < self._unknown.get((name, base), 0.0)

    def _remember_unknown(self, name: str, base: str) -> None:
        with self._lock:
            self._unknown.pop((name, base), None)
            if len(self._unknown) >= _MOST_UNKNOWN:
                del self._unknown[next(iter(self._unknown))]
            self._unknown[name, base] = time.monotonic() + _UNKNOWN_SECONDS

    def _read(self, place: str) -> tuple[bytes, str, Checkpoint] | None:
        """The configuration, where the weights are, and these, of one version."""
        address = f"{place}/{WEIGHTS}"
        if self._settings.is_local and not self._is_inside(place):
            return None
        if place.startswith("hf://"):
            from .._hub import parse
            from .._hub_folder import HubFolder

            try:
                parse(place)
            except InvalidError:  # no repository can be called so
                return None
            folder = HubFolder(place, _LONGEST)
            if not {CONFIGURATION, WEIGHTS} <= set(folder.names("")):
                return None
            address = f"{folder.at}/{WEIGHTS}"
            return folder.read([CONFIGURATION])[0], address, open_checkpoint(address)
        path = f"{place}/{CONFIGURATION}"
        [before] = _core.contents([path], _LONGEST, None, None)
        for _ in range(_TRIES):
            checkpoint = open_checkpoint(address)
            [after] = _core.contents([path], _LONGEST, None, None)
            if before == after:
                return before, address, checkpoint
            before = after
        raise ChangedError("the adapter is being replaced: ask again later", path=without_secrets(path))

    def _is_inside(self, place: str) -> bool:
        """Whether the folder and its files are below the prefix, links followed."""
        for path in (place, f"{place}/{CONFIGURATION}", f"{place}/{WEIGHTS}"):
            if not os.path.lexists(path):
                return False
            real = os.path.realpath(path)
            if not real.startswith(f"{self._settings.prefix}/"):
                logger.warning("penstock: %s leads to %s, out of the folder of adapters: it is not used", path, real)
                return False
        return True

    def _suits(self, name: str, configuration: bytes, base: str) -> bool:
        """Whether it is an adapter for the model that is served."""
        try:
            settings = json.loads(configuration)
            kind, of = settings["peft_type"], settings["base_model_name_or_path"]
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("penstock: %s of adapter %s is not one: %r", CONFIGURATION, name, error)
            return False
        if kind != "LORA":
            logger.warning("penstock: adapter %s is of the type %r, not LORA", name, kind)
            return False
        if self._settings.any_base or of == base or of in self._settings.bases:
            return True
        logger.warning(
            "penstock: adapter %s is for the model %r, and %r is served: if that is the same, set %s=%s",
            name, of, without_secrets(base), BASES, of,
        )  # fmt: skip
        return False

    def _folder(self, name: str, configuration: bytes, address: str, checkpoint: Checkpoint) -> str:
        headers = headers_of(checkpoint)
        with self._lock:
            self._remove_released()
            if name not in self._folders and len(self._folders) >= self._settings.most_adapters:
                text = f"{len(self._folders)} adapters were resolved, as many as {MOST_ADAPTERS} allows"
                raise LimitError(f"adapter {name}: {text}")
            # After a restore of the process elsewhere the folder is not there
            if self._root is None or not Path(self._root).is_dir():
                self._root = tempfile.mkdtemp(prefix="penstock-lora-", dir=temporary_directory())
            self._number += 1
            folder = Path(self._root, f"{self._number}-{name.rpartition('/')[2]}")
            folder.mkdir(0o700)
            (folder / CONFIGURATION).write_bytes(configuration)
            (folder / PINS).write_bytes(pins_of(checkpoint))
            for content in headers.values():
                (folder / WEIGHTS).write_bytes(content)
            (folder / NOTE).write_text(json.dumps({"weights": address}))
            # The engine asks again for a name that it has unloaded. Requests that wait name the older folder
            self._folders[name] = str(folder)
        return str(folder)

"""fastsafetensors' loaders that iterate: `ParallelLoader`, and `AutoLoader` with its configuration file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .._checkpoint import Checkpoint, open_as
from .._core import Options
from .._errors import InvalidError, NotFoundError, UnsupportedError
from .._paths import local_path
from ._errors import ClosedError
from ._fastsafetensors_loader import _BOUNCE_KB, _THREADS, check_framework, group_of, settings_for
from ._fastsafetensors_types import device_for
from ._process_group import told_of_stream

CONFIG_ENV_VAR, DEFAULT_CONFIG_PATH = "FASTSAFETENSORS_CONFIG", "fastsafetensors.json"
# Settings that all loaders share, which are not handed on to a single one
_OF_ALL_LOADERS = ("framework", "debug_log", "set_numa", "disable_cache")
_COPIERS = ("gds", "nogds", "fgds", "unified", "dstorage")


class BudgetInfeasibleError(InvalidError):
    """The tensors do not fit into ``device_memory_budget``. A ValueError."""


class ParallelLoader:
    """Yields every tensor of some files while the next ones are being read.

    `iterate_weights` opens the files. With ``device_memory_budget`` they are opened at once, to be compared with it.

    Args:
        pg: None, `SingleGroup`, or a process group. Its ranks load together, and each yields every tensor.
        hf_weights_files: Paths. They are read in natural order.
        use_tqdm_on_load: Whether to show progress, on a terminal.
        device, bbuf_size_kb, max_threads, framework: As in `SafeTensorsFileLoader`.
        tensor_filter: A predicate on the name: what it says no to is not read.
        all_local: Every process loads for itself, whatever group it is in.
        max_batch_bytes: Most bytes read ahead of the consumer. The tensor that is next always fits.
        device_memory_budget: Bytes that there is room for on the device. What is read ahead is bounded by what the
            tensors leave of it.
        accumulate_resident: Whether the consumer keeps the tensors; only the budget depends on it.
        resident_tensor: A predicate on the name: which ones it keeps.
        borrowed_tensors: On the CPU: map files where that is possible, rather than copy them into private memory.

    queue_size, nogds, use_fgds, set_numa, debug_log, use_chunk_budget_as_allocation_size, broadcast_run_bytes,
    broadcast_run_tensors and overlap_io are accepted, and mean nothing here: tensors are read to where they stay.

    Raises:
        UnsupportedError: a framework other than torch.
        BudgetInfeasibleError: (a ValueError) the tensors that are kept, and the largest other one, exceed the budget.
        InvalidError: (a ValueError) settings that make no sense, alone or together.
    """

    def __init__(
        self,
        pg: Any,
        hf_weights_files: Sequence[str | os.PathLike[str]],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        bbuf_size_kb: int = _BOUNCE_KB,
        max_threads: int = _THREADS,
        nogds: bool = False,
        set_numa: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        tensor_filter: Callable[[str], bool] | None = None,
        all_local: bool = False,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        use_fgds: bool = False,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
    ) -> None:
        check_framework(framework)
        self._ranks = None if all_local else group_of(pg)
        if max_concurrent_producers != 1:
            raise InvalidError(f"max_concurrent_producers={max_concurrent_producers!r}: give 1")
        if borrowed_tensors and self._ranks is not None:
            raise InvalidError("borrowed_tensors=True: give all_local=True with it, or a group of one rank")
        if borrowed_tensors and accumulate_resident:
            raise InvalidError("borrowed_tensors=True: give accumulate_resident=False with it")
        if resident_tensor is not None and not accumulate_resident:
            raise InvalidError("resident_tensor: give accumulate_resident=True with it")
        for name, limit in (("max_batch_bytes", max_batch_bytes), ("device_memory_budget", device_memory_budget)):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise InvalidError(f"{name}={limit!r}: give None or a number of bytes")
        self._device, self._progress = device_for(device), None if use_tqdm_on_load else False
        self._settings = settings_for(device, bbuf_size_kb, max_threads)
        if borrowed_tensors:
            self._settings.pop("copy", None)
        self._files, self._filter = list(hf_weights_files or ()), tensor_filter
        self._checkpoint: Checkpoint | None = None
        self._names: list[str] | None = None
        window = max_batch_bytes
        if device_memory_budget is not None:
            kept = (resident_tensor or (lambda name: True)) if accumulate_resident else (lambda name: False)
            spare = self._spare(device_memory_budget, kept)
            window = spare if window is None else min(window, spare)
        if window is not None:
            self._settings["window"] = min(window, Options().window) if max_batch_bytes is None else window
        self._closed = False

    def _opened(self) -> Checkpoint:
        """The checkpoint, opened once."""
        if self._checkpoint is None:
            checkpoint = open_as("hf_weights_files", self._files, network=False)
            if self._filter is not None:
                self._names = [name for name in checkpoint if self._filter(name)]
            self._checkpoint = checkpoint
        return self._checkpoint

    def _spare(self, budget: int, kept: Callable[[str], bool]) -> int:
        """The part of the budget that is left for reading ahead, beside the kept tensors and the largest other one."""
        resident, passing = 0, 0
        if self._files:
            checkpoint = self._opened()
            for name in checkpoint if self._names is None else self._names:
                nbytes = checkpoint[name].nbytes
                if kept(name):
                    resident += nbytes
                else:
                    passing = max(passing, nbytes)
        if resident + passing > budget:
            raise BudgetInfeasibleError(
                f"device_memory_budget={budget}: kept tensors have {resident} bytes, the largest other one {passing}"
            )
        return budget - resident - passing

    def iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """Opens the files, and yields (name, tensor) in file order. Tensors own their memory and may be kept.

        Closing the iterator stops the reading. Raises ClosedError after `close`, and what `penstock.open` raises.
        """
        if self._closed:
            raise ClosedError("the loader has been closed")
        if not self._files:
            return iter(())
        loads = None if self._ranks is None else self._ranks.loads()
        with told_of_stream(loads):
            checkpoint = self._opened()
        group = None if loads is None else loads.member
        return checkpoint.stream(
            self._device, self._names, framework="pt", progress=self._progress, options=self._settings, group=group
        )

    def close(self) -> None:
        """Nothing can be read any more. An iterator that is under way goes on, and tensors stay. Idempotent."""
        self._closed = True


@dataclass
class LoaderConfig:
    """The configuration file of an `AutoLoader`. Fields that mean nothing here are kept and ignored."""

    loader: str = "base"
    framework: str = "pytorch"
    debug_log: bool = False
    set_numa: bool = True
    disable_cache: bool = True
    use_pipeline: bool = False
    max_concurrent_producers: int = 1
    queue_size: int = 0
    use_tqdm_on_load: bool = True
    max_batch_bytes: int | None = None
    use_chunk_budget_as_allocation_size: bool = False
    device_memory_budget: int | None = None
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of single loaders by the loader's name, such as {"base": {"max_threads": 8}}."""

    def __post_init__(self) -> None:
        if self.max_concurrent_producers != 1:
            raise InvalidError(f"max_concurrent_producers={self.max_concurrent_producers!r}: give 1")

    def get_extension_config(self, name: str) -> dict[str, Any]:
        """The settings of the loader called ``name``, without those that all loaders share; a copy."""
        section = self.sections.get(name, {})
        return {key: value for key, value in section.items() if key not in _OF_ALL_LOADERS}

    def create_parallel_kwargs(self) -> dict[str, Any]:
        """The keywords of `ParallelLoader` that this configuration sets. ``queue_size`` is -1 without a pipeline."""
        names = ["max_batch_bytes", "use_chunk_budget_as_allocation_size", "device_memory_budget"]
        if self.use_pipeline:
            names += ["max_concurrent_producers", "queue_size", "use_tqdm_on_load"]
        settings = {name: getattr(self, name) for name in names}
        return settings if self.use_pipeline else {**settings, "queue_size": -1}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoaderConfig:
        """A configuration from a mapping: the groups "parallel" and "debug" are taken apart, others are sections."""
        flat: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        for name, value in data.items():
            if isinstance(value, Mapping) and name not in ("parallel", "debug"):
                sections[name] = dict(value)
            else:
                flat.update(value if isinstance(value, Mapping) else {name: value})
        known = {known.name for known in fields(cls)} - {"sections"}
        return cls(**{name: value for name, value in flat.items() if name in known}, sections=sections)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> LoaderConfig:
        """A configuration from a JSON file."""
        local_path(path, "path")
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError as error:
            raise NotFoundError(f"no configuration file {os.fspath(path)}", path=os.fspath(path)) from error
        except ValueError as error:
            raise InvalidError(f"{os.fspath(path)}: {error}", path=os.fspath(path)) from error
        if not isinstance(data, dict):
            raise InvalidError(f"{os.fspath(path)}: a JSON object is expected", path=os.fspath(path))
        return cls.from_dict(data)


def load_config() -> LoaderConfig:
    """From the file that FASTSAFETENSORS_CONFIG names, or else fastsafetensors.json here, or else the defaults."""
    named = os.environ.get(CONFIG_ENV_VAR)
    if named is not None:
        return LoaderConfig.from_file(named)
    return LoaderConfig.from_file(DEFAULT_CONFIG_PATH) if Path(DEFAULT_CONFIG_PATH).is_file() else LoaderConfig()


class AutoLoader:
    """A `ParallelLoader` whose settings come from a file: see `load_config`.

    Raises:
        UnsupportedError: loader "3fs".
        InvalidError: (a ValueError) another loader that is not "base", or a ``copier_type`` that does not exist.
    """

    def __init__(self, pg: Any, hf_weights_files: Sequence[str | os.PathLike[str]], device: Any = "cpu") -> None:
        self._config = config = load_config()
        if config.loader == "3fs":
            raise UnsupportedError('loader "3fs": only "base" is supported here; mount the file system instead')
        if config.loader != "base":
            raise InvalidError(f'loader {config.loader!r}: give "base"')
        base = config.get_extension_config("base")
        if base.get("copier_type", "gds") not in _COPIERS:
            raise InvalidError(f"copier_type {base['copier_type']!r}: give one of {', '.join(_COPIERS)}")
        self._loader = ParallelLoader(
            pg,
            hf_weights_files,
            config.max_concurrent_producers,
            use_tqdm_on_load=config.use_tqdm_on_load,
            device=device,
            bbuf_size_kb=base.get("bbuf_size_kb", _BOUNCE_KB),
            max_threads=base.get("max_threads", _THREADS),
            framework=config.framework,
            max_batch_bytes=config.max_batch_bytes,
            device_memory_budget=config.device_memory_budget,
        )

    @property
    def config(self) -> LoaderConfig:
        """The configuration that was found."""
        return self._config

    def iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """As of a `ParallelLoader`."""
        return self._loader.iterate_weights()

    def close(self) -> None:
        """As of a `ParallelLoader`."""
        self._loader.close()

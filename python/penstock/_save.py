"""Saving: tensors become safetensors files, one or many."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import cache, partial, reduce
from importlib import import_module
from operator import mul
from typing import Any

from . import _core, _running
from ._choices import LAYOUTS, ORDERS, Layout, Order, Storage, check_choice
from ._core import Options
from ._described import Described
from ._dlpack import DLTensor
from ._dtypes import DTYPES
from ._errors import (
    ArgumentTypeError,
    InternalError,
    InvalidError,
    MissingDtypeError,
    NoValuesError,
    OutOfMemoryError,
    PenstockError,
    WriteError,
)
from ._events import observe
from ._options import make_options
from ._paths import is_web, target_folder, target_path, without_secrets
from ._progress import INTERVAL, Meter, Progress
from ._report import Report
from ._text import check_text
from ._unsaveable import check, check_memory, check_one, not_a_tensor, without_counterpart, without_memory

#: No shard is larger than a file can be.
_NO_LIMIT = 1 << 63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


@cache
def _torch_names() -> dict[Any, str]:
    import torch

    return {getattr(torch, d.torch): name for name, d in DTYPES.items() if d.torch and hasattr(torch, d.torch)}


def _of_torch(name: str, tensor: Any) -> Described:
    import torch

    dtype = _torch_names().get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise without_counterpart(name, tensor)
    if tensor.device.type == "meta":
        raise NoValuesError(f"tensor {name} is on the meta device: it has no values to save", tensor=name)
    if type(tensor) is not torch.Tensor:
        check_one(name, tensor)
    check_memory(name, tensor)
    plain = tensor.detach()
    packed = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    known = plain.device.type in ("cpu", "cuda")
    late = not packed or not known
    gpu = plain.device.index if plain.device.type == "cuda" else None
    try:
        address = plain.data_ptr() if known else 0
    except RuntimeError:  # of tensors that only stand for others
        address = 0
    if known and not address and plain.numel():
        raise without_memory(name, tensor)
    shape = tuple(plain.shape)
    if dtype == "F4" and shape:
        shape = (*shape[:-1], 2 * shape[-1])
    if late:
        return Described(dtype, shape, None, None, plain, partial(fill_torch, plain, plain.dtype))
    return Described(dtype, shape, gpu, address, plain)


def fill_torch(tensor: Any, dtype: Any, memory: memoryview) -> None:
    """Writes a torch tensor of any device, packed and cast to ``dtype``, to memory."""
    import torch

    tensor = tensor.as_subclass(torch.Tensor)  # a subclass might keep the destination
    if dtype == tensor.dtype and dtype.itemsize == 1:
        # There are dtypes that torch cannot copy
        tensor, dtype = tensor.view(torch.uint8), torch.uint8
    packed = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tensor.shape)
    try:
        packed.copy_(tensor)
    finally:
        del packed  # an error's traceback would keep it, and the memory goes


def fill_numpy(array: Any, dtype: Any, memory: memoryview) -> None:
    """Writes an array, packed and cast to ``dtype``, to memory."""
    import numpy as np

    packed = np.frombuffer(memory, dtype).reshape(array.shape)
    try:
        packed[...] = array
    finally:
        del packed


@cache
def _numpy_names() -> dict[str, str]:
    names = {d.ml_dtypes: name for name, d in DTYPES.items() if d.ml_dtypes}
    return names | {d.numpy: name for name, d in DTYPES.items() if d.numpy}


def _of_numpy(name: str, array: Any) -> Described:
    dtype = _numpy_names().get(array.dtype.name)
    if dtype is None:
        why = f"is an array of {array.dtype}: the format has no such dtype"
        if array.dtype.kind in "fc":
            why += f". Save `.astype({'complex64' if array.dtype.kind == 'c' else 'float64'!r})` of it"
        elif array.dtype.kind in "mM":
            why += ". Save `.view('int64')` of it, and the unit in the metadata"
        raise MissingDtypeError(f"tensor {name} {why}", tensor=name)
    swapped = sys.byteorder == "big" or array.dtype.byteorder == ">"
    if swapped or not array.flags.c_contiguous:
        little = array.dtype.newbyteorder("<") if swapped else array.dtype
        return Described(dtype, tuple(array.shape), None, None, array, partial(fill_numpy, array, little))
    return Described(dtype, tuple(array.shape), None, array.__array_interface__["data"][0], array)


def _of_dlpack(tensor: DLTensor) -> Described:
    kind, number = tensor.__dlpack_device__()
    return Described(*tensor._format, None if kind == 1 else number, tensor._view.address, tensor)


def describe(name: object, value: Any) -> Described:
    """The description of a tensor of any framework.

    Raises:
        InvalidError: it is no tensor, or has no values.
        UnsupportedError: the format lacks its dtype.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{name!r} is not a string: the name of a tensor is a string")
    check_text("the name of a tensor", name)
    if isinstance(value, Described):
        return value
    if isinstance(value, DLTensor):
        return _of_dlpack(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(name, value)
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if isinstance(value, numpy.ma.MaskedArray) and numpy.ma.is_masked(value):
            why = "has masked values, which no file can hold: save the result of `.filled()`, and its `.mask`"
            raise InvalidError(f"tensor {name} {why}", tensor=name)
        return _of_numpy(name, numpy.asarray(value))
    if name.endswith("_extra_state") and not hasattr(value, "shape"):
        raise not_a_tensor(name, value)
    if hasattr(value, "__array__") and hasattr(value, "shape"):  # jax, tensorflow, mlx
        return _of_numpy(name, import_module("numpy").asarray(value))
    raise InvalidError(f"{name} is a {type(value).__name__}: give tensors of torch, or arrays of numpy or JAX")


def _synchronize(tensors: list[Described]) -> None:
    """Waits for what torch still does to tensors on GPUs."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # Tensors of the core were complete when they were handed out. Torch may have written to them since, where it uses
    # GPUs at all.
    used = torch.cuda.is_initialized()
    for gpu in {t.gpu for t in tensors if t.gpu is not None and (used or not isinstance(t.keep, DLTensor))}:
        torch.cuda.current_stream(gpu).synchronize()


def size_of(size: int | str | None) -> int | None:
    """Bytes meant by ``5_000_000_000``, ``"5GB"`` or ``"4.5 GiB"``; None is no limit.

    Raises:
        InvalidError: if it is none of these.
    """
    if size is None:
        return None
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size if size < _NO_LIMIT else None
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None:
        raise InvalidError(f'max_shard_size={size!r}: give bytes, or a text such as "5GB" or "4.5GiB"')
    base = 1024 if found[3] else 1000
    nbytes = float(found[1]) * base ** " KMGT".index(found[2].upper() or " ")
    return max(1, int(nbytes)) if nbytes < _NO_LIMIT else None


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise ArgumentTypeError(f"metadata={metadata!r}: give a dict of strings")
    found = dict(metadata)
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ArgumentTypeError(f"metadata: {key!r}: {value!r}: keys and values must be strings")
        check_text("a key of the metadata", key)
        check_text(f"the metadata {key!r}", value)
    return found


def _fill(name: str, tensor: Described, memory: memoryview) -> None:
    """Writes a tensor that the save wants to its memory, to which nothing refers afterwards."""
    if tensor.fill is None:
        raise InternalError("the save asked for a tensor again; please report this")
    try:
        with memory:
            tensor.fill(memory)
    except PenstockError:
        raise
    except Exception as cause:
        torch = sys.modules.get("torch")
        full = (MemoryError, torch.cuda.OutOfMemoryError) if torch is not None else MemoryError
        kind = OutOfMemoryError if isinstance(cause, full) else WriteError
        raise kind(f"tensor {name} cannot be packed: {cause}") from cause


def _write(
    tensors: Mapping[str, Any],
    folder: str,
    name: str,
    metadata: Mapping[str, str] | None,
    most: int | None,
    layout: Layout,
    order: Order,
    fsync: bool,
    progress: Progress,
    options: Options | Mapping[str, Any] | None,
    storage: Storage | None,
    *,
    checkpoint: bool,
) -> tuple[Report, list[str]]:
    shown = without_secrets(folder)
    with observe("save", f"{shown}/{name}" if not checkpoint else shown) as seen:
        check_choice("layout", layout, LAYOUTS)
        check_choice("order", order, ORDERS)
        if not isinstance(fsync, bool):
            raise InvalidError(f"fsync={fsync!r}: give True or False")
        made = make_options(options)
        if not isinstance(tensors, Mapping):
            raise ArgumentTypeError(f"tensors: expected a dict of tensors by name, but got a {type(tensors).__name__}")
        found = {name: describe(name, value) for name, value in tensors.items()}
        _synchronize(list(found.values()))
        described = [(name, d.dtype, d.shape, d.gpu, d.address) for name, d in found.items()]
        listed = list(found.items())
        keep = [d.keep for d in found.values()]
        with _running.under_way(f"a save to {shown}"), Meter(progress, "save", seen) as meter:
            save = _core.Save.start(
                folder,
                name,
                described,
                _checked(metadata),
                made,
                layout=layout,
                order=order,
                most=most,
                sync=fsync,
                checkpoint=checkpoint,
                keep=keep,
                storage=storage,
            )
            try:
                while True:
                    over = save.wait(INTERVAL if meter.active else None)
                    wanted = save.wanted()
                    if wanted is not None:
                        number, memory = wanted
                        _fill(*listed[number], memory)
                        save.supplied()
                    elif over:
                        break
                    meter.update(*save.progress())
                meter.update(*save.progress(), final=True)
                report = Report(save.report(), tensors=len(found), fsync=fsync)
                seen.add(report)
                return report, save.files()
            finally:
                save.close()


def to_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, layout: Layout) -> bytes:
    """The content of a file with these tensors."""
    found = {name: describe(name, value) for name, value in tensors.items()}
    _synchronize(list(found.values()))
    listed = list(found.items())
    heads = [(name, d.dtype, d.shape) for name, d in listed]
    head, order = _core.head(heads, _checked(metadata), layout=layout, order="file")
    return b"".join([head, *(_bytes_of(*listed[number]) for number in order)])


def _bytes_of(name: str, tensor: Described) -> memoryview | bytes | bytearray:
    if tensor.fill is not None:
        memory = bytearray(reduce(mul, tensor.shape, DTYPES[tensor.dtype].bits) // 8)
        if memory:
            _fill(name, tensor, memoryview(memory))
        return memory
    kept: Any = tensor.keep
    if hasattr(kept, "untyped_storage"):
        import torch

        if not kept.numel():
            return b""
        return memoryview(kept.cpu().reshape(-1).view(torch.uint8).numpy())
    return memoryview(kept).cast("B") if kept.nbytes and kept.dtype.isbuiltin == 1 else bytes(kept.tobytes())


def _split(path: str) -> tuple[str, str]:
    """Folder and name, spelled as by pathlib, which `import penstock` has not brought: it takes 3 ms to import. Of an
    address, as it is spelled: its key is a string.
    """
    if is_web(path):
        folder, _, name = path.rpartition("/")
        return folder, name
    *above, name = [part for part in path.split("/") if part not in ("", ".")] or [""]
    return "/" * path.startswith("/") + "/".join(above) or ".", name


def _folder(directory: str | os.PathLike[str]) -> str:
    """The folder, or the address that names are added to."""
    place = target_path(directory, "directory")
    return target_folder(place, "directory") if is_web(place) else _split((place or ".") + "/x")[0]


def save_file(
    tensors: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    layout: Layout = "aligned",
    order: Order = "file",
    fsync: bool = True,
    progress: Progress = None,
    options: Options | Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> Report:
    """Saves tensors to one safetensors file. A save that fails leaves no partial file, and keeps the old file.

    Args:
        tensors: Tensors by name: of torch (on the CPU or GPUs), of numpy or JAX, or what ``framework="dlpack"`` loads
            (of any dtype, also F4 and F6). Tensors that are not contiguous, or are on other devices, are copied a few
            at a time.
        filename: The file. An old file is replaced when the new one is whole, not before; so is a symbolic link. It
            has the mode that the umask gives, or that of an old file of the same owner and group. If the owner
            differs, it has what old mode and umask both allow, and never setuid or setgid; if only the group differs,
            this holds for the permissions of the group.
        metadata: A dict of strings for the header. None writes none.
        layout: "aligned": the data begins at a page, and the order of the tensors keeps large ones aligned. "compact":
            the order and padding of safetensors' own writer.
        order: "file" keeps the order of ``tensors``, if the layout allows it. "layer" keeps the tensors of a layer
            together.
        fsync: True: wait until the file is on stable storage; the bytes go past the page cache. False: do not wait.
        progress: True, False, None (a progress bar on a terminal only), or a function that takes (bytes written, bytes
            in all).
        options: `Options`, or a dict with the same keywords. Only ``extent``, ``staging``, ``threads`` and
            ``stall_timeout`` have an effect.

    Returns:
        A report: ``nbytes``, ``file_bytes``, ``tensors``, ``seconds``, ``sync_seconds``, ``fill_seconds`` and
        ``write_seconds`` (sums over threads), ``gbps``, ``writes``, ``direct_bytes``, ``threads``, ``peak_staging``,
        ``fallbacks``, ``fsync``.

    Raises:
        InvalidError: a name, the metadata or an argument is invalid.
        UnsupportedError: the format lacks a dtype.
        NoSpaceError, WriteError, AccessError, NotFoundError: the file cannot be written. The old file is unchanged,
            unless the message says that the directory could not be brought to the disk.
        WriteError: a tensor cannot be packed.
        OutOfMemoryError: there is no memory for staging, or to pack a tensor.
    """
    named = target_path(filename, "filename")
    if named.endswith(("/", "/.")) or (is_web(named) and named.count("/") < 3):
        raise InvalidError(f"filename={without_secrets(named)!r}: this is a folder: give the name of a file in it")
    report, _ = _write(
        tensors, *_split(named), metadata, None, layout, order, fsync, progress, options, storage, checkpoint=False
    )
    return report


def save(
    tensors_or_module: Any,
    directory: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_size: int | str | None = "5GB",
    name: str = "model.safetensors",
    layout: Layout = "aligned",
    order: Order = "file",
    fsync: bool = True,
    progress: Progress = None,
    options: Options | Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> Report:
    """Saves a checkpoint to a folder: one file, or several shards and their index.

    The files get their names when all of them are whole, one after the other. If another program may read the folder at
    that moment, save to a new folder.

    Args:
        tensors_or_module: Tensors by name as for `save_file`, or a torch module. Tied tensors of a module are saved
            once, under the first of their names that the module does not tie to another; the metadata says which names
            are left out, and has "format": "pt". Views of other tensors are saved as tensors of their own.
        directory: The folder. It is made if it does not exist. Shards and indexes of an earlier save are removed after
            the new files have their names, except files that somebody has changed since.
        max_shard_size: The most bytes of tensors in one file, as a number or a text such as "5GB" or "4.5GiB". None is
            no limit. A tensor that is larger gets a file of its own.
        name: The name of the file. The names of shards are made from it.

    The other arguments, the report and the errors are those of `save_file`. ``files`` in the report lists the names of
    the files. If a file of an earlier save cannot be removed, the error says so, and the new files have their names.
    """
    tensors, more = (tensors_or_module, {}) if isinstance(tensors_or_module, Mapping) else _of_module(tensors_or_module)
    if not isinstance(name, str) or _split(name)[1] != name or not name:
        raise InvalidError(f"name={name!r}: give a file name")
    if os.fsencode(name).decode("utf-8", "replace") != name:
        raise InvalidError(f"name={name!r}: this is not UTF-8, and an index (JSON) cannot name such files")
    report, files = _write(
        tensors,
        _folder(directory),
        name,
        {**more, **(metadata or {})} if more or metadata is not None else None,
        size_of(max_shard_size),
        layout,
        order,
        fsync,
        progress,
        options,
        storage,
        checkpoint=True,
    )
    report["files"] = files
    return report


def _of_module(module: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a torch module, tied ones once, and metadata that says what was left out."""
    state_dict = getattr(module, "state_dict", None)
    if not callable(state_dict):
        raise InvalidError(f"a {type(module).__name__} is neither a mapping of names to tensors nor a torch module")
    from ._shared import tied

    state = dict(state_dict())
    check(state)
    found = tied(state, module)
    # transformers asks for the format
    return {name: tensor for name, tensor in state.items() if name not in found}, {"format": "pt", **found}

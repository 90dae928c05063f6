"""Saving: tensors become safetensors files, one or many."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import reduce
from operator import mul
from typing import Any, Literal, overload

from . import _core, _running
from ._choices import Layout, Order, Storage
from ._core import Options
from ._described import Described
from ._describing import checked_metadata, fill, synchronize
from ._describing import describe as describe
from ._describing import fill_numpy as fill_numpy
from ._describing import fill_torch as fill_torch
from ._dtypes import DTYPES
from ._errors import InvalidError
from ._events import observe
from ._late_imports import importing
from ._paths import is_web, target_folder, target_path, without_secrets
from ._progress import Meter, Progress
from ._report import Report
from ._save_job import SaveJob
from ._saving import SaveRequest, await_save, begin, described, report_of, supply_all, taking_turn
from ._unsaveable import check

#: No shard is larger than a file can be.
_NO_LIMIT = 1 << 63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


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


def _write(request: SaveRequest, tensors: Mapping[str, Any], progress: Progress) -> tuple[Report, list[str]]:
    with observe("save", request.shown) as seen:
        request.check()
        found = described(tensors)
        what = f"a save to {request.shown}"
        with taking_turn(request), _running.under_way(what), Meter(progress, "save", seen) as meter:
            save = begin(request, found)
            try:
                await_save(save, list(found.items()), meter)
                report = report_of(save, len(found), request.fsync)
                seen.add(report)
                return report, save.files()
            finally:
                save.close()


def _start(request: SaveRequest, tensors: Mapping[str, Any], snapshot: bool) -> SaveJob:
    """The same in the background."""
    seen = observe("save", request.shown).begin()
    try:
        request.check()
        found = described(tensors)
        with taking_turn(request) as turn:
            save = begin(request, found, snapshot=snapshot, ahead=True)
            try:
                supply_all(save, list(found.items()))
                job = SaveJob(save, request.shown, len(found), request.fsync, seen, turn)
                if turn is not None:
                    turn.goes_on(save)
                return job
            except BaseException:
                save.close()
                raise
    except BaseException as error:
        seen.end(error)
        raise


def _check_wait(wait: object, snapshot: object, progress: Progress) -> None:
    for name, value in (("wait", wait), ("snapshot", snapshot)):
        if not isinstance(value, bool):
            raise InvalidError(f"{name}={value!r}: give True or False")
    if snapshot and wait:
        raise InvalidError("snapshot=True: the call returns when everything is written: give wait=False with it")
    if progress and not wait:
        raise InvalidError(f"progress={progress!r}: a save in the background shows nothing: ask its job (`progress`)")


def to_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, layout: Layout) -> bytes:
    """The content of a file with these tensors."""
    found = {name: describe(name, value) for name, value in tensors.items()}
    synchronize(list(found.values()))
    listed = list(found.items())
    heads = [(name, d.dtype, d.shape) for name, d in listed]
    head, order = _core.head(heads, checked_metadata(metadata), layout=layout, order="file")
    return b"".join([head, *(_bytes_of(*listed[number]) for number in order)])


def _bytes_of(name: str, tensor: Described) -> memoryview | bytes | bytearray:
    if tensor.fill is not None:
        memory = bytearray(reduce(mul, tensor.shape, DTYPES[tensor.dtype].bits) // 8)
        if memory:
            fill(name, tensor, memoryview(memory))
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


@overload
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
    wait: Literal[True] = True,
    snapshot: Literal[False] = False,
) -> Report: ...
@overload
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
    wait: Literal[False],
    snapshot: bool = False,
) -> SaveJob: ...
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
    wait: bool = True,
    snapshot: bool = False,
) -> Report | SaveJob:
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
        wait: False: return a `SaveJob` at once, and save in the background. The tensors must not change until its
            `copied` is True. Tensors that must be packed are packed before the call returns; their copies are dropped
            as they are written.
        snapshot: With ``wait=False``: copy everything to memory of this process first, and save from there. `copied`
            is True as soon as that is done.

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
        OutOfMemoryError: there is no memory for staging, to pack a tensor, or for a snapshot. Nothing was written.
    """
    _check_wait(wait, snapshot, progress)
    named = target_path(filename, "filename")
    if named.endswith(("/", "/.")) or (is_web(named) and named.count("/") < 3):
        raise InvalidError(f"filename={without_secrets(named)!r}: this is a folder: give the name of a file in it")
    folder, name = _split(named)
    request = SaveRequest(folder, name, metadata, None, layout, order, fsync, options, storage, checkpoint=False)
    if not wait:
        return _start(request, tensors, snapshot)
    return _write(request, tensors, progress)[0]


@overload
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
    wait: Literal[True] = True,
    snapshot: Literal[False] = False,
    group: Any = None,
) -> Report: ...
@overload
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
    wait: Literal[False],
    snapshot: bool = False,
    group: Any = None,
) -> SaveJob: ...
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
    wait: bool = True,
    snapshot: bool = False,
    group: Any = None,
) -> Report | SaveJob:
    """Saves a checkpoint to a folder: one file, or several shards and their index.

    The files get their names when all of them are whole, one after the other. If another program may read the folder at
    that moment, save to a new folder.

    Args:
        tensors_or_module: Tensors by name as for `save_file`, or a torch module. Tied tensors of a module are saved
            once, under the first of their names that the module does not tie to another; the metadata says which names
            are left out, and has "format": "pt". Views of other tensors are saved as tensors of their own.
        directory: The folder. It is made if it does not exist. Shards and indexes of an earlier save are removed after
            the new files have their names, except files that somebody has changed since. The call waits for other saves
            of this process to the folder. If another program saves there meanwhile, this save is a ``ChangedError``.
        max_shard_size: The most bytes of tensors in one file, as a number or a text such as "5GB" or "4.5GiB". None is
            no limit. A tensor that is larger gets a file of its own.
        name: The name of the file. The names of shards are made from it.
        group: The ranks that save one checkpoint together: a process group, a `DeviceMesh`, or (store, rank, size).
            Each rank gives its own tensors; a `DTensor` is saved whole, from the parts that ranks have of it. A plain
            tensor that several ranks have by one name is saved once: their bytes are not compared. The files have names
            that no other save has, and an index. With ``wait=False`` each rank gets a job of its own. All messages of
            the process group are sent before the call returns. Another thread then writes, uploads, and talks to the
            other ranks through the rendezvous store, which must stay until the job is done. A second save of the group,
            or to the folder, waits until this one is done.

    The other arguments, the report and the errors are those of `save_file`. ``files`` in the report lists the names of
    the files. If a file of an earlier save cannot be removed, the error says so, and the new files have their names.
    With ``group``, ``PeerError`` says which rank is gone or has failed, and ``PlanMismatchError`` what does not fit.
    The report is that of this rank's files, and ``files`` lists those of all ranks. A job raises these errors if they
    come after the call has returned.
    """

    def ask() -> tuple[SaveRequest, Mapping[str, Any]]:
        """The arguments, checked. Raises on each rank by itself."""
        _check_wait(wait, snapshot, progress)
        tensors: Mapping[str, Any] = tensors_or_module
        more: dict[str, str] = {}
        if not isinstance(tensors_or_module, Mapping):
            tensors, more = _of_module(tensors_or_module, group is not None)
        both = {**more, **(metadata or {})} if more or metadata is not None else None
        most, place = size_of(max_shard_size), _folder(directory)
        _check_name(name)
        return SaveRequest(place, name, both, most, layout, order, fsync, options, storage, checkpoint=True), tensors

    if group is None:
        request, tensors = ask()
    else:
        with importing():
            from . import _save_ranks
        if _save_ranks.are_several(group):
            return _save_ranks.save(ask, group, progress) if wait else _save_ranks.start(ask, group, snapshot)
        request, tensors = ask()
        tensors = _save_ranks.of_one_rank(tensors)
    if not wait:
        return _start(request, tensors, snapshot)
    report, files = _write(request, tensors, progress)
    report["files"] = files
    return report


def _check_name(name: object) -> None:
    if not isinstance(name, str) or _split(name)[1] != name or not name:
        raise InvalidError(f"name={name!r}: give a file name")
    if os.fsencode(name).decode("utf-8", "replace") != name:
        raise InvalidError(f"name={name!r}: this is not UTF-8, and an index (JSON) cannot name such files")


def _of_module(module: Any, of_ranks: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a torch module, tied ones once, and metadata that says what was left out.

    ``of_ranks``: DTensors are among them. Tied ones are one object, also where this rank has no element of them.
    """
    state_dict = getattr(module, "state_dict", None)
    if not callable(state_dict):
        raise InvalidError(f"a {type(module).__name__} is neither a mapping of names to tensors nor a torch module")
    from ._shared import tied

    if of_ranks:
        with importing():
            from ._memory import is_dtensor

        state = dict(state_dict(keep_vars=True))
        check({name: value for name, value in state.items() if not is_dtensor(value)})
    else:
        state = dict(state_dict())
        check(state)
    found = tied(state, module)
    # transformers asks for the format
    return {name: tensor for name, tensor in state.items() if name not in found}, {"format": "pt", **found}

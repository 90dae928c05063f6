"""A `StorageReader` for torch.distributed.checkpoint: `dcp.load` of a safetensors checkpoint as one load of all ranks.

import torch.distributed.checkpoint as dcp
from penstock.integrations.dcp import StorageReader

state = model.state_dict()                                          # DTensors of FSDP2, TP, or plain tensors
dcp.load(state, storage_reader=StorageReader("model/", group=dist.group.WORLD))
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.futures import Future

from .._checkpoint import Checkpoint, Source, open
from .._choices import Storage
from .._core import Options
from .._destination import Destination
from .._dtypes import CASTABLE
from .._errors import HeaderError, MissingDtypeError, UnsupportedError
from .._events import around, observe
from .._group import Rendezvous
from .._memory import memory_of
from .._report import Report
from .._torch import torch_dtype, torch_shape

__all__ = ["StorageReader"]

#: In the metadata of a file that `HuggingFaceStorageWriter(save_distributed=True)` has written: where its shards begin.
_SHARDS = "DCP_SHARDING_INFO"


class StorageReader(_StorageReader):
    """Reads a safetensors checkpoint for `torch.distributed.checkpoint.load`, into the tensors of its state dict.

    Only the wanted ranges are read, straight into the tensors. With ``group`` what several ranks want may be read by
    one of them and sent to the others, as in `Checkpoint.load`. A tensor whose dtype differs from the checkpoint's is
    filled as by ``Tensor.copy_``; F16, BF16, F32 and F64 on the CPU are converted on the way, others through a
    temporary tensor.

    Args:
        path: What `penstock.open` takes, or a `Checkpoint`.
        group: The ranks that load together, as in `Checkpoint.load`: all of those that call `dcp.load`. None: each
            rank reads for itself.
        options: As in `Checkpoint.load`.
        storage: As in `penstock.open`.

    Raises (from `dcp.load`, as it wraps the errors of ranks):
        UnsupportedError: a tensor of the checkpoint has a dtype that torch lacks, or its files are the shards that
            `HuggingFaceStorageWriter` saves with ``save_distributed=True`` and does not consolidate.
        MismatchError: a tensor does not fit. Nothing has been read.
        PenstockError: as `Checkpoint.load_into`.
    """

    def __init__(
        self,
        path: Source | Checkpoint,
        *,
        group: Any = None,
        options: Options | Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__()
        self._source = path
        self._group = group
        self._options = options
        self._storage = storage
        self._opened: Checkpoint | None = None
        self._load = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> Source:
        """The source."""
        return self._source.files if isinstance(self._source, Checkpoint) else self._source

    @property
    def last_report(self) -> Report | None:
        """The report of the last load, or None."""
        return None if self._opened is None else self._opened.last_report

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another load; of ``checkpoint_id``, if it is given."""
        if checkpoint_id is not None:
            self._source = checkpoint_id
        self._opened, self._load = None, uuid.uuid4().hex

    def read_metadata(self) -> Metadata:  # if it took more, dcp would ask twice
        """The metadata of the checkpoint. Reads its headers."""
        self._opened = checkpoint = self._source if isinstance(self._source, Checkpoint) else self._open(self._source)
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        for info in checkpoint.values():
            dtype = torch_dtype(info.dtype)
            if dtype is None:
                why = f"tensor {info.name} is {info.dtype}, which torch {torch.__version__} lacks"
                raise MissingDtypeError(why, path=info.file, tensor=info.name)
            shape = torch.Size(torch_shape(info.name, info.dtype, info.shape, info.file))
            first = torch.Size([0] * len(shape))
            chunk = ChunkStorageMetadata(first, shape)
            tensors[info.name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [chunk])
            places[MetadataIndex(info.name, first)] = info.file
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta(load_id=self._load))

    def _open(self, source: Source) -> Checkpoint:
        try:
            checkpoint = open(source, storage=self._storage)
            shards = [checkpoint.metadata.get(_SHARDS)]
        except HeaderError as error:
            shards = [] if error.path is None else [open(error.path, storage=self._storage).metadata.get(_SHARDS)]
            if not any(shards):
                raise
        else:
            if not any(_begin_inside(one) for one in shards):
                return checkpoint
        raise UnsupportedError(
            f"{source}: saved in shards by HuggingFaceStorageWriter(save_distributed=True): read it with torch's "
            "HuggingFaceStorageReader, or save with enable_consolidation=True"
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **more: Any) -> None:
        """Does nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: the load itself divides the reads among the ranks."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads what the plan lists into the planner's tensors. Returns when all is there."""
        assert self._opened is not None, "read_metadata comes first"
        # What is wrong with the tensors of one rank the others hear of
        rendezvous: Any
        with (
            around(observe("load_into", self._opened, engine="dcp")),
            nullcontext() if self._group is None else Rendezvous(self._group) as rendezvous,
        ):
            targets = [self._target(item, planner) for item in plan.items]
            detours = {
                number: torch.empty(target.shape, dtype=dtype, device=target.device)
                for number, (target, dtype) in enumerate(targets)
                if not _straight(target, dtype)
            }
            into = [detours.get(number, target) for number, (target, _) in enumerate(targets)]
            destinations = [
                Destination(item.storage_index.fqn, to, self._cut(item), cast=True)
                for item, to in zip(plan.items, into, strict=True)
            ]
            self._opened.load_into(_last_of_each(destinations), options=self._options, group=rendezvous)
        for number, loaded in detours.items():
            targets[number][0].copy_(loaded)
        for item, (target, _) in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _target(self, item: ReadItem, planner: LoadPlanner) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor that an item goes to, and the dtype of the checkpoint's."""
        name = item.storage_index.fqn
        if item.type is not LoadItemType.TENSOR:
            raise UnsupportedError(f"{name} is wanted as an object, and the checkpoint has only tensors", tensor=name)
        assert self._opened is not None
        return planner.resolve_tensor(item).detach(), torch_dtype(self._opened[name].dtype)

    def _cut(self, item: ReadItem) -> tuple[slice, ...]:
        assert self._opened is not None
        ends = [(first, first + count) for first, count in zip(item.storage_offsets, item.lengths, strict=True)]
        if ends and self._opened[item.storage_index.fqn].dtype == "F4":  # which torch counts in pairs
            ends[-1] = 2 * ends[-1][0], 2 * ends[-1][1]
        return tuple(slice(*one) for one in ends)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this may be a checkpoint. It is not looked at."""
        return isinstance(checkpoint_id, (str, os.PathLike))


def _begin_inside(shards: str | None) -> bool:
    """Whether a file has parts of tensors that do not begin at the first element."""
    if shards is None:
        return False
    found = json.loads(shards)
    return any(any(one.get("saved_offsets", ())) for one in found.values())


_CASTABLE = [torch_dtype(name) for name in CASTABLE]


def _straight(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a load fills this tensor itself. Everything else torch copies: other dtypes, tensors of other classes."""
    if target.dtype != dtype and not (target.dtype in _CASTABLE and dtype in _CASTABLE):
        return False
    memory = memory_of(target)
    return memory is not None and memory.problem is None


def _last_of_each(destinations: Sequence[Destination]) -> list[Destination]:
    """The last of several destinations with the same memory (tied parameters): it would overwrite the others."""
    last: dict[Any, Destination] = {}
    for number, at in enumerate(destinations):
        to = at.into
        known = (to.device, to.data_ptr(), to.dtype, to.shape, to.stride()) if to.numel() and not to.is_meta else number
        last.pop(known, None)
        last[known] = at
    return list(last.values())

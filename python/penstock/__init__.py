"""Loads safetensors checkpoints into CPU and GPU memory.

    import penstock

    checkpoint = penstock.open("model/")            # a file, files, a folder, an index file, a repository of the Hub
    state = checkpoint.load("cuda:0")               # {name: torch.Tensor}
    print(checkpoint.last_report)

Importing penstock imports neither torch nor numpy.
"""

from typing import TYPE_CHECKING, Any

from ._checkpoint import Checkpoint, open
from ._choices import Storage
from ._core import CacheFill, DiskCache, Options, __version__, release_staging
from ._errors import (
    AccessError,
    BusyError,
    CancelledError,
    ChangedError,
    DeviceError,
    DigestError,
    EngineError,
    ForkedError,
    HeaderError,
    IndexFileError,
    InternalError,
    InvalidError,
    LimitError,
    MismatchError,
    NoSpaceError,
    NotACheckpointError,
    NotFoundError,
    OutOfMemoryError,
    PeerError,
    PenstockError,
    PlanMismatchError,
    ReadError,
    SafetensorError,
    SliceError,
    StalledError,
    TruncatedError,
    UnknownTensorError,
    UnsupportedError,
    WriteError,
)
from ._events import set_logger
from ._job import Job
from ._late_imports import importing
from ._report import Report
from ._selection import TensorInfo

if TYPE_CHECKING:
    from ._destination import Destination
    from ._joined import joined
    from ._patch import Patch, patch
    from ._quiesce import quiesce
    from ._safe_open import load_file, safe_open
    from ._save import save, save_file
    from ._save_job import SaveJob
    from ._sharded import broadcast, get_sharded
    from ._torch import torch_dtype

__all__ = [
    "AccessError",
    "BusyError",
    "CacheFill",
    "DiskCache",
    "CancelledError",
    "ChangedError",
    "Checkpoint",
    "Destination",
    "DeviceError",
    "DigestError",
    "EngineError",
    "ForkedError",
    "HeaderError",
    "IndexFileError",
    "InternalError",
    "InvalidError",
    "Job",
    "LimitError",
    "MismatchError",
    "NotACheckpointError",
    "NoSpaceError",
    "NotFoundError",
    "Options",
    "OutOfMemoryError",
    "Patch",
    "PeerError",
    "PenstockError",
    "PlanMismatchError",
    "ReadError",
    "Report",
    "SafetensorError",
    "SaveJob",
    "SliceError",
    "StalledError",
    "Storage",
    "TensorInfo",
    "TruncatedError",
    "UnknownTensorError",
    "UnsupportedError",
    "WriteError",
    "__version__",
    "broadcast",
    "get_sharded",
    "joined",
    "load_file",
    "open",
    "patch",
    "quiesce",
    "release_staging",
    "safe_open",
    "save",
    "save_file",
    "set_logger",
    "torch_dtype",
]


if not TYPE_CHECKING:  # to a type checker every name would be one of this module

    def __getattr__(name: str) -> Any:
        """Names that not every program needs are imported when a program first asks for them."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        with importing():
            if name in ("load_file", "safe_open"):
                from . import _safe_open as module
            elif name in ("save", "save_file"):
                from . import _save as module
            elif name == "SaveJob":
                from . import _save_job as module
            elif name in ("broadcast", "get_sharded"):
                from . import _sharded as module
            elif name == "Destination":
                from . import _destination as module
            elif name == "joined":
                from . import _joined as module
            elif name == "quiesce":
                from . import _quiesce as module
            elif name == "torch_dtype":
                from . import _torch as module
            else:
                from . import _patch as module
        found = globals()[name] = getattr(module, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

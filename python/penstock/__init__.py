"""Loads safetensors checkpoints into CPU and GPU memory.

    import penstock

    checkpoint = penstock.open("model/")            # a file, files, a folder, an index file, a cached Hub repository
    state = checkpoint.load("cuda:0")               # {name: torch.Tensor}
    print(checkpoint.last_report)

Importing penstock imports neither torch nor numpy.
"""

from ._checkpoint import Checkpoint, open
from ._core import CacheFill, Options, __version__, release_staging
from ._errors import (
    AccessError,
    CancelledError,
    ChangedError,
    DeviceError,
    DigestError,
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
    PenstockError,
    ReadError,
    SafetensorError,
    SliceError,
    StalledError,
    TruncatedError,
    UnknownTensorError,
    UnsupportedError,
    WriteError,
)
from ._job import Job
from ._patch import Patch, patch
from ._report import Report
from ._safe_open import load_file, safe_open
from ._save import save, save_file
from ._selection import TensorInfo

__all__ = [
    "AccessError",
    "CacheFill",
    "CancelledError",
    "ChangedError",
    "Checkpoint",
    "DeviceError",
    "DigestError",
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
    "PenstockError",
    "ReadError",
    "Report",
    "SafetensorError",
    "SliceError",
    "StalledError",
    "TensorInfo",
    "TruncatedError",
    "UnknownTensorError",
    "UnsupportedError",
    "WriteError",
    "__version__",
    "load_file",
    "open",
    "patch",
    "release_staging",
    "safe_open",
    "save",
    "save_file",
]

"""The interface of fastsafetensors 0.5 on this engine.

    from penstock.compat.fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0")
    loader.add_filenames({0: files})
    buffer = loader.copy_files_to_device()
    tensor = buffer.get_tensor("wte.weight")

`fastsafe_open`, `ParallelLoader`, `AutoLoader`, `ParallelSaver`, `SafeTensorsMetadata` and the filters for expert
parallelism are here too, and what the original has in submodules (`DType`, `Device`, `TensorFrame`, `WriteEntry`,
`plain_entry`, `save_sharded`). What the settings mean here, and what differs, is in docs/compatibility.md.
"""

from ._fastsafetensors_buffer import FilesBufferOnDevice
from ._fastsafetensors_experts import (
    DEFAULT_EXPERT_PATTERN,
    expert_parallel_filter,
    expert_parallel_filter_from_env,
    owned_expert_range,
)
from ._fastsafetensors_header import SafeTensorsMetadata
from ._fastsafetensors_loader import SafeTensorsFileLoader, SingleGroup, fastsafe_open
from ._fastsafetensors_saver import ParallelSaver, WriteEntry, plain_entry, save_sharded
from ._fastsafetensors_stream import AutoLoader, BudgetInfeasibleError, LoaderConfig, ParallelLoader, load_config
from ._fastsafetensors_types import Device, DeviceType, DType, TensorFrame, TorchTensor, get_device_numa_node

__all__ = [
    "DEFAULT_EXPERT_PATTERN",
    "AutoLoader",
    "BudgetInfeasibleError",
    "DType",
    "Device",
    "DeviceType",
    "FilesBufferOnDevice",
    "LoaderConfig",
    "ParallelLoader",
    "ParallelSaver",
    "SafeTensorsFileLoader",
    "SafeTensorsMetadata",
    "SingleGroup",
    "TensorFrame",
    "TorchTensor",
    "WriteEntry",
    "expert_parallel_filter",
    "expert_parallel_filter_from_env",
    "fastsafe_open",
    "get_device_numa_node",
    "load_config",
    "owned_expert_range",
    "plain_entry",
    "save_sharded",
]

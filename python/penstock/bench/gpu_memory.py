"""How much memory of a GPU is in use, by whomever: NVML, from outside the process that loads."""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class GpuMemory:
    """The memory of GPU `index`, as NVML counts GPUs: all of the machine, whatever CUDA_VISIBLE_DEVICES says.

    Raises:
        OSError: where there is no NVML or no such GPU.
    """

    def __init__(self, index: int) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        if self._nvml.nvmlInit_v2() != 0:
            raise OSError("NVML does not start")
        if self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(self._handle)) != 0:
            raise OSError(f"NVML has no GPU {index}")

    def in_use(self) -> dict[str, int]:
        """Bytes in use; nothing where NVML does not tell."""
        found = _Memory()
        if self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(found)) != 0:
            return {}
        return {"device_memory": int(found.used)}

    def driver(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        self._nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96))
        return text.value.decode()

    def name(self) -> str:
        """The name of the GPU."""
        text = ctypes.create_string_buffer(96)
        self._nvml.nvmlDeviceGetName(self._handle, text, ctypes.c_uint(96))
        return text.value.decode()

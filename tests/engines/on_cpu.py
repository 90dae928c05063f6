"""What vLLM has to find in the environment on a machine without a GPU, before it is imported."""

from __future__ import annotations

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

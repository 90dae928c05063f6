"""Load format ``penstock`` in a vLLM whose interface is not known: as ``safetensors``."""

from __future__ import annotations

import copy
from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


class FallbackModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader."""

    def __init__(self, load_config: Any) -> None:
        plain = copy.copy(load_config)
        plain.load_format, plain.model_loader_extra_config = "safetensors", {}
        super().__init__(plain)

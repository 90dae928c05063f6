"""Load format ``penstock`` in a vLLM whose interface is not known: an error, or as ``safetensors``."""

from __future__ import annotations

import copy
from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ._drift import once_per_process, way_out
from ._known import VLLM
from ._strict import not_used, strict_of

unknown = "its interface differs"
"""The difference of this vLLM from the known ones."""


class FallbackModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader.

    Raises:
        UnsupportedError: the user has not accepted that (``"strict": false``).
    """

    def __init__(self, load_config: Any) -> None:
        strict = strict_of(load_config.model_loader_extra_config, VLLM.name)
        if strict or once_per_process(unknown):
            not_used(VLLM.name, unknown, strict, way_out(VLLM))
        plain = copy.copy(load_config)
        plain.load_format, plain.model_loader_extra_config = "safetensors", {}
        super().__init__(plain)

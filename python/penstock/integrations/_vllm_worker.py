"""Measurements by vLLM's workers on GPUs of their start. Imports vLLM; importing this begins to measure.

vLLM imports the class by its name in every worker, before that makes a model (``worker_extension_cls``).
"""

from __future__ import annotations

from typing import Any

import torch

from ._start_result import summed
from ._startup import Phases, measure
from ._vllm_start import Watched

_phases = Phases()
measure(_phases)
_watched = Watched(_phases)


class StartedWorker:
    """Methods of a worker that `_vllm_serve` calls by name. Their results are JSON."""

    def penstock_start(self) -> dict[str, Any]:
        """Seconds of the phases that take place in workers, and what Penstock's loads moved."""
        seconds = dict(_phases.seconds)
        # vLLM's own figure, of torch.compile
        compiled = self.vllm_config.compilation_config.compilation_time  # type: ignore[attr-defined]
        if compiled:
            seconds["compilation"] = compiled
        return {"seconds": seconds, "load": summed(_watched.reports)}

    def penstock_free_memory(self) -> dict[str, int]:
        """Bytes of this worker's device."""
        free, total = torch.cuda.mem_get_info()
        return {"free_bytes": free, "total_bytes": total}

"""The start of vLLM on GPUs, to the first token and a little further. Imports vLLM. It has not run on a GPU yet."""

from __future__ import annotations

import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from ._start_result import explain, result
from ._startup import Phases
from ._vllm_start import arguments

WORKER = "penstock.integrations._vllm_worker.StartedWorker"
"""The class that vLLM's workers get methods of."""
#: Tokens of the request: its prompt, and what is generated.
PROMPT, GENERATED = 263, 128


def start(specification: dict[str, Any], rank: int, phases: Phases) -> dict[str, Any]:
    """All ranks, in processes of vLLM's own."""
    EngineArgs.create_engine_config = phases.timed("configuration", EngineArgs.create_engine_config)
    engine = LLM(**arguments(specification, worker_extension_cls=WORKER))
    ready = time.monotonic()
    answer = answered(engine.llm_engine, phases.began)
    memory = engine.collective_rpc("penstock_free_memory")
    ranks = [ranked(specification, phases, ready, one) for one in engine.collective_rpc("penstock_start")]
    return {"ranks": ranks, "serving": {"first_token": answer, "device_memory": memory}}


def ranked(specification: dict[str, Any], phases: Phases, ready: float, worker: dict[str, Any]) -> dict[str, Any]:
    """The result of a worker, with the phases that take place before there are workers."""
    of_rank = Phases(phases.began)
    of_rank.seconds = {**phases.seconds, **worker["seconds"]}
    explain(of_rank, specification, worker["load"])
    return result(of_rank, worker["load"], ready)


def answered(engine: Any, began: float) -> dict[str, Any]:
    """One request to vLLM's engine: when its tokens came, in seconds since ``began``."""
    sampling = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
    asked = time.monotonic()
    engine.add_request("penstock", {"prompt_token_ids": list(range(1, PROMPT + 1))}, sampling)
    first, tokens = None, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = len(output.outputs[0].token_ids)
            if first is None and tokens:
                first = time.monotonic()
    end = time.monotonic()
    return {
        "prompt_tokens": PROMPT,
        "generated_tokens": tokens,
        "seconds": None if first is None else first - began,
        "request_seconds": None if first is None else first - asked,
        "last_token_seconds": end - began,
    }

"""One rank of vLLM in a pod with a memory limit: loads a model once, and says what its parameters then are.

    python vllm_pod_rank.py SPECIFICATION.json RANK

The specification has vLLM's arguments, the load format, the number of ranks, a file to meet at and one for the results.
The limit holds from the moment when all ranks have their models, still without memory, and before any has read a byte
of the weights: `PENSTOCK_POD_BEGINS` (tools/pod) says how to ask for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import get_model_loader
from vllm_model import configured, current, joined, load, model_config_of, tensors


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(memoryview(flat.numpy())).hexdigest()}"


def main(spec: dict[str, Any], rank: int) -> None:
    config = configured(spec["args"], spec["load_format"])
    joined(config, spec["ranks"], rank, Path(spec["meeting"]))
    loader = get_model_loader(config.load_config)
    with current(config):
        model = loader.create_model(config, model_config_of(config))
    torch.distributed.barrier()
    if rank == 0 and (pair := os.environ.get("PENSTOCK_POD_BEGINS")):
        told, answer = map(int, pair.split(","))
        os.write(told, b"x")
        os.read(answer, 1)
    torch.distributed.barrier()
    load(loader, model, config)
    found = {
        "digests": {name: digest(one) for name, one in tensors(model).items()},
        "fallbacks": [one["fallbacks"] for one in getattr(loader, "reports", ())],
        "nbytes": sum(one["nbytes"] for one in getattr(loader, "reports", ())),
    }
    Path(f"{spec['out']}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))

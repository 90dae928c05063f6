"""One rank of a world of vLLM: loads models with vLLM's own format and with Penstock's, and compares.

    python vllm_rank.py SPECIFICATION.json RANK

The specification has the sizes of the world, a file to meet at, and the models. What came of them goes to a file for
each rank.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest
import stubs
from vllm_model import configured, joined, loaded_twice


def main() -> None:
    spec, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    world = spec["world"]
    stubs.make_quantised_layers(pytest.MonkeyPatch())
    # vLLM makes a group of expert parallel ranks only for a model that has experts
    joined(configured({**spec["first"], **world}), spec["ranks"], rank, Path(spec["meeting"]))
    results = {}
    for name, model in spec["models"].items():
        try:
            results[name] = loaded_twice({**model["args"], **world}, Path(model["inverse"]), model["more"][rank])
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    Path(spec["out"], f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

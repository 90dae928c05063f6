"""Starts of vLLM one after the other, each of processes of their own: forks of one that has imported vLLM.

    python vllm_starts.py SPECIFICATION.json

The specification has a list of starts, each with what `vllm_group.py` wants.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import cached_starts
import pytest
import stubs
import vllm_group
from penstock.integrations import _fetched
from penstock.integrations import vllm as plugin
from test_vllm_lora import load as load_adapter
from vllm.lora.resolver import LoRAResolverRegistry
from vllm_group import Rank, _different, _served
from vllm_model import as_bytes, digests


def model(rank: Rank, place: str, folder: str, options: dict[str, Any], port: int) -> Any:
    """A start from an address, beside a load of the same model from a disk."""
    expected = digests(_served(rank.join({"model": folder}, "safetensors"))[1])

    def begins() -> dict[str, Any]:
        config = rank.join({"model": place}, "penstock", **options)
        loader, mine = _served(config)
        (report,) = loader.reports
        return {
            "parameters": len(list(mine.parameters())),
            "different": _different(expected, mine),
            "digests": digests(mine),
            "report": cached_starts.told(report),
            "files": cached_starts.contents(Path(config.model_config.model)),
        }

    try:
        return cached_starts.start(begins, options["storage"], port)
    finally:
        _fetched.remove_all()  # this process is a fork, and ends without what Python does at exit


def adapter(
    rank: Rank, name: str, base: str, folder: str, environment: dict[str, str], storage: dict[str, Any], port: int
) -> Any:
    """An adapter by its name, as a server of vLLM finds it and a worker loads it, beside one from a disk."""
    os.environ.update(environment)
    theirs = load_adapter(Path(folder))

    def begins() -> dict[str, Any]:
        plugin.register_lora()
        resolver = LoRAResolverRegistry.get_resolver("Penstock Resolver")
        request = asyncio.run(resolver.resolve_lora(base, name))
        assert request is not None, "it is not found"
        mine = load_adapter(Path(request.lora_path))
        assert mine.keys() == theirs.keys()
        different = [key for key in mine if not as_bytes(mine[key]).equal(as_bytes(theirs[key]))]
        return {"parameters": len(mine), "different": different}

    return cached_starts.start(begins, storage, port)


def main() -> None:
    stubs.process_weights(pytest.MonkeyPatch())
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        vllm_group.together(spec, globals())


if __name__ == "__main__":
    main()

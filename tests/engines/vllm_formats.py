"""Ranks of vLLM that load quantised checkpoints, or quantise while they load: with its own format and with Penstock's.

    python vllm_formats.py SPECIFICATION.json

As `vllm_group.py`, whose functions these are beside.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import penstock
import pytest
import stubs
import torch
import vllm_group
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import meta
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm_group import Rank
from vllm_model import POISON, addresses, configured, current, digests, left_deferred, poison, told


def served(config: Any) -> tuple[Any, torch.nn.Module]:
    """The loader, and a model that is loaded and processed as for serving."""
    rotary_embedding._ROPE_DICT.clear()  # all models of a process share these modules
    loader = get_model_loader(config.load_config)
    with current(config):
        return loader, loader.load_model(config, config.model_config)


def different(expected: dict[str, str], model: torch.nn.Module) -> list[str]:
    found = digests(model)
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def loads_and_reloads(rank: Rank, first: str, cases: dict[str, dict[str, Any]]) -> Any:
    """By case: what of a load, and of two reloads, differs from what vLLM's own format makes.

    ``first``: a model with experts. vLLM makes a group of expert parallel ranks only for one.
    """
    rank.join({"model": first}, "safetensors")
    return {name: _tried(rank, **case) for name, case in cases.items()}


def _tried(rank: Rank, folders: list[str], args: dict[str, Any]) -> Any:
    try:
        return _case(rank, folders, args)
    except Exception:
        return {"error": traceback.format_exc()}


def _case(rank: Rank, folders: list[str], args: dict[str, Any]) -> Any:
    expected = [digests(served(rank.join({"model": folder, **args}, "safetensors"))[1]) for folder in folders]
    found: dict[str, Any] = {
        "differ": len([one for one in expected[0] if expected[0][one] != expected[1][one]]),
        "their reload": _their_reload(rank, folders, args, expected[1]),
    }
    for mapped in ("off", "on"):
        config = rank.join({"model": folders[0], **args}, "penstock", mapped=mapped)
        for folder in folders:
            for path in Path(folder).glob("*.safetensors"):
                path.read_bytes()  # what is not in the page cache is not mapped
        loader, model = served(config)
        where = addresses(model)
        one: dict[str, Any] = {
            "loader": type(loader).__module__,
            "first": different(expected[0], model),
            "left": left_deferred(model),
            "reports": [{**told(report), "given": report["given"]} for report in loader.reports],
            "reloads": [],
            "moved": [],
        }
        for number in (1, 2):
            if found["their reload"]:
                continue
            poison(model)
            with current(config):
                reload_weights(config, model, None, folders[number % 2], True)
            one["reloads"].append(different(expected[number % 2], model))
            one["moved"] += [name for name, at in addresses(model).items() if where.get(name) != at]
        found[mapped] = one
        del model
    return found


def _their_reload(rank: Rank, folders: list[str], args: dict[str, Any], expected: dict[str, str]) -> str:
    """What is wrong with a reload of vLLM's own; "" if it is right."""
    config = rank.join({"model": folders[0], **args}, "safetensors")
    _, model = served(config)
    try:
        with current(config):
            reload_weights(config, model, None, folders[1], True)
    except Exception as error:
        return repr(error)
    wrong = different(expected, model)
    return f"{len(wrong)} parameters are not those of the other checkpoint, as {wrong[0]}" if wrong else ""


def starts(rank: Rank, folder: str, refused: dict[str, dict[str, Any]]) -> Any:
    """Starts that end with an error. ``refused``: by name, vLLM's arguments for some that it refuses itself."""
    rank.join({"model": folder}, "safetensors")
    found: dict[str, Any] = {
        name: {load_format: _error(args, load_format) for load_format in ("safetensors", "penstock")}
        for name, args in refused.items()
    }
    return {"refused": found, "own loader": _own_loader(rank, folder), "other ways": _other_ways(rank, folder)}


def _error(args: dict[str, Any], load_format: str) -> Any:
    try:
        served(configured(args, load_format))
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return None


def _own_loader(rank: Rank, folder: str) -> Any:
    """A model whose quantisation a plugin of vLLM brings, with a loader of its own. What Penstock says, and when."""
    config = rank.join({"model": folder}, "penstock")
    made: list[str] = []
    loader = get_model_loader(config.load_config)
    loader.create_model = lambda *args, **more: made.append("model")
    found = {}
    for name in ("bitsandbytes", "gguf"):
        config.model_config.quantization = name
        for call in ("load_model", "load_weights"):
            of = config if call == "load_model" else torch.nn.Module()
            try:
                with current(config):
                    getattr(loader, call)(of, config.model_config)
            except penstock.UnsupportedError as error:
                found[f"{name} {call}"] = str(error)
    return {"said": found, "made": made}


def _other_ways(rank: Rank, folder: str) -> Any:
    """Online quantisation in a vLLM that does it by other functions: refused, and with ``"strict": false`` vLLM's."""
    from penstock.integrations import _vllm_online

    args = {"model": folder, "quantization": "fp8_per_block"}
    expected = digests(served(rank.join(args, "safetensors"))[1])
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_vllm_online, "layerwise", None)
        try:
            served(rank.join(args, "penstock"))
        except penstock.UnsupportedError as error:
            found["refused"] = str(error)
        loader, model = served(rank.join(args, "penstock", strict=False))
    return {**found, "different": different(expected, model), "fallbacks": loader.reports[0]["fallbacks"]}


def _materialised(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter of a layer that is about to be quantised: what is not loaded into it is poison."""
    made = _materialise(tensor)
    made.detach().untyped_storage().fill_(POISON)
    return made


_materialise = meta.materialize_meta_tensor

if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    patch.setattr(meta, "materialize_meta_tensor", _materialised)
    stubs.make_quantised_layers(patch)
    stubs.quantise_online(patch)
    vllm_group.main(globals())

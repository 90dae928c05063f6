"""SGLang loads quantised checkpoints with load format penstock as with its own, or refuses them by name at the start.

SGLang 0.5.23 on a machine without a GPU. What stands in for one (sglang_formats.py):

| in place of | says or does | why |
|---|---|---|
| `get_device_capability`, SGLang's and torch's | (9, 0) | many layers are made for GPUs alone |
| `quantization.awq.awq._is_cuda` | True | so that AWQ's experts have a method at all, which is Marlin's |
| `quantization.fp8.scaled_fp8_quant` | the same in torch | online quantisation, by a kernel of sgl_kernel |
| `DefaultModelLoader.postprocess_weights` | does nothing, where a case says so | it packs weights by kernels for GPUs |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantised import unreadable
from test_sglang import Run

PROGRAM = "sglang_formats.py"
HALF = {"dtype": "float16"}
#: By case: the checkpoint, SGLang's arguments, and whether SGLang processes the weights.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    f"{model}.{form}": (f"{model}.{form}", args, False)
    for model in ("llama", "qwen3-moe")
    for form, args in {
        "fp8": {},
        "awq": HALF,
        "gptq": HALF,
        "ct-fp8": {},
        "ct-wna16": {},
        "modelopt-fp8": {},
        "modelopt-fp4": {"moe_runner_backend": "marlin"},
    }.items()
}
# SGLang's Llama does not load scales of blocks, with any load format
CASES |= {f"wide-{model}.fp8-blocks": (f"wide-{model}.fp8-blocks", {}, False) for model in ("qwen3", "qwen3-moe")}
CASES |= {f"{model} online fp8": (model, {"quantization": "fp8"}, True) for model in ("llama", "qwen3-moe")}


#: Parameters that these checkpoints have nothing for.
UNTOUCHED = ("_g_idx_sort_indices", "_weight_g_idx", "_blockscale_swizzled", ".k_scale", ".v_scale")
#: Operations that need bytes at once, for 8 experts with 3 matrices in 4 layers: zero points (GPTQ) from I32 to F16,
#: and shapes of weights (compressed-tensors) from I64 to BF16.
MATERIALISED = {name: {"aten.copy_.default": 96} for name in ("qwen3-moe.gptq", "qwen3-moe.ct-wna16")}
#: What SGLang quantises while it loads, or in a model of another library, and what the refusal says of that.
ONLINE = {
    "nvfp4_online": "changes weights while they are copied",
    "quark_mxfp4": "changes weights while they are copied",
    "quark_int4fp8_moe": "changes weights while they are copied",
    "modelopt_fp4": "changes weights while they are copied",
    "modelopt_fp8": "ModelOpt loads the model by itself",
    "auto-round-int8": "auto-round loads the model by itself",
}
BITS_AND_BYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="session")
def ran(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """All that ranks of one number do. They run once: an engine takes long to import."""
    found: dict[int, Run] = {}

    def of(size: int) -> Run:
        if size not in found:
            tasks = [
                {
                    "name": name.replace(" ", "_"),
                    "do": "quantised",
                    "with": {"folder": str(checkpoint(one)), "args": args, "process": process},
                }
                for name, (one, args, process) in CASES.items()
            ]
            if size == 1:
                place, llama = tmp_path_factory.mktemp("refused"), checkpoint("llama")
                given = {
                    "folder": str(llama),
                    "unreadable": str(unreadable(llama, place / "plain", None)),
                    "bits_and_bytes": str(unreadable(llama, place / "bits_and_bytes", BITS_AND_BYTES)),
                    "online": list(ONLINE),
                }
                tasks.append({"name": "refused", "do": "refused", "with": given})
                tasks.append({"name": "accepted", "do": "accepted", "with": {"folder": str(llama)}})
            found[size] = Run(size, tasks, tmp_path_factory.mktemp("sglang_formats"), PROGRAM)
        return found[size]

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_gets_what_safetensors_gives_in_one_load(ran: Callable[[int], Run], size: int, name: str):
    for found in ran(size).of(name.replace(" ", "_")):
        assert found["quantization"] is not None
        assert (found["different"], found["left"]) == ([], [])
        assert found["kept"][0] == found["kept"][1]
        assert all(part.endswith(UNTOUCHED) for part in found["kept"][0])
        assert found["said"] == []
        [report] = found["reports"]
        assert (report["loads"], report["copied_through"], report["fallbacks"]) == (1, [], [])
        assert report["materialised"] == MATERIALISED.get(name, {})


def test_what_has_a_loader_of_its_own_is_refused_before_anything_is_read(ran: Callable[[int], Run]):
    [found] = ran(1).of("refused")
    for name in ("bitsandbytes, quantised before", "bitsandbytes, in flight"):
        assert found["found"][name]["type"] == "UnsupportedError"
        assert "give --load-format bitsandbytes" in found["found"][name]["text"]


@pytest.mark.parametrize("name", ONLINE)
def test_what_is_quantised_while_it_is_loaded_is_refused_before_anything_is_read(ran: Callable[[int], Run], name: str):
    [found] = ran(1).of("refused")
    assert found["found"][name]["type"] == "UnsupportedError"
    assert ONLINE[name] in found["found"][name]["text"]
    assert '{"strict": false}' in found["found"][name]["text"]


def test_so_are_updates_which_change_nothing(ran: Callable[[int], Run]):
    [found] = ran(1).of("refused")
    assert found["different"] == []
    own = {name: f"give --load-format {name}" for name in ("bitsandbytes", "gguf")}
    for name, text in {**own, **ONLINE}.items():
        good, said = found["found"][f"{name} update"]["returned"]
        assert not good and text in said


def test_with_the_users_consent_sglang_loads_such_a_model_in_its_own_way(ran: Callable[[int], Run]):
    [found] = ran(1).of("accepted")
    assert found["different"] == []
    assert "changes weights while they are copied" in found["fallbacks"][0]["reason"]
    assert any("loading as SGLang does" in line for line in found["said"])

"""An engine of vLLM that starts once and says what it has: digests of its parameters, and the tokens that it generates.

    python -m penstock.selftest.daemon make MODEL
    python -m penstock.selftest.daemon start MODEL LOAD_FORMAT EXTRA

`make` writes a tiny Llama. `start` prints JSON in its last line.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

#: Arguments of the engine and of the daemon: vLLM's key of cached weights has some of them.
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
#: Tokens: of the prompt, and generated.
PROMPT, GENERATED = 32, 16


class Digests:
    """A method of vLLM's workers (``worker_extension_cls``)."""

    def penstock_digests(self) -> dict[str, str]:
        """By the name of each parameter and buffer: shape, dtype and a digest of its bytes."""
        import torch

        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {
            name: f"{tuple(one.shape)} {one.dtype} "
            + hashlib.sha256(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, one in (*model.named_parameters(), *model.named_buffers())
            if one.numel()
        }


def make(folder: Path) -> None:
    """Writes a Llama of 4 layers and 3 MB."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def start(folder: Path, load_format: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The tensors of an engine whose weights came in this way."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        load_format=load_format,
        model_loader_extra_config=extra,
        worker_extension_cls=f"{__spec__.name if __spec__ else __name__}.{Digests.__name__}",
        gpu_memory_utilization=0.3,
        **ARGUMENTS,
    )
    sampling = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(1, PROMPT + 1))}
    (answer,) = engine.generate([prompt], sampling, use_tqdm=False)
    (digests,) = engine.collective_rpc("penstock_digests")
    return {"digests": digests, "tokens": list(answer.outputs[0].token_ids)}


def options() -> list[str]:
    """`ARGUMENTS` for a command line of vLLM's."""
    found = []
    for name, value in ARGUMENTS.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        print(json.dumps(start(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))))

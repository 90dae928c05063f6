"""How the ranks of a parallel transformer divide a checkpoint: by the names and shapes of its tensors alone.

It is a rule of thumb for planning. Engines know more of a model (how many heads share keys, what is fused): what they
ask for may differ in a few tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ._errors import InvalidError
from ._selection import TensorInfo

#: Modules whose output is divided: the first dimension of a weight, and its bias.
_OUTPUT = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "query", "key", "value", "q_b_proj", "kv_b_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "intermediate.dense", "w1", "w3"}
    | {"embed_tokens", "word_embeddings", "wte", "lm_head", "head"}
)
#: Modules whose input is divided: the second dimension of a weight; the bias is whole.
_INPUT = frozenset(
    {"o_proj", "out_proj", "down_proj", "dense_4h_to_h", "w2"}
    | {"self_attention.dense", "attention.dense", "output.dense"}
)
#: The same for weights that lie the other way round, input first, as GPT-2's do.
_OUTPUT_LAST = frozenset(["c_attn", "c_fc"])
_INPUT_FIRST = frozenset(["c_proj"])

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FIRST = re.compile(r"embed|(?:^|\.)wte\.|(?:^|\.)wpe\.")


class Parallel(NamedTuple):
    """How many ranks divide what: ``tp`` matrices, ``pp`` layers, ``ep`` experts; ``dp`` replicas."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


def _module(name: str) -> tuple[str, str]:
    """The last name of a tensor's module, and the last two: ("dense", "output.dense")."""
    parts = name.split(".")[:-1]
    return (parts[-1] if parts else ""), ".".join(parts[-2:])


def _fused(name: str) -> str | None:
    """The part of a name after "experts" if one tensor has all experts of a layer."""
    _, found, rest = name.rpartition(".experts.")
    return rest if found and not rest[:1].isdigit() else None


def dimension(info: TensorInfo) -> int | None:
    """The dimension along which tensor parallelism divides a tensor; None: every rank has the whole."""
    dimensions = len(info.shape)
    fused = _fused(info.name)
    if fused is not None:
        inward = fused.startswith(("down_proj", "w2"))
        if dimensions < 2 or (inward and dimensions < 3):
            return None
        return 2 if inward else 1
    last, two = _module(info.name)
    if last in _OUTPUT or two in _OUTPUT:
        return 0 if dimensions else None
    if last in _OUTPUT_LAST:
        return dimensions - 1 if dimensions else None
    if dimensions < 2:
        return None
    if last in _INPUT or two in _INPUT:
        return 1
    return 0 if last in _INPUT_FIRST else None


def _part(info: TensorInfo, along: int | None, number: int, count: int) -> tuple[slice, ...] | None:
    """Part ``number`` of ``count``. None: the whole, also where the dimension is shorter than that."""
    if along is None or count == 1 or info.shape[along] < count:
        return None
    size = info.shape[along]
    return (slice(None),) * along + (slice(size * number // count, size * (number + 1) // count),)


class Cut:
    """The wants of each rank of a parallel model."""

    def __init__(self, tensors: Iterable[TensorInfo], parallel: Parallel) -> None:
        for name, value in parallel._asdict().items():
            if value < 1:
                raise InvalidError(f"{name} is {value}; it must be at least 1")
        tp, pp, dp, ep = parallel
        if (tp * dp) % ep:
            raise InvalidError(f"ep is {ep}; it must divide tp x dp, which is {tp * dp}")
        self._tensors = list(tensors)
        self._parallel = parallel
        layers: set[int] = set()
        self._experts: dict[str, int] = {}
        for info in self._tensors:
            if found := _LAYER.search(info.name):
                layers.add(int(found[1]))
            if found := _EXPERT.search(info.name):
                prefix = info.name[: found.start()]
                self._experts[prefix] = max(self._experts.get(prefix, 0), int(found[1]) + 1)
        if pp > max(1, len(layers)):
            raise InvalidError(
                f"pp is {pp}, and this checkpoint has {len(layers)} layers that are numbered in its names"
            )
        self._stage = {layer: at * pp // len(layers) for at, layer in enumerate(sorted(layers))}
        #: Bytes of which tensor parallelism gives every rank of a stage the whole.
        self.whole_bytes = sum(info.nbytes for info in self._tensors if self._is_whole(info))

    def _is_whole(self, info: TensorInfo) -> bool:
        tp, _, _, ep = self._parallel
        if ep > 1 and (_EXPERT.search(info.name) or _fused(info.name) is not None):
            return False
        return tp > 1 and _part(info, dimension(info), 0, tp) is None

    def stage(self, name: str) -> int:
        """The pipeline stage of a tensor: that of its layer; embeddings are in the first, all else in the last."""
        if found := _LAYER.search(name):
            return self._stage[int(found[1])]
        return 0 if _FIRST.search(name) else self._parallel.pp - 1

    def place(self, rank: int) -> tuple[int, int, int]:
        """The rank's number along tp, pp and ep. Ranks with equal numbers want the same.

        Ranks are counted along tp first, then pp, then dp. Experts are divided among ``ep`` of the tp x dp ranks of a
        stage, whole; with ``ep`` 1 their matrices are divided by tp, as others are.
        """
        tp, pp, _, ep = self._parallel
        tp_rank, pp_rank, dp_rank = rank % tp, rank // tp % pp, rank // tp // pp
        return tp_rank, pp_rank, (dp_rank * tp + tp_rank) % ep

    def wants(self, rank: int) -> dict[str, tuple[slice, ...] | None]:
        """The wants of a rank: the part of each tensor by name, None for the whole."""
        tp, _, _, ep = self._parallel
        tp_rank, pp_rank, ep_rank = self.place(rank)
        wants: dict[str, tuple[slice, ...] | None] = {}
        for info in self._tensors:
            if self.stage(info.name) != pp_rank:
                continue
            if ep > 1 and (found := _EXPERT.search(info.name)):
                count = self._experts[info.name[: found.start()]]
                if int(found[1]) * ep // count == ep_rank:
                    wants[info.name] = None
            elif ep > 1 and _fused(info.name) is not None:
                wants[info.name] = _part(info, 0 if info.shape else None, ep_rank, ep)
            else:
                wants[info.name] = _part(info, dimension(info), tp_rank, tp)
        return wants

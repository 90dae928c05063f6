"""How the tensors of a checkpoint are divided among its files: the rules of those who wrote public ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .synth import Tensor, file_order


@dataclass(frozen=True, eq=False)
class Block:
    """Tensors that are kept or cut together: a layer, or (`layer` is None) embeddings, final norm and head."""

    tensors: tuple[Tensor, ...]
    layer: int | None = None


@dataclass(frozen=True)
class Model:
    """A checkpoint: its blocks in the order in which its writer went through them, and how that put them into files."""

    repository: str
    blocks: tuple[Block, ...]
    split: Callable[[Sequence[Block]], list[list[Tensor]]]
    files: str = "model-{number:05}-of-{count:05}.safetensors"
    sort: Callable[[Iterable[Tensor]], tuple[Tensor, ...]] = file_order
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    align: int = 8

    @property
    def layers(self) -> list[int]:
        return [block.layer for block in self.blocks if block.layer is not None]


def by_size(limit: float) -> Callable[[Sequence[Block]], list[list[Tensor]]]:
    """A new file where the next tensor would make this one larger than `limit` bytes: `save_pretrained`'s rule."""

    def split(blocks: Sequence[Block]) -> list[list[Tensor]]:
        files: list[list[Tensor]] = [[]]
        room = limit
        for block in blocks:
            for tensor in block.tensors:
                if tensor.nbytes > room and files[-1]:
                    files.append([])
                    room = limit
                files[-1].append(tensor)
                room -= tensor.nbytes
        return files

    return split


def by_elements(limit: int, stages: Iterable[int]) -> Callable[[Sequence[Block]], list[list[Tensor]]]:
    """A new file once this one holds `limit` elements, and at each layer of `stages`."""
    starts = frozenset(stages)

    def split(blocks: Sequence[Block]) -> list[list[Tensor]]:
        files: list[list[Tensor]] = [[]]
        elements = 0
        for block in blocks:
            for number, tensor in enumerate(block.tensors):
                if files[-1] and (elements >= limit or (number == 0 and block.layer in starts)):
                    files.append([])
                    elements = 0
                files[-1].append(tensor)
                elements += math.prod(tensor.shape)
        return files

    return split


def by_block(blocks: Sequence[Block]) -> list[list[Tensor]]:
    """A file for each block."""
    return [list(block.tensors) for block in blocks]


def by_layer(blocks: Sequence[Block]) -> list[list[Tensor]]:
    """A file for each layer; what comes before the first and after the last goes with them."""
    files: list[list[Tensor]] = [[]]
    taken = False
    for block in blocks:
        if block.layer is not None and taken:
            files.append([])
        taken |= block.layer is not None
        files[-1].extend(block.tensors)
    return files

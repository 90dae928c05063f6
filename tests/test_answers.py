"""Answers that the standard allows and few servers give, and those that it forbids and every client takes.

Each is generated: fields as they may be written, and parts that are smaller or larger than what was asked for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import penstock
import pytest
from conftest import Oracle
from penstock import _core
from penstock.synthetic.synth import Tensor
from raw_server import Asked, part, raw_server


def loads(file: Path, answer: Callable[[Asked, bytes], bytes]) -> int:
    """Has the file come right. How many requests that took."""
    content = file.read_bytes()
    with raw_server(lambda asked: answer(asked, content)) as served:
        Oracle(file).same(penstock.open(f"{served.url}/x.safetensors").load(framework="np"))
        return len(served.asked)


def of_bytes(content: bytes, first: int, last: int, total: object = None) -> bytes:
    """The answer with these bytes, whatever was asked for."""
    body = content[first:last]
    says = f"bytes {first}-{first + len(body) - 1}/{len(content) if total is None else total}"
    head = (
        f'HTTP/1.1 206 Partial Content\r\nETag: "one"\r\nContent-Range: {says}\r\nContent-Length: {len(body)}\r\n\r\n'
    )
    return head.encode() + body


# Content-Range


@pytest.mark.parametrize("unit", ["bytes ", "Bytes ", "BYTES ", "bytes=", "bytes   ", "bytes\t"])
def test_the_unit_of_a_range_is_written_in_several_ways(shard, unit):
    assert loads(shard, lambda asked, content: part(asked, content).replace(b": bytes ", f": {unit}".encode())) > 1


def test_a_part_without_the_size_of_the_object(tiny, shard):
    """A file that comes whole ends where it says. The size of another is not known."""
    loads(tiny, lambda asked, content: of_bytes(content, *asked.range(0), total="*"))
    with pytest.raises(
        penstock.ReadError, match=r"does not say how large the object is \(Content-Range: bytes 0-65535/\*\)"
    ):
        loads(shard, lambda asked, content: of_bytes(content, *asked.range(0), total="*"))
    # One that gives the size first, and then none
    loads(shard, lambda asked, content: of_bytes(content, *(r := asked.range(0)), total=None if r[0] == 0 else "*"))
    index = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()
    with raw_server(
        lambda asked: of_bytes(index if "json" in asked.target else tiny.read_bytes(), *asked.range(0), "*")
    ) as web:
        Oracle(tiny).same(penstock.open(f"{web.url}/model.safetensors.index.json").load(framework="np"))


@pytest.mark.parametrize("name", ["merges.txt", "config.json"])
def test_the_beginning_of_a_small_file_is_not_taken_for_it(name):
    """The server sends less than was asked for, and does not say how much there is."""
    content = b'{"a": [1, 2, 3, 4]}' if name.endswith("json") else b"a b\n" * 20
    beginning = raw_server(lambda asked: of_bytes(content, 0, len(content) // 2, "*"))
    with beginning as served, pytest.raises(penstock.ReadError):
        _core.contents([f"{served.url}/{name}"], 1 << 20)


# Parts that are smaller or larger


@pytest.mark.parametrize("most", [1, 1000, 65535, 100_000])
def test_a_server_that_sends_fewer_bytes_is_asked_for_the_rest(write, shard, most):
    file = write(Tensor("a", "U8", (9,)), name="nine.safetensors") if most == 1 else shard

    def answer(asked: Asked, content: bytes) -> bytes:
        first, last = asked.range(len(content))
        return of_bytes(content, first, min(last, first + most))

    assert loads(file, answer) >= file.stat().st_size // most


@pytest.mark.parametrize("unit", [512, 4096, 1 << 20])
def test_a_server_that_sends_whole_blocks(shard, unit):
    def answer(asked: Asked, content: bytes) -> bytes:
        first, last = asked.range(len(content))
        return of_bytes(content, first // unit * unit, -(-last // unit) * unit)

    loads(shard, answer)


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_any_size(write, seed):
    """Each answer begins and ends anywhere around the first byte that was asked for."""
    chance = random.Random(seed)
    tensors = [Tensor(f"t{n}", "U8", (chance.randrange(1, 40_000),)) for n in range(12)]

    def answer(asked: Asked, content: bytes) -> bytes:
        first, last = asked.range(len(content))
        return of_bytes(
            content, max(0, first - chance.randrange(9000)), first + chance.randrange(1, 2 * (last - first) + 2)
        )

    loads(write(*tensors, name="many.safetensors"), answer)


def test_a_part_that_is_another_or_far_larger_is_refused(write):
    file = write(Tensor("a", "U8", (3 << 20,)), name="large.safetensors")
    for wrong in (lambda first, last: (first + 1, last + 1), lambda first, last: (0, 1 << 30)):
        with pytest.raises(penstock.ReadError, match="were asked for, and the server sends"):
            loads(file, lambda asked, content, wrong=wrong: of_bytes(content, *wrong(*asked.range(0))))


# Heads


@pytest.mark.parametrize(
    "written",
    [
        ("Content-Range: bytes ", "Content-Range: bytes\r\n\t"),
        ("Content-Range: ", "Content-Range:\r\n "),
        ("Content-Length: ", "Content-Length : "),
        ('ETag: "one"', 'ETag: "one"\r\nX-Long: a\r\n  b\r\n\tc'),
        ('ETag: "one"', 'ETag: "one"\r\nno field at all'),
        ('ETag: "one"', 'ETag: "one"\r\nbad name: x'),
        ('ETag: "one"', 'ETag: "one"\r\nTransfer-Encoding: identity'),
    ],
    ids=["range", "range alone", "space", "field", "no colon", "name", "identity"],
)
def test_a_head_that_other_clients_take(shard, written):
    loads(shard, lambda asked, content: part(asked, content).replace(written[0].encode(), written[1].encode(), 1))


def test_a_length_that_is_said_twice(shard):
    def answer(asked: Asked, content: bytes, more: int = 0) -> bytes:
        head, _, body = part(asked, content).partition(b"\r\n\r\n")
        return head + b", %d\r\n\r\n" % (len(body) + more) + body

    loads(shard, answer)
    with pytest.raises(penstock.ReadError, match="two different Content-Length"):
        loads(shard, lambda asked, content: answer(asked, content, 1))

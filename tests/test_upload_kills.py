"""Killed saves to a bucket: a reader sees the old checkpoint or the new one, whole, and the next save succeeds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import penstock
import pytest
import safetensors.numpy
from s3_server import serving
from test_uploads import PLACE, load, same, settings, states, tensors, visible
from upload_server import Uploads, carried_out

#: A save in a process of its own, of the tensors of `tensors(2, 6, 700_000)`: shards of them if it is told so.
SAVE = """
import json, sys
import numpy, penstock

place, storage, most = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
random = numpy.random.default_rng(2)
state = {f"layers.{i}.w": random.integers(0, 255, 700_000 + i, numpy.uint8) for i in range(6)}
penstock.save(state, place, max_shard_size=most, storage=storage)
"""
NEW = tensors(2, 6, 700_000)
SHARD = 1_500_000


class Killing(Uploads):
    """Kills the client at the request with a number: while its body comes, before it is carried out, or after that."""

    def __init__(self) -> None:
        super().__init__()
        self.client: subprocess.Popen[bytes] | None = None
        self.number, self.moment, self.share = -1, "", 0.0
        self.came = 0
        self.counting = threading.Lock()

    def arm(self, client: subprocess.Popen[bytes], number: int, moment: str, share: float) -> None:
        self.number, self.moment, self.share = number, moment, share
        self.client = client

    def kill(self) -> None:
        assert self.client is not None
        self.client.kill()
        self.client.wait()

    def body_of(self, connection: BinaryIO, length: int) -> bytes:
        with self.counting:
            is_it = self.came == self.number
            self.came += 1
        if is_it and self.moment == "in its body":
            connection.read(int(length * self.share))
            self.kill()
            raise ConnectionResetError
        body = super().body_of(connection, length)
        if is_it and self.moment == "before it is carried out":
            self.kill()
            raise ConnectionResetError
        if is_it:
            self.kill()
        return body


@pytest.fixture(scope="module")
def bucket() -> Iterator[Killing]:
    with serving(Killing()) as found:
        yield found


def start(bucket: Killing, most: int | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SAVE, PLACE, json.dumps(settings(bucket)), json.dumps(most)]
    return subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE)


def prepared(bucket: Killing, old: int | None) -> dict[str, bytes]:
    """An old checkpoint in the bucket, and nothing else."""
    bucket.number, bucket.came = -1, 0
    bucket.objects.clear()
    bucket.under_way.clear()
    penstock.save(tensors(1), PLACE, max_shard_size=old, storage=settings(bucket))
    bucket.history.clear()
    bucket.came = 0
    return dict(bucket.objects)


@pytest.fixture(scope="module")
def requests(bucket: Killing) -> dict[tuple[int | None, int | None], int]:
    """The number of requests of a save that nothing kills, by what was there and what comes."""
    found = {}
    for old in (None, 6100):
        for new in (None, SHARD):
            prepared(bucket, old)
            client = start(bucket, new)
            errors = client.communicate()[1].decode()
            assert client.returncode == 0, errors
            found[old, new] = bucket.came
            assert same(load(bucket), NEW)
    return found


def content(state: dict[str, bytes] | None) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, by safetensors."""
    assert state is not None
    files = [file for name, file in state.items() if name.endswith(".safetensors")]
    return {name: tensor for file in files for name, tensor in safetensors.numpy.load(file).items()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", range(50))
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(
    bucket: Killing, requests: dict[tuple[int | None, int | None], int], number: int
) -> None:
    dice = random.Random(number)
    (old, new), count = list(requests.items())[number % 4]
    moment = ("in its body", "before it is carried out", "after it is carried out")[dice.randrange(3)]
    before = prepared(bucket, old)
    client = start(bucket, new)
    bucket.arm(client, dice.randrange(count), moment, dice.random())
    errors = client.communicate()[1].decode()
    assert client.returncode == -9, f"it was not killed, and ended with {client.returncode}: {errors}"
    carried_out(bucket)
    bucket.number = -1
    was = visible(before)
    for state in states(bucket, before):
        assert state == was or same(content(state), NEW), "a reader saw neither"
    assert same(load(bucket), content(visible(bucket.objects)))
    report = penstock.save(tensors(3), PLACE, max_shard_size=6100, storage=settings(bucket))
    assert same(load(bucket), tensors(3))
    names = {key.rpartition("/")[2] for key in bucket.objects}
    assert set(report.files) <= names
    # Shards that no index names stay: they might be of a save that is under way
    assert all(name.startswith("model-") and "-of-" in name for name in names - set(report.files)), names


def test_the_kills_are_of_saves_that_are_under_way(requests: dict[tuple[int | None, int | None], int]) -> None:
    """Each save has many requests to be killed at."""
    assert all(count >= (5 if new is None else 12) for (_, new), count in requests.items()), requests

"""Processes that load through one disk cache at once: each byte comes from the server once, also if one of them is
stopped or killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordeal
import pytest
import slow_disk
from disk_caches import (
    MIB,
    Asked,
    as_root,
    blocks,
    files,
    locks,
    open_to_all,
    right_blocks,
    serving,
    wants_server,
)
from penstock.bench.served import Served
from ranks_together import until, until_stopped

pytestmark = wants_server

TENSORS, LENGTH = 16, 3 * MIB + 5
#: Bytes per second of one connection, and connections of a process: alone it loads 48 MiB in a second.
PACE, CONNECTIONS = 6e6, 8
#: The same where a block takes 1.5 s, longer than the patience of those that wait for it.
CRAWL, CRAWLING = 7e5, 48
#: Bytes of the largest request.
LARGEST = 8 << 20

#: Loads when it is told to. Prints that it is ready, and then what came of it.
PROGRAM = """
import json, os, sys, time
import ordeal, penstock
order = json.loads(sys.argv[1])
if order["user"]:
    os.setgroups([])
    os.setgid(order["group"])
    os.setuid(order["user"])
storage = {"disk_cache": order["folder"], "disk_cache_free": 0, "connections": order["connections"],
           "disk_cache_shared": bool(order["user"])}
rank, ranks = order["rank"], order["ranks"]

def part(info):
    size = info.shape[0]
    return slice(size * rank // ranks, size * (rank + 1) // ranks)

print("ready", flush=True)
sys.stdin.readline()
begun = time.monotonic()
checkpoint = penstock.open(order["urls"], storage=storage)
tensors = checkpoint.load(framework="np", progress=False, slices=part if ranks > 1 else None)
seconds = time.monotonic() - begun
report = checkpoint.last_report
expected = {name: content[part(checkpoint[name])] if ranks > 1 else content
            for path in order["paths"] for name, content in ordeal.contents(path).items()}
ordeal.same(tensors, expected)
finished = report.disk_cache.wait(60)
cache = report.disk_cache
said = {name: getattr(cache, name + "_bytes") for name in ("cached", "network", "written", "dropped", "fetched_again")}
said |= {"seconds": seconds, "reason": cache.reason, "finished": finished, "asked": report.network}
print(json.dumps(said), flush=True)
"""


#: The same with small files, which it reads whole before the tensors.
SMALL_FILES = PROGRAM.replace(
    "checkpoint = penstock.open",
    """small = penstock._core.contents(order["small"], 64 << 20, None, storage)
assert [len(one) for one in small] == order["lengths"], [len(one) for one in small]
if not order["urls"]:
    print(json.dumps({"finished": True, "seconds": time.monotonic() - begun}), flush=True)
    sys.stdin.readline()
    sys.exit()
checkpoint = penstock.open""",
)
#: Bytes of a tokenizer, as those of large models, and of a configuration.
TOKENIZER, CONFIG = 8 * MIB - 77, 1234


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MiB in 16 tensors. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("shared") / "model.safetensors", TENSORS, LENGTH)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model.parent, rate_per_connection=f"{PACE:g}", first_byte="5") as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def disk(scratch: Path) -> Iterator[Path]:
    """A folder on the disk that the project is on."""
    place = scratch / "disk_cache"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    yield place
    shutil.rmtree(place)


class Loads:
    """Processes that load the same checkpoint through one cache."""

    def __init__(
        self,
        served: Served,
        models: list[Path],
        folder: Path,
        count: int,
        ranks: int = 1,
        users: tuple[int, ...] = (),
        group: int = 0,
        connections: int = CONNECTIONS,
        small: tuple[Path, ...] = (),
    ) -> None:
        told = {"urls": served.urls(models), "folder": str(folder), "paths": list(map(str, models)), "ranks": ranks}
        told |= {"small": served.urls(small), "lengths": [path.stat().st_size for path in small]}
        told |= {"connections": connections, "group": group}
        users = users or (0,) * count
        orders = [json.dumps(told | {"rank": number % ranks, "user": users[number]}) for number in range(count)]
        self.children = [ordeal.begin(SMALL_FILES if small else PROGRAM, order) for order in orders]
        for child in self.children:
            ordeal.await_line(child, "ready")

    def __enter__(self) -> Loads:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            with contextlib.suppress(ValueError):
                child.communicate()

    def go(self, *numbers: int) -> None:
        """Lets these begin; without numbers, all."""
        for number in numbers or range(len(self.children)):
            stdin = self.children[number].stdin
            assert stdin is not None
            stdin.write("\n")
            stdin.flush()

    def ended(self, number: int, timeout: float = 60.0) -> dict[str, Any]:
        """What one says that ends well."""
        code, out, err = ordeal.finish(self.children[number], timeout)
        if code != 0:
            raise ordeal.Died(f"exit code {code}\n{out}\n{err}")
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        assert found["finished"]
        return found

    def all(self) -> list[dict[str, Any]]:
        return [self.ended(number) for number in range(len(self.children))]


def has(folder: Path) -> int:
    """Blocks that the cache has."""
    return sum(len(blocks(map_file)) for map_file in files(folder, ".map"))


@pytest.mark.parametrize("count", [2, 8])
def test_processes_that_start_together_receive_the_checkpoint_once(served, model, folder, count):
    size = model.stat().st_size
    with Asked(served) as asked, Loads(served, [model], folder, count) as loads:
        loads.go()
        said = loads.all()
    again = sum(one["fetched_again"] for one in said)
    assert size <= asked.bytes <= 1.05 * size + again, said
    assert again == 0, said
    assert all(one["cached"] + one["network"] >= size for one in said)
    assert right_blocks(files(folder, ".data"), [model]) == -(-size // MIB)
    assert locks(folder) == []


@pytest.fixture(scope="module")
def small(model: Path) -> tuple[Path, ...]:
    """A tokenizer and a configuration beside the model."""
    found = (model.parent / "tokenizer.json", model.parent / "config.json")
    for path, length in zip(found, (TOKENIZER, CONFIG), strict=True):
        path.write_bytes(random.Random(length).randbytes(length))
    return found


def test_processes_that_start_together_receive_the_small_files_once_too(served, model, small, folder):
    """One connection brings the tokenizer: for longer than the patience of those that wait for it."""
    paths = [model, *small]
    size = sum(path.stat().st_size for path in paths)
    with Asked(served) as asked, Loads(served, [model], folder, 8, small=small) as loads:
        loads.go()
        said = loads.all()
    again = sum(one["fetched_again"] for one in said)
    assert size <= asked.bytes <= 1.05 * size + again, said
    assert right_blocks(files(folder, ".data"), paths) == sum(-(-path.stat().st_size // MIB) for path in paths)
    assert locks(folder) == []


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_small_file_whose_process_is_gone_or_stopped_comes_to_the_others_once(model, small, folder, what):
    with (
        serving(model.parent, rate_per_connection="4e6", first_byte="5") as server,
        Loads(server, [], folder, 4, small=small[:1]) as loads,
        Asked(server) as asked,
    ):
        loads.go(0)
        # Of the marker: it asks
        until(lambda: folder.is_dir() and locks(folder) != [])
        time.sleep(0.3)
        loads.children[0].send_signal(what)
        loads.go(1, 2, 3)
        # It is written beside the programs
        until(lambda: has(folder) == -(-TOKENIZER // MIB))
        said = [loads.ended(number) for number in (1, 2, 3)]
    # One of them has waited for a second, and received the file for all of them
    assert TOKENIZER <= asked.bytes <= 2.05 * TOKENIZER, said
    assert all(one["seconds"] < (TOKENIZER / 4e6 + 3) * ordeal.load_factor() for one in said), said
    assert right_blocks(files(folder, ".data"), list(small)) == -(-TOKENIZER // MIB)
    assert locks(folder) == []


@pytest.mark.parametrize(("count", "ranks"), [(8, 1), (4, 4)])
def test_processes_on_a_slow_link_receive_the_checkpoint_once(model, folder, count, ranks):
    """No block is there for seconds. What shows that its holder is not stopped is that it receives bytes."""
    size = model.stat().st_size
    with (
        serving(model.parent, rate_per_connection=f"{CRAWL:g}") as server,
        Loads(server, [model], folder, count, ranks, connections=CRAWLING) as loads,
        Asked(server) as asked,
    ):
        loads.go()
        said = loads.all()
    assert size <= asked.bytes <= 1.05 * size + sum(one["fetched_again"] for one in said), said
    assert min(one["seconds"] for one in said) > MIB / CRAWL, said
    assert right_blocks(files(folder, ".data"), [model]) == -(-size // MIB)
    assert locks(folder) == []


def test_a_process_that_brings_one_file_is_not_taken_for_stopped_by_who_waits_for_another(tmp_path, folder):
    """The first one claims the blocks of both files. Each takes longer than the patience of the second one."""
    models = [ordeal.write(tmp_path / "m" / f"{name}.safetensors", 8, 3 * MIB, seed) for seed, name in enumerate("ab")]
    size = sum(file.stat().st_size for file in models)
    slow = {"rate_per_connection": "2e6", "first_byte": "5"}
    with (
        serving(models[0].parent, **slow) as server,
        Loads(server, models, folder, 2) as loads,
        Asked(server) as asked,
    ):
        loads.go(0)
        until(lambda: has(folder) >= 1)
        loads.go(1)
        said = loads.all()
    assert asked.bytes <= 1.05 * size + sum(one["fetched_again"] for one in said), said


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_goes_on_without_the_other(served, model, folder, what):
    size = model.stat().st_size
    with Asked(served) as asked, Loads(served, [model], folder, 2) as loads:
        loads.go()
        until(lambda: has(folder) >= 10)
        loads.children[0].send_signal(what)
        said = loads.ended(1)
        retries, received = said["asked"]["retries"], said["asked"]["received_bytes"]
        assert right_blocks(files(folder, ".data"), [model]) == -(-size // MIB)
        if what == signal.SIGSTOP:
            until_stopped(loads.children[0].pid)
            loads.children[0].send_signal(signal.SIGCONT)
            other = loads.ended(0)
            assert other["cached"] + other["network"] >= size
            retries += other["asked"]["retries"]
            received += other["asked"]["received_bytes"]
    # The one had claimed all blocks. When it is stopped, the server is asked again for the ones that had not come
    assert received <= 2.05 * size + said["fetched_again"], said
    # What was on the way in a request that was sent again was sent in vain
    assert asked.bytes <= 2.05 * size + said["fetched_again"] + retries * LARGEST, (said, retries)
    assert right_blocks(files(folder, ".data"), [model]) == -(-size // MIB)
    assert locks(folder) == []


@as_root
@pytest.mark.parametrize("what", [None, signal.SIGKILL, signal.SIGSTOP])
def test_two_users_of_a_group_load_at_once(served, what):
    """Each brings what the other one does not. One is killed or stopped: then the other one goes on alone."""
    one, other, group = 40001, 40002, 40003
    with open_to_all() as place:
        folder, model = place / "cache", ordeal.write(place / "m" / "model.safetensors", TENSORS, LENGTH)
        folder.mkdir()
        os.chown(folder, 0, group)
        folder.chmod(0o2770)
        size = model.stat().st_size
        with (
            serving(model.parent, rate_per_connection=f"{PACE:g}", first_byte="5") as server,
            Asked(server) as asked,
            Loads(server, [model], folder, 2, users=(one, other), group=group) as loads,
        ):
            loads.go()
            if what is None:
                said = loads.all()
            else:
                until(lambda: has(folder) >= 5)
                loads.children[0].send_signal(what)
                said = [loads.ended(1)]
            loads.children[0].send_signal(signal.SIGKILL)
        again = sum(one["fetched_again"] for one in said)
        assert asked.bytes <= (1.05 if what is None else 2.05) * size + again, said
        assert right_blocks(files(folder, ".data"), [model]) == -(-size // MIB)
        assert {path.stat().st_uid for path in files(folder, ".data")} <= {one, other}
        assert locks(folder) == []


def test_ranks_with_slices_and_no_exchange_receive_the_checkpoint_once(served, model, folder):
    size = model.stat().st_size
    with Asked(served) as asked, Loads(served, [model], folder, 4, ranks=4) as loads:
        loads.go()
        said = loads.all()
    assert size <= asked.bytes <= 1.05 * size + sum(one["fetched_again"] for one in said), said
    assert right_blocks(files(folder, ".data"), [model]) == -(-size // MIB)
    assert locks(folder) == []


def timed(served: Served, model: Path, folder: Path, group: str = "") -> dict[str, Any]:
    """One load, and when so much was cached: seconds since its beginning, and its share of the bytes."""
    [url] = served.urls([model])
    found: dict[str, Any] = json.loads(ordeal.run(TIMED, url, folder, model, group, timeout=120))
    return found


#: Loads once, in the control group of which it is told. Prints seconds of the load and until all was cached, and the
#: share that was cached 1 s after the load.
TIMED = """
import json, os, sys, time
import ordeal, penstock
url, folder, path, group = sys.argv[1:]
if group:
    with open(group, "w") as file:
        file.write(str(os.getpid()))
begun = time.monotonic()
checkpoint = penstock.open(url, storage={"disk_cache": folder, "disk_cache_free": 0})
tensors = checkpoint.load(framework="np", progress=False)
loaded = time.monotonic() - begun
cache = checkpoint.last_report.disk_cache
cache.wait(1)
soon = cache.written_bytes / os.path.getsize(path)
assert cache.wait(100)
cached = time.monotonic() - begun
ordeal.same(tensors, path)
print(json.dumps({"loaded": loaded, "soon": soon, "cached": cached, "dropped": cache.dropped_bytes,
                  "again": cache.fetched_again_bytes, "reason": cache.reason}))
"""
#: Bytes per second of a disk that is slow.
SLOW = 24_000_000


@pytest.mark.machine
def test_a_slow_disk_has_all_of_it_as_soon_as_it_can(model, disk):
    """The load does not wait for it. The bytes that it drops meanwhile are fetched again, in time."""
    size = model.stat().st_size
    with serving(model.parent) as served:
        quick = timed(served, model, disk / "quick")
        try:
            with slow_disk.group(disk, SLOW, "write") as group:
                slow = timed(served, model, disk / "slow", str(group))
        except slow_disk.NotHere as why:
            pytest.skip(str(why))
    assert right_blocks(files(disk / "slow", ".data"), [model]) == -(-size // MIB)
    assert slow["reason"] == ""
    # Not faster than the limit: otherwise nothing was limited
    assert slow["cached"] >= 0.8 * size / SLOW, slow
    assert slow["cached"] <= 1.2 * size / SLOW, slow
    assert slow["loaded"] <= 1.2 * quick["loaded"] + 0.1, (slow, quick)


@pytest.mark.machine
def test_a_fast_disk_has_nearly_all_of_it_a_second_after_the_load(served, model, disk):
    assert timed(served, model, disk / "cache")["soon"] >= 0.95


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(50))
def test_a_killed_process_leaves_right_blocks_and_no_lock(served, model, folder, seed):
    """At a random moment of its load: as it opens, receives, writes or waits for the disk."""
    moment = random.Random(seed)
    count = moment.choice([1, 1, 2])
    with Loads(served, [model], folder, count) as loads:
        loads.go()
        time.sleep(moment.uniform(0.0, 1.4))
        for child in loads.children[: moment.randint(1, count)]:
            child.kill()
            child.wait()
        for number, child in enumerate(loads.children):
            if child.returncode is None:
                loads.ended(number)
    assert locks(folder) == []
    before = right_blocks(files(folder, ".data"), [model])
    with Asked(served) as asked, Loads(served, [model], folder, 1) as loads:
        loads.go()
        said = loads.ended(0)
    size = model.stat().st_size
    assert asked.bytes <= 1.01 * (size - (before - 1) * MIB) + said["fetched_again"]
    assert said["reason"] == ""
    assert right_blocks(files(folder, ".data"), [model]) == -(-size // MIB)
    assert locks(folder) == []
    leftovers = [path for path in folder.rglob("*") if path.suffix == ".part"]
    assert len(leftovers) <= 1, leftovers

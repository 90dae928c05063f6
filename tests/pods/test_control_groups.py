"""The memory that control groups leave a process, as Penstock sees it. Their version is that of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
from restricted_pods import INSIDE, PATIENCE, ROOT, digests

sys.path.append(str(ROOT / "tools/pod"))
from memory import Group

MIB = 1 << 20
#: Holds so many bytes of memory until its standard input ends.
HOLDS = "import sys; held = bytes([1]) * int(sys.argv[1]); print('held', flush=True); sys.stdin.read()"


@dataclass
class Nested:
    """A group, and two in it. Programs run in those two: a group of version 2 has either programs or groups in it."""

    version: int
    outer: Path
    inner: Path
    beside: Path

    def limit(self, folder: Path, nbytes: int | None) -> None:
        if nbytes is not None:
            (folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(nbytes))

    def command(self, folder: Path, *command: str) -> list[str]:
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"), *command]

    def inside(self, specification: dict[str, Any]) -> dict[str, Any]:
        """Runs `inside.py` in the inner group, and returns its answer."""
        command = self.command(self.inner, sys.executable, str(INSIDE), json.dumps(specification))
        paths = os.pathsep.join(map(str, (Path(penstock.__file__).parent.parent, ROOT / "tests")))
        environment = {**os.environ, "PYTHONPATH": paths}
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        code, said, errors = ordeal.finish(child, PATIENCE)
        assert code == 0, f"status {code}\n{said}\n{errors}"
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Runs a program in the other group. It holds so many bytes of memory."""
        command = self.command(self.beside, sys.executable, "-c", HOLDS, str(nbytes))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None and child.stdout is not None
            try:
                assert child.stdout.readline() == "held\n"
                yield
            finally:
                child.stdin.close()


@pytest.fixture
def nested() -> Iterator[Nested]:
    outer = Group()
    made = [outer.folder / name for name in ("inner", "beside")]
    try:
        if outer.version == 2:
            (outer.folder / "cgroup.subtree_control").write_text("+memory")
        for folder in made:
            folder.mkdir()
        yield Nested(outer.version, outer.folder, *made)
    finally:
        for folder in made:
            with contextlib.suppress(FileNotFoundError):
                ordeal.soon(lambda folder=folder: not (folder / "cgroup.procs").read_text())
                folder.rmdir()
        outer.close()


@pytest.mark.parametrize(("outer", "inner"), [(400, None), (None, 400), (400, 600), (600, 400)])
def test_the_tightest_group_counts(nested: Nested, outer: int | None, inner: int | None):
    nested.limit(nested.outer, outer and outer * MIB)
    nested.limit(nested.inner, inner and inner * MIB)
    found = nested.inside({"way": "limits"})
    assert found["limit"] == 400 * MIB
    assert found["doctor"] == {"version": nested.version, "limit": 400 * MIB}
    # Less what the process itself has
    assert 200 * MIB < found["left"] < 400 * MIB, found


def test_the_memory_of_others_in_the_outer_group_counts(nested: Nested):
    nested.limit(nested.outer, 400 * MIB)
    with nested.holding(200 * MIB):
        found = nested.inside({"way": "limits"})
    assert found["limit"] == 400 * MIB
    assert 50 * MIB < found["left"] < 200 * MIB, found


def test_page_cache_that_nobody_uses_counts_as_left(nested: Nested, tmp_path: Path):
    nested.limit(nested.outer, 400 * MIB)
    file = tmp_path / "read-once"
    with file.open("wb") as new:
        for _ in range(300):
            new.write(os.urandom(MIB))
    ordeal.evict(file)
    subprocess.run(nested.command(nested.beside, "cat", str(file)), check=True, stdout=subprocess.DEVNULL)
    # The kernel may have evicted a part. On a file system in memory the group of the writer was charged
    used = int((nested.outer / ("memory.current" if nested.version == 2 else "memory.usage_in_bytes")).read_text())
    if used < 200 * MIB:
        pytest.skip(f"the page cache of the group has {used >> 20} MiB of 300 that were read")
    found = nested.inside({"way": "limits"})
    ordeal.evict(file)
    assert 400 * MIB - used + 100 * MIB < found["left"] < 400 * MIB, found


@pytest.mark.parametrize("group", ["outer", "inner"])
def test_a_group_that_is_slowed_down_above_some_memory_has_no_more_left(nested: Nested, tmp_path: Path, group: str):
    """`memory.high` (version 2): a copy that would come near it goes past the page cache."""
    if nested.version != 2:
        pytest.skip("control groups of version 1 have no memory.high")
    nested.limit(nested.inner, 2000 * MIB)
    (getattr(nested, group) / "memory.high").write_text(str(300 * MIB))
    found = nested.inside({"way": "limits"})
    assert found["limit"] == 2000 * MIB
    assert 100 * MIB < found["left"] < 300 * MIB, found
    file = ordeal.write(tmp_path / "model.safetensors", 16, 10_000_001)
    ordeal.evict(file)
    loaded = nested.inside({"way": "load", "source": str(file), "options": {"copy": True}})
    assert loaded["digests"] == digests(file)
    assert loaded["cache"] == "bypass", loaded["text"]
    assert "do not fit into half of the memory left" in loaded["cache_reason"]

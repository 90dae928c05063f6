"""Saves to one folder at the same moment: of several processes, and of several threads of one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import penstock
import pytest

TENSORS = 40

#: Saves once for each line, to shards of so many bytes. Its tensors have one number. The first one is made when the
#: save has looked at the folder: then the program says so, and waits for another line.
WRITER = f"""
import json, sys
import numpy as np, penstock
from penstock._save import Described

def say(what):
    print(json.dumps(what), flush=True)

def first(memory):
    say("begun")
    sys.stdin.readline()
    memory[:] = np.full(8, number, "i4").tobytes()

say("ready")
while line := sys.stdin.readline():
    number, most = json.loads(line)
    state = {{f"w{{i:02}}": np.full(8, number, "i4") for i in range(1, {TENSORS})}}
    try:
        penstock.save({{"w00": Described("I32", (8,), None, None, None, first), **state}}, sys.argv[1],
                      max_shard_size=most, fsync=False)
        say("")
    except penstock.ChangedError as error:
        say(str(error))
"""


class Writers:
    """Programs that save to one folder."""

    def __init__(self, programs: list[subprocess.Popen[str]]) -> None:
        self._programs = programs

    def tell(self, number: int, what: object) -> None:
        """Gives a program its next line."""
        found = self._programs[number].stdin
        assert found is not None
        found.write(json.dumps(what) + "\n")
        found.flush()

    def said(self, number: int) -> Any:
        """The next word of a program."""
        found = self._programs[number].stdout
        assert found is not None
        return json.loads(found.readline())


@contextmanager
def writing(folder: Path, count: int) -> Iterator[Writers]:
    with ExitStack() as stack:
        command, pipes = [sys.executable, "-c", WRITER, folder], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        programs = [stack.enter_context(subprocess.Popen(command, text=True, **pipes)) for _ in range(count)]
        writers = Writers(programs)
        assert [writers.said(number) for number in range(count)] == ["ready"] * count
        yield writers


def number_in(folder: Path) -> int:
    """The number of the checkpoint that a reader finds. Nothing else is there: no shard and no lock of another save."""
    found = penstock.open(folder).load(framework="np")
    numbers = {int(value) for tensor in found.values() for value in tensor}
    assert len(found) == TENSORS and len(numbers) == 1, f"a mixture: {numbers}"
    index = folder / "model.safetensors.index.json"
    files = (
        {index.name, *json.loads(index.read_text())["weight_map"].values()} if index.exists() else {"model.safetensors"}
    )
    assert {path.name for path in folder.iterdir()} == files
    return numbers.pop()


#: What the saves of a round have as `max_shard_size`: shards of the same names, of others, or one file.
SHAPES: list[list[int | None]] = [[32, 32, 32], [32, 64, None], [None, None, None], [64, 64, None]]


def test_of_saves_of_several_processes_that_publish_at_one_moment_one_succeeds(tmp_path: Path) -> None:
    """All have looked at the folder before one of them gives its files their names."""
    with writing(tmp_path, 3) as writers:
        for turn in range(24):
            for one, most in enumerate(SHAPES[turn % len(SHAPES)]):
                writers.tell(one, [10 * turn + one, most])
            assert [writers.said(one) for one in range(3)] == ["begun"] * 3
            for one in range(3):
                writers.tell(one, "go on")
            said = [writers.said(one) for one in range(3)]
            [saved] = [one for one, error in enumerate(said) if not error]
            assert number_in(tmp_path) == 10 * turn + saved
            refused = [error for error in said if error]
            assert all("another program has written this file since this save began" in error for error in refused)


def test_saves_of_several_processes_that_begin_at_any_moment_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    with writing(tmp_path, 3) as writers:
        for turn in range(24):
            for one, most in enumerate(SHAPES[turn % len(SHAPES)]):
                writers.tell(one, [10 * turn + one, most])
                writers.tell(one, "go on")
            said = [(writers.said(one), writers.said(one)) for one in range(3)]
            assert all(begun == "begun" for begun, _ in said)
            saved = [10 * turn + one for one, (_, error) in enumerate(said) if not error]
            assert number_in(tmp_path) in saved


def test_a_checkpoint_that_is_removed_while_a_save_runs_is_no_conflict(tmp_path: Path) -> None:
    with writing(tmp_path, 1) as writers:
        for number, most in enumerate([None, 32, 32, None]):
            writers.tell(0, [number, most])
            assert writers.said(0) == "begun"
            for path in tmp_path.iterdir():
                path.unlink()
            writers.tell(0, "go on")
            assert writers.said(0) == ""
            assert number_in(tmp_path) == number


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_another_program_writes_while_a_save_runs_stays(tmp_path: Path, name: str) -> None:
    with writing(tmp_path, 1) as writers:
        writers.tell(0, [1, 32])
        assert writers.said(0) == "begun"
        (tmp_path / name).write_text("of another program")
        writers.tell(0, "go on")
        error = writers.said(0)
    assert error.startswith(f"{tmp_path / name}: ") and "nothing of this save is visible" in error
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "of another program"

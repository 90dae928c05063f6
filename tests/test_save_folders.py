"""Saves to one folder at the same moment: of several processes, and of several threads of one."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from penstock._save import Described

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


def state_of(number: int, first: Callable[[], object] | None = None) -> dict[str, Any]:
    """Tensors of one number. ``first`` is called when the first one is made: the save has looked at the folder then."""
    state: dict[str, Any] = {f"w{i:02}": np.full(8, number, "i4") for i in range(TENSORS)}
    if first is not None:

        def fill(memory: memoryview) -> None:
            first()
            memory[:] = np.full(8, number, "i4").tobytes()

        state["w00"] = Described("I32", (8,), None, None, None, fill)
    return state


class Called(threading.Thread):
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error

    def end(self) -> None:
        """Waits for its end. Raises its error."""
        self.join(60)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error


#: Seconds in which a save that waits for nobody is done.
ENOUGH = 0.5


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_waits_for_that_of_another_thread_to_the_same_folder(tmp_path: Path, wait: bool) -> None:
    folder, begun, go_on = tmp_path / "folder", threading.Event(), threading.Event()
    folder.mkdir()
    (tmp_path / "link").symlink_to("folder")

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)

    def second() -> None:
        job = penstock.save(state_of(2), tmp_path / "link", wait=wait)
        if not wait:
            job.result()

    one = Called(lambda: penstock.save(state_of(1, hold), folder, max_shard_size=32))
    assert begun.wait(60)
    other = Called(lambda: penstock.save(state_of(3), tmp_path / "another"))
    other.end()  # it is in nobody's way
    two = Called(second)
    two.join(ENOUGH)
    assert two.is_alive() and not list(folder.iterdir())
    go_on.set()
    one.end()
    two.end()
    assert number_in(folder) == 2


def test_a_job_waits_for_an_earlier_one_to_the_same_folder(tmp_path: Path) -> None:
    with (tmp_path / ".penstock-publish.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first = penstock.save(state_of(1), tmp_path, wait=False, fsync=False)
        jobs: list[Any] = []
        second = Called(lambda: jobs.append(penstock.save(state_of(2), tmp_path, max_shard_size=32, wait=False)))
        second.join(ENOUGH)
        assert second.is_alive() and not first.done(), "the lock is held, and the first job waits for it"
        fcntl.flock(file, fcntl.LOCK_UN)
        first.result()
        second.end()
        jobs[0].result()
    assert number_in(tmp_path) == 2


def test_a_job_that_was_dropped_is_waited_for_by_nobody(tmp_path: Path) -> None:
    with (tmp_path / ".penstock-publish.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first = penstock.save(state_of(1), tmp_path, wait=False, fsync=False)
        second = Called(lambda: penstock.save(state_of(2), tmp_path, wait=False).cancel())
        time.sleep(0.1)
        del first
        second.end()


def test_a_save_that_saves_to_its_own_folder_while_it_makes_a_tensor_does_not_wait_for_itself(tmp_path: Path) -> None:
    """As a handler of a signal does. The inner save is the later one that began: it stays."""
    outer = Called(lambda: penstock.save(state_of(1, lambda: penstock.save(state_of(2), tmp_path)), tmp_path))
    with pytest.raises(penstock.ChangedError, match="since this save began"):
        outer.end()
    assert number_in(tmp_path) == 2


def test_another_program_that_holds_the_lock_ends_a_save_at_the_stall_timeout(tmp_path: Path) -> None:
    with (tmp_path / ".penstock-publish.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(penstock.StalledError, match="another save has been giving its files their names"):
            penstock.save(state_of(1), tmp_path, options={"stall_timeout": 0.5})
        assert [path.name for path in tmp_path.iterdir()] == [".penstock-publish.lock"]
    penstock.save(state_of(2), tmp_path)
    assert number_in(tmp_path) == 2


def test_a_handler_of_the_end_of_the_interpreter_may_save_after_a_job(
    tmp_path: Path, python: Callable[..., Any]
) -> None:
    code = """
import atexit, sys, numpy as np, penstock

def state(number):
    return {f"w{i:02}": np.full(8, number, "i4") for i in range(40)}

def at_end():
    penstock.save(state(2), sys.argv[1])
    print("saved", job.result().files)

atexit.register(at_end)
job = penstock.save(state(1), sys.argv[1], max_shard_size=32, wait=False)
"""
    run = python(code, tmp_path)
    assert run.stdout.startswith("saved ['model-00001-of-00040.safetensors'"), run.stderr
    assert not run.stderr and number_in(tmp_path) == 2

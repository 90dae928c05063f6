"""The process that forks the ranks of tests: what reaches them, what it survives, and that they do not outlive it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks_together import NURSERY, Nursery, Ranks, ordered, state, until

pytest.importorskip("torch.distributed")


def test_ranks_have_the_environment_of_their_test(
    together: Callable[..., Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
    said["named"] = os.environ.get("PENSTOCK_TEST_NAMED"), os.environ["PENSTOCK_EXCHANGE"]
    """
    with together(program, 1, tmp_path) as ranks:
        assert ranks.said(0)["named"] == [None, "on"]
    monkeypatch.setenv("PENSTOCK_TEST_NAMED", "here")
    with together(program, 2, tmp_path) as ranks:
        assert [one["named"] for one in ranks.all()] == [["here", "on"]] * 2
    monkeypatch.delenv("PENSTOCK_TEST_NAMED")
    with together(program, 1, tmp_path) as ranks:
        assert ranks.said(0)["named"] == [None, "on"]


def test_a_nursery_has_one_thread_and_no_descriptor_but_those_it_needs(nursery: Nursery) -> None:
    """Of other threads only what they hold would reach the ranks, for good."""
    process = Path(f"/proc/{nursery.process.pid}")
    assert len(list((process / "task").iterdir())) == 1
    opened = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
    # Standard ones, answers, the pipe that wakes it up, and what ranks read
    assert len(opened) <= 7, opened


def test_what_ranks_print_and_break_disturbs_no_later_ones(
    nursery: Nursery, together: Callable[..., Ranks], tmp_path: Path
) -> None:
    """Ranks that print, that are killed, that are stopped for good, and that fail; of none is anything left."""
    program = """
    print("[[1], [2]]", flush=True)
    os.write(1, b"more\\n")
    said["read"] = sys.stdin.read()
    if rank:
        os.kill(os.getpid(), [signal.SIGKILL, signal.SIGSTOP][rank - 1]) if rank < 3 else missing
    """
    for _ in range(2):
        with pytest.raises(AssertionError, match="NameError"), together(program, 4, tmp_path) as ranks:
            assert ranks.said(0)["read"] == ""
            ranks.ended(1)
            with pytest.raises(AssertionError, match="rank 1 was killed"):
                ranks.said(1)
            until(lambda ranks=ranks: state(ranks.pids[2]) == "T")  # type: ignore[misc]
            ranks.said(3)
        assert [state(pid) for pid in ranks.pids + ranks.hosts] == ["Z"] * 5
    assert nursery.process.poll() is None


def test_no_rank_outlives_a_nursery_that_is_killed(together: Callable[..., Ranks], tmp_path: Path) -> None:
    """Nor one that is stopped. A rank is that nursery: it has torch already."""
    program = """
    orders, answers = os.pipe(), os.pipe()
    os.dup2(orders[0], 0)
    os.dup2(answers[1], 1)
    os.write(orders[1], f"{folder_of_order}\\n".encode())
    exec(text, {})
    """
    stays = """
    write(folder, f"here.{rank}", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP) if rank else time.sleep(1000)
    """
    folder = ordered(stays, 2, tmp_path, tmp_path / "stay", hosted_by=0)
    with together(program, 1, tmp_path, folder_of_order=str(folder), text=NURSERY) as ranks:
        until(lambda: (folder / "here.0").exists() and (folder / "here.1").exists())
        pids = [int((folder / f"here.{rank}").read_text()) for rank in range(2)]
        until(lambda: state(pids[1]) == "T")
        assert state(pids[0]) != "Z"
        os.kill(ranks.pids[0], signal.SIGKILL)
        until(lambda: [state(pid) for pid in pids] == ["Z", "Z"])


def test_same_compares_every_tensor_that_it_is_given(together: Callable[..., Ranks], small: Path) -> None:
    program = """
    found = penstock.open(path).load()
    said["all"] = same(found)
    for wrong in ({**found, "another": found["mask"]}, {**found, "mask": ~found["mask"]}, {"step": found["step"] + 1}):
        try:
            same(wrong)
        except AssertionError as error:
            said.setdefault("wrong", []).append(str(error))
    """
    with together(program, 1, small) as ranks:
        assert ranks.said(0) == {"all": 11, "wrong": ["not of the checkpoint", "mask", "step"]}

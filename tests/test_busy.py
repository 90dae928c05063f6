"""`tools/busy.py`: it keeps a machine busy as long as a command runs, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ordeal
import pytest
from neighbours import VARIABLE, is_quiet

TOOL = Path(__file__).parents[1] / "tools" / "busy.py"
#: Says who runs beside it and what it knows of the machine, and ends with 7.
COMMAND = """
import os, pathlib, sys, time
family = lambda: pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
time.sleep(float(sys.argv[1]))
print(*[pid for pid in family() if int(pid) != os.getpid()], flush=True)
print(os.environ["PENSTOCK_TEST_PRESSURE"], flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


def begin(folder: Path, *times: float, limit: float = 60.0) -> subprocess.Popen[str]:
    # Memory is taken where less than so much is available: here never
    command = [sys.executable, TOOL, "--folder", folder, "--available", str(1 << 60), "--limit", str(limit), "--"]
    command += [sys.executable, "-c", COMMAND, *map(str, times)]
    # What `make test-busy` has found before: nobody is busy yet
    told = {VARIABLE: "cpu=0.00 io=0.00 memory=0.00", "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | told)


def gone(pids: list[str]) -> bool:
    return not any(Path(f"/proc/{pid}/stat").exists() for pid in pids)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file that is read is written first: a small one here, by a copy of the tool."""
    text = TOOL.read_text()
    assert "FILE = 1 << 30" in text and "if left > most - CHUNK" in text
    copy = tmp_path / "tool" / "busy.py"
    copy.parent.mkdir()
    copy.write_text(text.replace("FILE = 1 << 30", "FILE = 4 << 20").replace("left > most - CHUNK", "left > 1 << 60"))
    monkeypatch.setattr(sys.modules[__name__], "TOOL", copy)


def test_what_runs_beside_a_command_ends_with_it(tmp_path: Path) -> None:
    process = begin(tmp_path, 1.0, 0.5)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("busy: ")
    pids = process.stdout.readline().split()
    assert len(pids) == 4
    pressure = process.stdout.readline().strip()
    assert pressure.startswith("cpu=") and not is_quiet(pressure)
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    assert sum(int(fields[11]) > 0 for fields in states) >= 2, "nobody spins"
    assert process.wait(60 * ordeal.load_factor()) == 7
    process.stdout.close()
    assert gone(pids)
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, None], ids=str)
def test_it_ends_however_it_ends(tmp_path: Path, how: signal.Signals | None) -> None:
    process = begin(tmp_path, 0.2, 1.0 if how else 20.0, limit=60.0 if how else 2.0)
    assert process.stdout is not None
    process.stdout.readline()
    pids = process.stdout.readline().split()
    if how is not None:
        os.kill(process.pid, how)
    code = process.wait(60 * ordeal.load_factor())
    assert code == {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL, None: 124}[how]
    process.stdout.close()
    ordeal.soon(lambda: gone(pids), 10)
    time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]


@pytest.mark.parametrize("seconds", [0, 1], ids=["at once", "slow to start"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, None], ids=str)
def test_what_the_command_has_started_ends_with_the_tool(
    tmp_path: Path, how: signal.Signals | None, seconds: float
) -> None:
    # On a busy machine the command runs before the tool knows that it does
    text, call = TOOL.read_text(), "start_new_session=True)"
    assert text.count(call) == 1
    TOOL.write_text(text.replace(call, f"{call}; time.sleep({seconds})"))
    program = "import os, subprocess, sys\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\n"
    program += "child.wait()\n" if how else "os._exit(7)\n"
    command = [sys.executable, TOOL, "--folder", tmp_path, "--available", str(1 << 60), "--"]
    command += [sys.executable, "-c", program]
    told = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=told) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("busy: ")
        started = process.stdout.readline().split()
        if how is not None:
            process.send_signal(how)
        code = process.wait(60 * ordeal.load_factor())
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, None: 7}[how]
    ordeal.soon(lambda: gone(started), 20)  # who has ended is listed until its new parent has asked how

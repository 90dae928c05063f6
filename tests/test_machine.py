"""What becomes of a test that observes the machine, where the machine is quiet and where it is not (`machine.py`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import neighbours
import ordeal
import pagecache
import pytest

HERE = Path(__file__).parent

#: Stands in for what others do on the machine, so that both kinds of machine are there wherever this runs.
CONFTEST = """
import pytest
pytest.register_assert_rewrite("machine")
import os, machine
pytest_plugins = ["machine"]
machine.time.sleep = lambda seconds: None
machine.Moment.disturbance = lambda self, since: os.environ["DISTURBANCE"] or None
"""

OBSERVED = """
import ordeal, pytest
from pathlib import Path

def tries(name):
    path = Path(name)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())

@pytest.fixture(scope="module")
def filled():
    if tries("filled") < 3:
        raise ordeal.NotQuiet("pages do not stay")

@pytest.mark.machine
def test_counts():
    tries("counts")
    assert 4097 == 4096

@pytest.mark.machine
def test_counts_right_the_second_time():
    assert tries("second") == 2

@pytest.mark.machine
def test_is_filled_the_third_time(filled):
    pass

@pytest.mark.machine
def test_is_never_filled():
    tries("never")
    raise ordeal.NotQuiet("pages do not stay")

@pytest.mark.machine
def test_bytes_are_wrong():
    tries("wrong")
    ordeal.same({"a": b"1"}, {"a": b"2"})

@pytest.mark.machine
def test_is_an_error():
    tries("error")
    raise OSError("broken")

def test_computes():
    tries("computes")
    assert 1 == 2
"""


def outcomes(folder: Path, disturbance: str, *arguments: str, **environment: str) -> tuple[int, dict[str, str], str]:
    """The exit code of a run of these tests, the outcome of each, and what was printed."""
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "DISTURBANCE": disturbance, **environment}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)$", done.stdout, re.MULTILINE)
    return done.returncode, {name: kind for kind, name in found}, "\n".join(skipped) + done.stdout + done.stderr


def tries(folder: Path, *names: str) -> list[int]:
    return [len((folder / name).read_text()) for name in names]


def test_on_a_busy_machine_counts_are_tried_again_and_skipped_and_results_are_not(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(OBSERVED)
    code, found, said = outcomes(tmp_path, "others had a processor")
    assert code == 1
    assert found == {
        "test_counts_right_the_second_time": "PASSED",
        "test_is_filled_the_third_time": "PASSED",
        "test_bytes_are_wrong": "FAILED",
        "test_is_an_error": "FAILED",
        "test_computes": "FAILED",
    }, said
    assert tries(tmp_path, "counts", "never", "wrong", "error", "computes") == [3, 3, 1, 1, 1]
    assert f"{neighbours.PREFIX}others had a processor: assert 4097 == 4096" in said
    assert f"{neighbours.PREFIX}pages do not stay" in said
    assert "4 tests were tried again, 2 of them skipped at last" in said


def test_on_a_quiet_machine_a_count_that_is_wrong_is_a_failure_at_once(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(OBSERVED)
    _, found, said = outcomes(tmp_path, "")
    assert found["test_counts"] == found["test_counts_right_the_second_time"] == "FAILED", said
    assert tries(tmp_path, "counts", "second", "never") == [1, 1, 3]
    assert "test_is_never_filled" not in found  # its precondition is another thing


HUNDREDS = """
import ordeal, pytest

@pytest.mark.parametrize("number", range(200))
def test_computes(number):
    pass

@pytest.mark.machine
@pytest.mark.parametrize("number", range({count}))
def test_observes(number):
    raise ordeal.NotQuiet("pages do not stay")
"""


@pytest.mark.parametrize(
    ("count", "pressure", "code"),
    [
        (2, "cpu=1.00 io=9.99 memory=0.00", 0),
        (3, "cpu=1.00 io=9.99 memory=0.00", 1),
        (3, "cpu=1.00 io=10.00 memory=0.00", 0),
        (3, "cpu=1.00 io=0.00", 0),  # a kernel that does not tell
    ],
)
def test_more_than_one_in_a_hundred_fail_the_run_where_the_machine_was_quiet_before_it(
    tmp_path: Path, count: int, pressure: str, code: int
):
    (tmp_path / "test_it.py").write_text(HUNDREDS.format(count=count))
    # The others are counted, although they run in a run of their own
    found, _, said = outcomes(tmp_path, "", "-q", "-m", "machine", **{neighbours.VARIABLE: pressure})
    assert found == code, said
    assert ("FAILED: skipped were more than 1% of 203 tests" in said) is (code == 1)
    assert f"{count} of them skipped at last" in said
    assert pressure in said


def test_the_pressure_of_this_machine_is_read():
    if not Path("/proc/pressure/cpu").exists():
        pytest.skip("this kernel does not tell")
    parts = dict(part.split("=") for part in neighbours.pressure().split())
    assert list(parts) == ["cpu", "io", "memory"]
    assert all(0 <= float(share) <= 100 for share in parts.values())


def test_what_others_do_is_told_apart_from_what_the_test_does():
    spin = "import time; end = time.monotonic() + 0.5\nwhile time.monotonic() < end: pass"
    before = neighbours.Moment.now()
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = neighbours.Moment.now()
    # The child is the test's own, on a machine with whatever others
    assert after.own_processor - before.own_processor > 0.02
    alone = replace(
        after,
        processor=before.processor + after.own_processor - before.own_processor,
        disk=before.disk + after.own_disk - before.own_disk,
        scanned=before.scanned,
        given_up=0,
    )
    assert alone.disturbance(before) is None
    seconds = after.at - before.at
    for what, said in (
        ({"processor": alone.processor + 0.2 * seconds + 0.03}, "others had a processor for"),
        ({"disk": alone.disk + int(30e6 * seconds) + 4_000_001}, "others read"),
        ({"scanned": alone.scanned + 1}, "the kernel was freeing memory"),
        ({"given_up": 7}, "the kernel gave up 7 pages of the test's files"),
    ):
        assert said in str(replace(alone, **what).disturbance(before))


@pytest.mark.machine
def test_pages_that_a_test_brought_in_stay_until_it_ends(tmp_path: Path):
    path = ordeal.write(tmp_path / "x.safetensors", 2, 1 << 20)
    pagecache.warm(path)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not pagecache._held:
        pytest.skip("this user may not lock memory")
    assert pagecache.resident(path).all()
    assert not [line for line in ordeal.descriptors() if ".safetensors" in line]
    pagecache.let_go()
    assert not ordeal.file_maps()
    pagecache.evict(path)
    assert not pagecache.resident(path).any()

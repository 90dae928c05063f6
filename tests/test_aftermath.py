"""A test that fails does not make its followers fail (`aftermath.py`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

FOLLOWED = """
import gc, signal, sys, threading, time, weakref
import ordeal, penstock, pytest, safetensors

class Tensors:
    pass

alive = weakref.WeakSet()
THEIRS = safetensors.safe_open

@pytest.fixture
def none_alive():
    gc.disable()
    yield len(alive)
    gc.enable()

@pytest.mark.parametrize("chained", [False, True])
def test_fails(chained):
    def deeper():
        tensors = Tensors()
        alive.add(tensors)
        assert len(alive) == 7, "a failure"
    if not chained:
        deeper()
    try:
        deeper()
    except AssertionError as error:
        raise RuntimeError from error

@pytest.mark.parametrize("again", [1, 2])
def test_nothing_of_a_failed_test_is_alive(none_alive, again):
    assert none_alive == 0

def test_fails_while_safetensors_is_patched():
    penstock.patch()
    penstock.patch()
    assert False

def test_leaves_a_patch():
    penstock.patch()

def test_safetensors_is_not_patched():
    assert safetensors.safe_open is THEIRS

def test_leaves_a_thread():
    named = threading.Event()
    def wait():
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
            name.write("penstock-made-up")
        named.set()
        time.sleep(600)
    threading.Thread(target=wait, daemon=True).start()
    named.wait()

def test_no_thread_is_found():
    assert ordeal.threads() == []

def test_ctrl_c_interrupts():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
"""


def test_what_follows_a_failed_test_passes(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(
        "from conftest_of_tests import *\nimport conftest_of_tests as conftest, machine\nconftest.MOMENT = 0.1\n"
        "machine.OBSERVERS.clear()  # on a busy machine, what fails here is to fail all the same"
    )
    (tmp_path / "conftest_of_tests.py").symlink_to(HERE / "conftest.py")
    (tmp_path / "test_it.py").write_text(FOLLOWED)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    # A shell that starts something in the background has it ignore Ctrl-C
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, set[str]] = {}
    for kind, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+(?:\[\w+\])?)", done.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(kind)
    assert found == {
        "test_fails[False]": {"FAILED"},
        "test_fails[True]": {"FAILED"},
        "test_nothing_of_a_failed_test_is_alive[1]": {"PASSED"},
        "test_nothing_of_a_failed_test_is_alive[2]": {"PASSED"},
        "test_fails_while_safetensors_is_patched": {"FAILED", "ERROR"},
        "test_leaves_a_patch": {"PASSED", "ERROR"},
        "test_safetensors_is_not_patched": {"PASSED"},
        "test_leaves_a_thread": {"PASSED", "ERROR"},
        "test_no_thread_is_found": {"PASSED"},
        "test_ctrl_c_interrupts": {"PASSED"},
    }, done.stdout + done.stderr

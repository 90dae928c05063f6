"""``python -m penstock.run``: a program sees what Python itself would show it, with safetensors patched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import ordeal
import pytest

pytest.importorskip("safetensors")

SHOWS = """
import json, sys
print(json.dumps([__name__, sys.argv, sys.path[0], __file__, __spec__ is None, __package__,
                  sys.modules["__main__"].__dict__ is globals(), type(__loader__).__name__]))
"""
FAILS = """
def inner():
    raise KeyError("lost")

def outer():
    try:
        inner()
    except KeyError as error:
        raise RuntimeError("outer") from error

outer()
"""


def run(folder: Path, *words: object, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=120 * ordeal.load_factor(),
        env={**os.environ, "COLUMNS": "80", **more},
        check=False,
    )


def both(folder: Path, *words: object, flags: tuple[str, ...] = (), **more: Any) -> list[tuple[int, str, str]]:
    """(status, standard output, standard error) of a program under Python itself and under penstock.run."""
    alone, ours = (run(folder, *flags, *prefix, *words, **more) for prefix in ((), ("-m", "penstock.run")))
    return [(done.returncode, done.stdout, done.stderr) for done in (alone, ours)]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with programs of every kind: all print what they see."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for path in ("shows.py", "folder/shows.py", "folder/__main__.py", "folder/beside.py"):
        (tmp_path / path).write_text(SHOWS)
    (tmp_path / "folder/__init__.py").touch()
    (tmp_path / "linked.py").symlink_to("folder/shows.py")
    with zipfile.ZipFile(tmp_path / "packed.pyz", "w") as packed:
        packed.writestr("__main__.py", SHOWS)
    return tmp_path


WORDS = [
    ("shows.py", "a", "-m", "--b"),
    ("./folder/shows.py",),
    ("linked.py",),
    ("link/shows.py", "x"),
    ("folder", "x"),
    ("packed.pyz", "x"),
    ("-m", "shows", "a", "-m", "b"),
    ("-m", "folder", "x"),
    ("-m", "folder.beside"),
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_program_sees_what_python_shows_it(program, words):
    alone, ours = both(program, *words)
    assert alone[0] == 0, alone
    assert ours == alone


def test_a_safe_path_stays_safe(program):
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought -P")
    code = "import sys; print(sys.path)"
    (program / "path.py").write_text(code)
    alone, ours = both(program, "path.py", flags=("-P",))
    assert ours == alone


def test_a_program_of_standard_input_runs(program):
    alone, ours = both(program, "-", "a", stdin="import sys; print(sys.argv, sys.path[0], __name__)")
    assert ours == alone


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("raise SystemExit(7)", 7), ("import sys; sys.exit('why')", 1), ("raise SystemExit", 0), (FAILS, 1),
     ("def broken(:\n", 1), ("import atexit\natexit.register(print, 'at the end')\nraise ValueError", 1)],
)  # fmt: skip
def test_exit_statuses_and_tracebacks_are_those_of_python(program, code, status):
    (program / "ends.py").write_text(code)
    alone, ours = both(program, "ends.py")
    assert alone[0] == status
    assert ours == alone


def test_the_traceback_of_a_module_is_that_of_python(program):
    (program / "ends.py").write_text(FAILS)
    alone, ours = both(program, "-m", "ends")
    assert alone[0] == 1 and 'raise RuntimeError("outer")' in alone[2]
    assert ours == alone


def test_a_hook_of_the_program_sees_the_traceback_without_us(program):
    code = """
    import sys, traceback
    def hook(kind, error, trace):
        print([frame.name for frame in traceback.extract_tb(trace)])
    sys.excepthook = hook
    raise ValueError
    """
    (program / "hooks.py").write_text(textwrap.dedent(code))
    assert [done[1] for done in both(program, "hooks.py")] == ["['<module>']\n"] * 2


def test_an_interrupt_ends_it_by_the_signal(program):
    (program / "waits.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)"
    )
    alone, ours = both(program, "waits.py")
    assert ours == alone
    assert ours[0] == -signal.SIGINT and ours[2].endswith("KeyboardInterrupt\n")


def test_safetensors_is_penstock_and_only_there(program):
    code = "from safetensors import safe_open\nprint(safe_open.__module__)"
    (program / "loads.py").write_text(code)
    alone, ours = both(program, "loads.py", PENSTOCK_PATCH="0")
    assert (alone[1], ours[1]) == ("builtins\n", "penstock._patch\n")


def test_what_is_defined_in_a_program_can_be_pickled_and_forked(program):
    code = """
    import multiprocessing, pickle
    class Point:
        pass
    def of(point):
        return type(point).__name__
    assert isinstance(pickle.loads(pickle.dumps(Point())), Point)
    if __name__ == "__main__":
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(pool.apply(of, (Point(),)))
    """
    (program / "points.py").write_text(textwrap.dedent(code))
    alone, ours = both(program, "points.py")
    assert ours == alone == (0, "Point\nPoint\n", "")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 2, "usage: python -m penstock.run"),
        (("-m",), 2, "usage: python -m penstock.run"),
        (("--unknown", "x.py"), 2, "usage: python -m penstock.run"),
        (("missing.py",), 2, "can't open file"),
        (("-m", "no_such_module"), 1, "No module named no_such_module"),
    ],
)
def test_what_cannot_be_run_is_said(program, words, status, said):
    done = run(program, "-m", "penstock.run", *words)
    assert done.returncode == status
    assert said in done.stderr and "Traceback" not in done.stderr


def test_without_safetensors_nothing_is_run(program):
    (program / "safetensors.py").write_text("raise ImportError('hidden')")
    (program / "says.py").write_text("print('ran')")
    done = run(program, "-m", "penstock.run", "says.py")
    assert (done.returncode, done.stdout) == (3, "")
    assert "safetensors" in done.stderr and done.stderr.count("\n") == 1

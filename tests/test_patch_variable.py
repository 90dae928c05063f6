"""``PENSTOCK_PATCH=1``: a program that is not edited, and one that never loads anything."""

from __future__ import annotations

import site
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from penstock.synthetic.synth import Tensor

pytest.importorskip("safetensors")

ROOT = Path(__file__).parent.parent
#: What penstock-patch installs, a package of its own.
LINE = ROOT / "patch" / "penstock_patch.pth"
#: What the interpreter does with a folder of installed packages; the wheel puts the file in one.
START = f"import site; site.addsitedir({str(LINE.parent)!r})\n"


@pytest.fixture
def started(python: Callable[..., Any]) -> Callable[..., str]:
    """Runs a program after an interpreter start with the variable; what it prints, and its warnings."""

    def run(code: str, value: str | None, *arguments: object) -> str:
        done = python(START + code, *arguments, **({} if value is None else {"PENSTOCK_PATCH": value}))
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def one(write: Callable[..., Path]) -> Path:
    return write(Tensor("a", "F32", (6, 8)))


def test_a_program_that_is_not_edited_loads_with_penstock(started, one):
    code = """
import sys
from safetensors import safe_open
from safetensors.numpy import load_file
with safe_open(sys.argv[1], framework="np") as file:
    print(type(file).__module__, load_file(sys.argv[1])["a"].shape)
"""
    assert started(code, "1", one) == "penstock._patch (6, 8)\n"
    assert started(code, "0", one) == started(code, "", one) == started(code, None, one) == "builtins (6, 8)\n"


def test_nothing_is_imported_before_safetensors_is(started):
    code = """
import sys
print([name for name in sys.modules if name.split(".")[0] in ("penstock", "safetensors", "torch", "numpy")])
import safetensors
print("penstock" in sys.modules, safetensors.__spec__.loader is safetensors.__loader__, type(safetensors.__loader__))
print([finder for finder in sys.meta_path if type(finder).__module__ == "_penstock_after"
       and "safetensors" in finder._names])
"""
    expected = "[]\nTrue True <class '_frozen_importlib_external.SourceFileLoader'>\n[]\n"
    assert started(code, "1") == expected


def test_without_the_variable_nothing_at_all_happens(started):
    code = """
import sys
print([name for name in sys.modules if "penstock" in name], [one for one in sys.meta_path if "penstock" in repr(one)])
"""
    assert started(code, None) == "[] []\n"


@pytest.mark.parametrize("first", ["import penstock", "import safetensors", "import safetensors.numpy"])
def test_it_does_not_matter_what_is_imported_first(started, first):
    code = f"""
{first}
import penstock, safetensors.numpy
for module in (safetensors, safetensors.numpy):
    print(issubclass(module.safe_open, penstock.safe_open))
print(hasattr(safetensors.numpy.save_file, "__wrapped__"))
with penstock.patch():
    pass
print(issubclass(safetensors.safe_open, penstock.safe_open))
"""
    assert started(code, "1") == "True\n" * 4


def test_safetensors_may_have_been_imported_by_another_such_line(python):
    code = (
        "import safetensors\n" + START + "import penstock; print(issubclass(safetensors.safe_open, penstock.safe_open))"
    )
    run = python(code, PENSTOCK_PATCH="1")
    assert run.stdout == "True\n", run.stderr


def test_a_value_that_is_neither_is_a_warning(started):
    said = started("import safetensors; print(safetensors.safe_open.__module__)", "yes")
    assert said.startswith("builtins\n")
    assert "PENSTOCK_PATCH='yes': give 1 or 0" in said


def test_a_penstock_that_cannot_be_imported_is_a_warning(started):
    said = started("import sys; sys.modules['penstock._core'] = None\nimport safetensors; print('goes on')", "1")
    assert said.startswith("goes on\n")
    assert "PENSTOCK_PATCH=1: safetensors stays as it is" in said


def test_a_missing_safetensors_is_still_missing(started):
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "safetensors":
            raise ModuleNotFoundError("hidden", name=name)
sys.meta_path.insert(0, Hidden())
try:
    import safetensors
except ModuleNotFoundError as error:
    print(error)
import penstock
print(penstock.SafetensorError.__module__)
"""
    assert started(code, "1") == "hidden\npenstock._errors\n"


@pytest.mark.machine
def test_the_line_costs_less_than_a_millisecond_where_the_variable_is_not_set(monkeypatch):
    monkeypatch.delenv("PENSTOCK_PATCH", raising=False)
    [line] = LINE.read_text().splitlines()
    assert line.startswith("import ")  # what the interpreter runs; any other line would be a folder
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        exec(line, {})
        taken.append(time.perf_counter() - begun)
    assert min(taken) < 0.001
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "_penstock_after"]
    assert callable(site.addsitedir)

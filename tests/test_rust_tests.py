"""What `tools/rust_tests.py` makes of what test programs print."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "rust_tests.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    specification = importlib.util.spec_from_file_location("rust_tests", TOOL)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["rust_tests"] = module
    specification.loader.exec_module(module)
    return module


#: A test program: of two tests the first says what the file `said` has, unless its file `fails` counts down to 0.
PROGRAM = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
left = here / "fails"
fails = int(left.read_text())
left.write_text(str(fails - 1))
print("running 2 tests")
print("test tests::right ... ok")
print(f"test tests::slow ... {{'FAILED' if fails > 0 else 'ok'}}")
if fails > 0:
    print("\\nfailures:\\n\\n---- tests::slow stdout ----")
    print("thread 'tests::slow' (7) panicked at tests/a.rs:7:5:")
    print((here / "said").read_text())
    print("\\n\\nfailures:\\n    tests::slow\\n")
    print("test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s")
    sys.exit(101)
print("test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s")
"""
TIME = "assertion failed: took < limit"


@pytest.fixture
def program(tool: Any, tmp_path: Path) -> Any:
    path = tmp_path / "program"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return tool.Program("a", str(path), str(tmp_path))


@pytest.mark.parametrize(
    ("fails", "said", "disturbance", "failed", "skipped"),
    [
        (0, TIME, "others", [], []),
        (2, TIME, "others", [], []),  # right at last
        (3, TIME, "others", [], ["a tests::slow"]),
        (1, TIME, None, ["tests::slow"], []),
        (1, "wrong bytes in want 3", "others", ["tests::slow"], []),
        (1, "called `Result::unwrap()` on an `Err` value: Io", "others", ["tests::slow"], []),
    ],
)
def test_what_fails_while_others_use_the_machine_is_tried_again_and_results_are_not(
    tool: Any, program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    fails: int, said: str, disturbance: str | None, failed: list[str], skipped: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(tool.Moment, "disturbance", lambda self, since: disturbance)
    (tmp_path / "fails").write_text(str(fails))
    (tmp_path / "said").write_text(said)
    outcome, why = tool.observed(program)
    assert list(outcome.failed) == failed
    assert why == dict.fromkeys(skipped, "others")
    assert outcome.passed == 2 - len(failed) - len(skipped)


def test_a_program_that_ends_without_a_result_has_failed(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\nimport os; os.abort()\n")
    path.chmod(0o755)
    assert tool.run(tool.Program("a", str(path), str(tmp_path))).failed == {"": "the program ended with -6"}

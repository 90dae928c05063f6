"""The `Literal` types of options and arguments: they list what is accepted, and every public function has them."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import penstock
import pytest
from penstock import _checkpoint, _choices, _core, _frameworks, _patch, _safe_open
from penstock.compat import instanttensor


def told(call: Any, *args: Any, **more: Any) -> tuple[str, ...]:
    """The values that the error of an impossible one lists."""
    with pytest.raises(ValueError) as caught:
        call(*args, **more)
    return tuple(re.findall(r'"(\w+)"', str(caught.value)))


@pytest.mark.parametrize(("option", "type_"), [("io", _choices.Io), ("cache", _choices.Cache)])
def test_the_values_of_an_option_are_those_that_the_core_takes(option, type_):
    assert told(_core.Options, **{option: "?"}) == get_args(type_)
    for value in get_args(type_):
        assert getattr(_core.Options(**{option: value}), option) == value


def test_layouts_and_orders_are_those_that_the_core_takes():
    for layout in get_args(_choices.Layout):
        for order in get_args(_choices.Order):
            _core.head([], None, layout=layout, order=order)
    assert set(told(_core.head, [], None, layout="no", order="file")) - {"no"} == set(get_args(_choices.Layout))
    assert set(told(_core.head, [], None, layout="aligned", order="no")) - {"no"} == set(get_args(_choices.Order))


def test_orders_of_a_load_are_those_that_the_core_takes(small):
    checkpoint = penstock.open(small)
    for order in get_args(_choices.Order):
        _core.Load.start(checkpoint._core, _core.Options(), order=order).close()
    with pytest.raises(ValueError):
        _core.Load.start(checkpoint._core, _core.Options(), order="no")


def test_the_other_choices_are_those_that_python_takes():
    assert get_args(_choices.Framework) == tuple(_frameworks.FRAMEWORKS)
    assert set(get_args(_choices.Backend)) == set(_safe_open._BACKENDS) - {None} == set(_patch._BACKENDS)
    assert get_args(_choices.Order) == _choices.ORDERS
    assert get_args(_choices.Layout) == _choices.LAYOUTS
    for mode in get_args(_choices.NameMatch):
        instanttensor._matcher(["a"], mode)
    with pytest.raises(ValueError, match=", ".join(get_args(_choices.NameMatch))):
        instanttensor._matcher(["a"], "no")


def test_the_states_of_a_fill_are_those_that_the_core_knows():
    source = (Path(__file__).parent.parent / "crates/python/src/fill.rs").read_text()
    assert set(re.findall(r'=> "(\w+)"', source)) == set(get_args(_choices.FillState))


TYPES = {
    "framework": _choices.Framework,
    "order": _choices.Order,
    "layout": _choices.Layout,
    "backend": _choices.Backend,
}
FUNCTIONS = [
    _checkpoint.Checkpoint.load,
    _checkpoint.Checkpoint.start,
    _checkpoint.Checkpoint.stream,
    _checkpoint.Checkpoint.load_into,
    penstock.get_sharded,
    penstock.broadcast,
    _safe_open.safe_open.__init__,
    _safe_open.safe_open.tensors,
    penstock.load_file,
    penstock.save,
    penstock.save_file,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_every_argument_with_a_fixed_set_of_values_says_so(function):
    hints = get_type_hints(function)
    named = [name for name in inspect.signature(function).parameters if name in TYPES]
    assert named
    for name in named:
        assert hints[name] in (TYPES[name], TYPES[name] | None), name


PROGRAM = """
import penstock

checkpoint = penstock.open("model")
checkpoint.load(framework="{framework}", order="{order}", options=penstock.Options(io="{io}", cache="{cache}"))
penstock.load_file("x", framework="{framework}", backend="{backend}")
penstock.save({{}}, "x", layout="{layout}", order="{order}")
penstock.save_file({{}}, "x", layout="{layout}", order="{order}")
for name, info in checkpoint.items():
    print(name.upper(), info.nbytes)
"""
#: What penstock imports if it is there. Their types take half a minute, and say nothing of what is mistyped here.
FRAMEWORKS = """
[mypy]
strict = true
follow_imports = silent

[mypy-torch.*,numpy.*,jax.*,flax.*,tensorflow.*,paddle.*,mlx.*,ml_dtypes.*,safetensors.*,vllm.*,sglang.*]
follow_imports = skip
ignore_missing_imports = true
"""
RIGHT = {"framework": "np", "order": "layer", "io": "direct", "cache": "keep", "backend": "pread", "layout": "compact"}


def test_a_type_checker_finds_a_mistyped_value(tmp_path):
    if shutil.which("mypy") is None:
        pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(PROGRAM.format(**RIGHT))
    for name in RIGHT:
        (tmp_path / f"wrong_{name}.py").write_text(PROGRAM.format(**{**RIGHT, name: "no"}))
    (tmp_path / "wrong_function.py").write_text("import penstock\n\npenstock.opne(source='model')\n")
    (tmp_path / "mypy.ini").write_text(FRAMEWORKS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", *tmp_path.glob("*.py")],
        cwd=Path(penstock.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    wrong = set(re.findall(r"(wrong_\w+|right)\.py:\d+: error", done.stdout))
    assert wrong == {f"wrong_{name}" for name in (*RIGHT, "function")}, done.stdout


def test_storage_has_the_settings_that_the_core_takes_and_the_docs_list():
    names = _core.storage_settings()
    assert list(penstock.Storage.__annotations__) == names
    text = (Path(__file__).parent.parent / "docs/api.md").read_text()
    assert [name for name in names if f"`{name}`" not in text] == []

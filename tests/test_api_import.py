"""What importing penstock costs, and what it leaves alone."""

import pytest


def test_importing_imports_neither_torch_nor_numpy(python):
    code = "import sys, penstock; print([m for m in ('torch', 'numpy', 'tqdm') if m in sys.modules])"
    run = python(code)
    assert run.stdout.strip() == "[]", run.stderr


def test_opening_and_listing_imports_neither(python, small):
    code = """
import sys, penstock
checkpoint = penstock.open(sys.argv[1])
assert checkpoint["step"].dtype == "I64" and len(checkpoint.keys()) == 11
print([m for m in ("torch", "numpy") if m in sys.modules])
"""
    run = python(code, small)
    assert run.stdout.strip() == "[]", run.stderr


def test_dlpack_loads_import_neither(python, small):
    code = """
import sys, penstock
assert len(penstock.open(sys.argv[1]).load(framework="dlpack")) == 11
print([m for m in ("torch", "numpy") if m in sys.modules])
"""
    run = python(code, small)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.machine
def test_importing_takes_less_than_a_tenth_of_a_second(python, tmp_path):
    code = "import time; t = time.perf_counter(); import penstock; print(time.perf_counter() - t)"
    # pip compiles what it installs; this tree may not be compiled, or its environment may ask for no bytecode
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    python(code, **compiled)
    assert any(tmp_path.rglob("_checkpoint.*.pyc"))
    assert any(float(python(code, **compiled).stdout) < 0.1 for _ in range(5))  # undisturbed once


@pytest.mark.parametrize("missing", ["torch", "numpy", "safetensors", "tqdm"])
def test_penstock_works_without(python, small, missing):
    code = """
import importlib.util, sys
missing, folder = sys.argv[1:]
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] == missing else real(name, *a)
import penstock
framework = {"torch": "np", "numpy": "pt"}.get(missing)
state = penstock.open(folder).load(names="layers.*", framework=None if missing == "torch" else framework)
print(type(next(iter(state.values()))).__module__, issubclass(penstock.PenstockError, Exception))
"""
    run = python(code, missing, small)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["numpy" if missing == "torch" else "torch", "True"]


def test_errors_are_safetensors_own_only_where_it_is_installed(python):
    code = "import sys; sys.modules['safetensors'] = None; import penstock; print(penstock.SafetensorError.__module__)"
    assert python(code).stdout.strip() == "penstock._errors"


def test_everything_that_is_public_is_documented():
    import penstock

    for name in penstock.__all__:
        if name != "__version__":
            assert getattr(penstock, name).__doc__, name

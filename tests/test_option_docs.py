"""tools/option_docs.py: what files say of the options, and of the settings of stores, is what the tables say."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import penstock
import pytest
from penstock import _core

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
option_docs = importlib.import_module("option_docs")
sys.path.pop(0)


def test_the_files_say_what_the_tables_say(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["option_docs.py", "--check"])
    assert option_docs.main() == 0, capsys.readouterr().out


def test_a_file_that_says_something_else_is_found_and_written_anew(monkeypatch, tmp_path, capsys):
    for path in {path for path, *_ in option_docs.PARTS}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((option_docs.ROOT / path).read_text())
    page = tmp_path / "docs/tuning.md"
    right = page.read_text()
    page.write_text(right.replace("| `staging` | 256 MiB |", "| `staging` | 64 MiB |"))
    monkeypatch.setattr(option_docs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["option_docs.py", "--check"])
    assert option_docs.main() == 1
    assert capsys.readouterr().out.startswith("docs/tuning.md: ")
    assert page.read_text() != right
    monkeypatch.setattr(sys, "argv", ["option_docs.py"])
    assert option_docs.main() == 0
    assert page.read_text() == right


def test_a_file_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="no markers `options: begin`"):
        option_docs.written("# options: begin here\n", "options", "")


@pytest.mark.parametrize("option", _core.option_table(), ids=lambda option: option["name"])
def test_a_default_that_a_description_names_is_the_default(option):
    said, _, _ = option["doc"].partition("\n\n")
    said = " ".join(said.split())
    default = option_docs.default_cell(option).strip("`").partition(":")[0].strip("`").removesuffix(" s")
    if "default" in said:
        assert f"(default {default})" in said or f"{default} (the default)" in said
    else:
        assert option["form"] == "Choice" and option["default"] == "auto"


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"extent": 300_000_001}, ValueError, "extent=300000001: must be a multiple of 4096"),
        ({"extent": 8193, "staging": 4096}, ValueError, "extent=8193: must be a multiple of 4096"),
        ({"extent": 2 << 20, "staging": 3 << 20}, ValueError, "staging=3145728: must hold at least two extents"),
        ({"stall_timeout": True}, TypeError, "stall_timeout must be a number of seconds"),
        ({"stall_timeout": 1e-10}, ValueError, "must be a positive number of seconds"),
        ({"stall_timeout": 0}, ValueError, "must be a positive number of seconds"),
        ({"page_timing": "off"}, TypeError, "page_timing must be True, False or None, not 'off'"),
    ],
)
def test_the_limit_of_an_option_names_that_option(values: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        penstock.Options(**values)
    assert pickle.loads(pickle.dumps(penstock.Options(stall_timeout=1e-9))).stall_timeout == 1e-9

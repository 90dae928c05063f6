"""The recipes of docs/recipes: each is in the docs, and systemd accepts the units. `make recipes` judges the others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "docs/recipes"
UNITS = sorted(RECIPES.glob("systemd/*.service"))
systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def judged(*units: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/recipes/units.py"), *map(str, units)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_recipe_is_in_the_documentation():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    recipes = [path for path in RECIPES.rglob("*") if path.is_file()]
    assert len(recipes) > 5
    for path in recipes:
        assert f"](recipes/{path.relative_to(RECIPES)})" in pages, path


def test_every_command_of_a_recipe_is_one():
    """What the recipes run of Penstock: the command and its flags are those of the command line."""
    from penstock import cli

    [commands] = [action for action in cli._parser()._actions if action.dest == "command"]
    ran = 0
    for path in RECIPES.rglob("*.*"):
        for line in path.read_text().splitlines():
            found = re.search(r"(?:\[penstock, |bin/penstock )([\w-]+)(.*)", line)
            if found is None:
                continue
            ran += 1
            flags = {flag for action in commands.choices[found[1]]._actions for flag in action.option_strings}
            assert set(re.findall(r"--[\w-]+", found[2])) <= flags, (path.name, line)
    assert ran >= 4


@systemd
def test_systemd_accepts_the_units():
    found = judged(*UNITS)
    assert found.returncode == 0, found.stderr


@systemd
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("NoNewPrivileges=yes", "NoNewPrivilege=yes"),
        ("ProtectSystem=strict", "ProtectSystem=strictly"),
        ("[Service]", "[Services]"),
        ("SystemCallFilter=@system-service", "SystemCallFilter=@system-services"),
    ],
)
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_mistake_in_a_unit_is_found(tmp_path: Path, unit: Path, right: str, wrong: str):
    text = unit.read_text()
    assert right in text
    copy = tmp_path / unit.name
    copy.write_text(text.replace(right, wrong))
    found = judged(copy)
    assert found.returncode == 1
    assert found.stderr.strip()


@systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_without_its_restrictions_is_too_exposed(tmp_path: Path, unit: Path):
    copy = tmp_path / unit.name
    text = re.sub(
        r"^(No|Protect|Restrict|Capability|System|Private|DynamicUser|Lock|Memory).*\n",
        "",
        unit.read_text(),
        flags=re.M,
    )
    copy.write_text(text)
    found = judged(copy)
    assert found.returncode == 1
    assert "exposure" in found.stderr

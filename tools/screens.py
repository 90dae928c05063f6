"""Writes what the command line shows, at 80 columns, into docs/cli.md.

    python tools/screens.py [--check]

Runs each command that stands behind a `$` in docs/cli.md, and puts what it printed below it. The commands run in a
folder with two checkpoints: `gpt2` (GPT-2's exact tensors, 548 MB) and `moe` (a thin Qwen3-30B-A3B). `--check` writes
nothing. It fails where a screen that does not depend on the machine has changed: `inspect`, `plan`, mistyped words.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
BLOCK = re.compile(r"```console\n\$ (.*)\n(?:.*\n)*?```\n")
CHECKPOINTS = {"gpt2": ("gpt2", "--align", "8"), "moe": ("qwen3-30b-a3b", "--scale", "0.002")}
#: The longest line of a screen. An error is one line, and may list all options.
LONGEST = 120
#: Commands whose output is the same on every machine.
SAME = re.compile(r"penstock (inspect|plan|load gpt2 --names|load gpt2 -o stagin)")


def run(command: str, folder: Path) -> str:
    """What one command prints, standard error included."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    ours = ("PENSTOCK_", "SSL_CERT_FILE")
    environment = {name: value for name, value in environment.items() if not name.startswith(ours)}
    words = [sys.executable, "-m", "penstock.cli", *shlex.split(command)[1:]]
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return "".join(f"{line if len(line) <= LONGEST else cut(line)}\n" for line in done.stdout.splitlines())


def cut(line: str) -> str:
    """The words of a line that fit, and dots for the rest."""
    return line[: line.rindex(" ", 0, LONGEST - 3)] + " ..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a screen has changed")
    check: bool = parser.parse_args().check
    page = PAGE.read_text()
    changed: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, synth in CHECKPOINTS.items():
            run(shlex.join(["penstock", "synth", synth[0], name, *synth[1:]]), folder)

        def shown(block: re.Match[str]) -> str:
            command = block[1]
            if check and not SAME.match(command):
                return block[0]
            new = f"```console\n$ {command}\n{run(command, folder).rstrip()}\n```\n"
            if new != block[0]:
                changed.append(command)
            return new

        page = BLOCK.sub(shown, page)
    if check:
        for command in changed:
            print(f"docs/cli.md: `{command}` prints something else now: run `make screens`")
        return 1 if changed else 0
    PAGE.write_text(page)
    print(f"docs/cli.md: {len(changed)} screens are new")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How the command line looks: words that come close, 80 columns, completion, and no framework for a load."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from penstock import _terminal
from penstock.synthetic.synth import Tensor

USAGE = 2
#: What a shell waits for at most; nothing here takes a second.
LONG = 60


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("lod", "x"), "Did you mean load?"),
        (("inspct", "x"), "Did you mean inspect?"),
        (("load", "--devcie", "cpu", "x"), "Did you mean --device?"),
        (("verify", "--sha265", "x"), "Did you mean --sha256?"),
        (("load", "--order", "layers", "x"), "Did you mean layer?"),
        (("convert", "--layuot=compact", "x", "y"), "Did you mean --layout?"),
    ],
)
def test_a_mistyped_word_of_the_command_line_is_answered_by_the_one_meant(cli, arguments, meant):
    run = cli(*arguments)
    assert run.returncode == USAGE
    assert run.stderr.rstrip().endswith(meant), run.stderr


@pytest.mark.parametrize("arguments", [("zzz",), ("load", "--zzz", "x"), ("load", "--order", "zzz", "x")])
def test_a_word_that_comes_close_to_nothing_gets_no_suggestion(cli, arguments):
    run = cli(*arguments)
    assert run.returncode == USAGE
    assert "zzz" in run.stderr and "Did you mean" not in run.stderr


def test_an_unknown_argument_is_told_with_the_usage_of_its_command(cli):
    assert cli("evict", "--zzz", "x").stderr.startswith("usage: penstock evict")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("-o", "stagin=3"), "did you mean staging?"),
        (("--names", "layers.0.attn.wieght"), "did you mean layers.0.attn.weight?"),
        (("--names", "layers.0.atn*"), "did you mean layers.0.attn*?"),
        (("--names", "layer.0.*"), "did you mean layers.0.*?"),
        (("--names", "transformer.*"), "the names begin with embed, layers, step, hollow, mask, norm and more"),
        (("--names", "*.zzz"), "the names begin with embed"),
    ],
)
def test_a_mistyped_option_tensor_or_glob_is_answered_by_the_one_meant(cli, small, arguments, meant):
    run = cli("load", small, *arguments)
    assert run.returncode in (USAGE, 3)
    assert meant in run.stderr, run.stderr
    assert run.stderr.count("\n") == 1


LOAD = """
import sys
from penstock.cli import main
status = main(sys.argv[1:])
print([name for name in ("torch", "numpy", "jax") if name in sys.modules], file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("more", "imported"),
    [((), []), (("--dtype", "raw"), []), (("--framework", "dlpack"), []), (("--framework", "np"), ["numpy"])],
)
def test_load_imports_no_framework_that_was_not_asked_for(python, small, more, imported):
    run = python(LOAD, "load", small, *more)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[-1] == str(imported)
    assert "GB/s" in run.stdout or "no byte moved" in run.stdout


def test_load_without_a_framework_leaves_misaligned_tensors_in_the_mapping(cli, write):
    # As for torch, which is what the same load in a program would be
    path = write(Tensor("a", "U8", (3,)), Tensor("b", "F32", (1 << 18,)), align=1)
    ours = json.loads(cli("load", path, "--json").stdout)
    theirs = json.loads(cli("load", path, "--json", "--framework", "pt").stdout)
    assert ours["routes"] == theirs["routes"]
    assert ours["routes"]["mapped"]["bytes"] and not ours["routes"]["buffered"]["bytes"]


def test_a_load_that_maps_what_is_resident_claims_no_rate(write):
    import penstock

    path = write(Tensor("a", "F32", (1 << 20,)))
    path.read_bytes()
    checkpoint = penstock.open(path)
    checkpoint.load()
    report = checkpoint.last_report
    if report.resident_bytes < report.nbytes:
        pytest.skip("machine: the kernel has taken the file's pages out of the page cache")
    assert str(report).splitlines()[0].endswith(": mapped, no byte moved")
    checkpoint.load(options={"copy": True})
    assert str(checkpoint.last_report).splitlines()[0].endswith("GB/s")


def test_a_cast_counts_in_the_time_that_the_report_tells(write):
    import penstock

    checkpoint = penstock.open(write(Tensor("a", "F32", (1 << 20,))))
    checkpoint.load(dtype="F16")
    report = checkpoint.last_report
    report["hand_out_seconds"] = 7.0
    first = str(report).splitlines()[0]
    assert f" in {report.seconds + 7.0:.2f} s: " in first
    assert first.endswith("GB/s")  # a cast moves bytes, also of what is mapped


COMMANDS = [
    ("inspect",),
    ("inspect", "--tensors"),
    ("load",),
    ("load", "-o", "copy=true"),
    ("verify",),
    ("verify", "--sha256"),
    ("warm",),
    ("doctor", "--no-measure"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_printed_fits_80_columns(cli, tmp_path, small, command):
    long = tmp_path / ("a-folder-with-a-long-name-" * 4) / "checkpoint"
    long.parent.mkdir()
    long.symlink_to(small)
    # A word that cannot be broken, such as a path or a digest, may be longer
    for line in cli(*command, long, COLUMNS="80").stdout.splitlines():
        assert len(line) <= 80 or max(map(len, line.split())) > 50, line


def test_a_file_or_a_pipe_gets_paths_whole(cli, tmp_path, small):
    long = tmp_path / ("a-folder-with-a-long-name-" * 4)
    long.symlink_to(small)
    assert f"{long}/model-00001-of-00003.safetensors" in cli("inspect", long, COLUMNS="").stdout


@pytest.mark.parametrize(
    "command",
    [
        *("inspect", "load", "verify", "warm", "evict", "pull", "push", "cache", "doctor", "convert", "synth"),
        *("serve", "bench"),
    ],
)
def test_help_fits_80_columns(cli, command):
    for line in cli(command, "--help", COLUMNS="80").stdout.splitlines():
        assert len(line) <= 80, line


def test_inspect_begins_with_the_summary(cli, small):
    first = cli("inspect", small).stdout.splitlines()[0]
    assert first.startswith("11 tensors, ") and first.endswith(" in 3 files")


def test_shortening_keeps_both_ends():
    text = "/models/some/where/deep/model-00001-of-00030.safetensors"
    short = _terminal.shortened(text, 40)
    assert len(short) == 40
    assert short.startswith("/models") and short.endswith("00001-of-00030.safetensors") and "…" in short
    assert _terminal.shortened("short", 40) == "short"


def test_a_pickle_is_told_to_be_converted(cli, tmp_path):
    import torch

    torch.save({"a": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        assert "`penstock convert" in cli("inspect", source).stderr


def completed(line: str) -> list[str]:
    """What the shell offers after ``line``."""
    pytest.importorskip("argcomplete")
    read, write = os.pipe()
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": f"/dev/fd/{write}",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    try:
        command = [sys.executable, "-m", "penstock.cli"]
        subprocess.run(command, env=environment, pass_fds=[write], timeout=LONG, check=False, capture_output=True)
    finally:
        os.close(write)
    with open(read) as offered:
        return [word.strip() for word in offered.read().split("\n") if word.strip()]


def test_a_shell_completes_commands_and_options():
    assert {"inspect", "load", "verify"} <= set(completed("penstock "))
    assert completed("penstock insp") == ["inspect"]
    assert "--framework" in completed("penstock load --fr")
    assert {"cache=", "stall_timeout="} <= set(completed("penstock load -o "))


IN_COLOUR = """
import os, pty, sys
child, terminal = pty.fork()
if child == 0:
    os.environ.update(TERM="xterm-256color", COLUMNS="80")
    os.environ.pop("NO_COLOR", None)
    if sys.argv[1] == "plain":
        os.environ["NO_COLOR"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "penstock.cli", "verify", sys.argv[2]])
shown = b""
while True:
    try:
        more = os.read(terminal, 4096)
    except OSError:
        break
    if not more:
        break
    shown += more
os.waitpid(child, 0)
sys.stdout.buffer.write(shown)
"""


def test_a_terminal_gets_colour_unless_it_wants_none(small):
    pytest.importorskip("rich")

    def shown(how: str) -> str:
        command = [sys.executable, "-c", IN_COLOUR, how, str(small)]
        return subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True).stdout

    assert "\x1b[32mok" in shown("colour")
    assert "\x1b[" not in shown("plain")


def test_the_screens_in_the_docs_are_what_the_commands_print(gpt2, tmp_path):
    # `make screens` writes the page
    spec = importlib.util.spec_from_file_location("screens", Path(__file__).parent.parent / "tools" / "screens.py")
    screens = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screens)
    (tmp_path / "gpt2").symlink_to(gpt2)
    compared = 0
    for block in screens.BLOCK.finditer(screens.PAGE.read_text()):
        command = block[1]
        if screens.SAME.match(command) and " gpt2" in command:
            shown = block[0].partition("\n")[2].partition("\n")[2].removesuffix("```\n")
            assert screens.run(command, tmp_path) == shown, command
            compared += 1
    assert compared >= 3

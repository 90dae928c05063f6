"""The command line: what it prints, and how it exits."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import LAYOUT
from penstock.synthetic.synth import Tensor

OK, FAILED, USAGE, ERROR, UNCOMPARED = 0, 1, 2, 3, 4


def document(run):
    """The one JSON document that a run with --json prints."""
    return json.loads(run.stdout)


def test_version_and_help(cli):
    import penstock

    assert cli("--version").stdout.startswith(f"penstock {penstock.__version__}\n")
    text = cli("--help").stdout
    for command in ("inspect", "load", "verify", "warm", "evict", "doctor", "synth", "serve"):
        assert command in text
        assert cli(command, "--help").returncode == OK


@pytest.mark.parametrize(
    "arguments", [(), ("nonsense",), ("inspect",), ("load", "x", "--order", "random"), ("inspect", "x", "--what")]
)
def test_wrong_usage_exits_with_2(cli, arguments):
    run = cli(*arguments)
    assert run.returncode == USAGE
    assert "usage:" in run.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json",),
        ("nonsense", "--json"),
        ("inspect", "--json"),
        ("--json", "inspect", "x"),
        ("load", "x", "--json", "--order", "random"),
        ("load", "--js", "x", "-o", "staging"),
        ("inspect", "x", "--json", "--what"),
        ("synth", "--json"),
    ],
)
def test_wrong_usage_with_json_is_json(cli, arguments):
    run = cli(*arguments)
    assert run.returncode == USAGE
    found = document(run)
    assert (found["ok"], found["error"]["kind"], found["error"]["path"]) == (False, "Invalid", None)
    assert found["error"]["message"]
    assert found["error"]["message"] in run.stderr


@pytest.mark.parametrize("arguments", [("bench", "--json", "x", "--what"), ("inspect", "x", "--what", "--", "--json")])
def test_wrong_usage_is_no_json_where_nobody_asks_for_it(cli, arguments):
    run = cli(*arguments)
    assert run.returncode == USAGE
    assert run.stdout == ""
    assert "usage:" in run.stderr


@pytest.mark.parametrize("command", ["inspect", "load", "warm", "evict", "verify"])
def test_an_error_is_one_line_without_a_traceback(cli, tmp_path, command):
    run = cli(command, tmp_path / "nothing.safetensors")
    assert run.returncode == ERROR
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"penstock {command}: ")
    assert "nothing.safetensors" in run.stderr
    assert run.stdout == ""


def test_a_traceback_on_request(cli, tmp_path):
    run = cli("inspect", tmp_path / "nothing", PENSTOCK_TRACEBACK="1")
    assert "Traceback" in run.stderr
    assert run.returncode == ERROR


def test_an_error_with_json_is_json(cli, tmp_path):
    run = cli("inspect", "--json", tmp_path / "nothing.safetensors")
    assert run.returncode == ERROR
    found = document(run)
    assert found["ok"] is False
    assert found["error"]["kind"] == "NotFound"
    assert found["error"]["path"].endswith("nothing.safetensors")


def test_inspect_folds_layers_together(cli, small):
    run = cli("inspect", small)
    assert run.returncode == OK, run.stderr
    assert "layers.{0..1}.attn" in run.stdout
    assert "[48, 40]" in run.stdout
    assert "11 tensors" in run.stdout
    assert "3 files" in run.stdout
    assert "format: pt" in run.stdout


def test_inspect_folds_only_what_is_alike(cli, write):
    path = write(
        *(Tensor(f"h.{i}.w", "F32", (2, 2)) for i in (0, 1, 2, 7)),
        Tensor("h.3.w", "F16", (2, 2)),
        Tensor("conv1.weight", "F32", (1,)),
        Tensor("conv2.weight", "F32", (1,)),
        Tensor("h", "F32", (1,)),
    )
    out = cli("inspect", path).stdout
    assert "{0..2,7}" in out
    assert "conv1" in out
    assert "conv2" in out
    assert "F16" in out


def test_inspect_lists_every_tensor_on_request(cli, small):
    out = cli("inspect", small, "--tensors").stdout
    for tensor in LAYOUT.tensors:
        assert tensor.name in out


def test_inspect_as_json(cli, small):
    found = document(cli("inspect", small, "--json"))
    assert found["tensors"] == len(LAYOUT.tensors)
    assert found["nbytes"] == LAYOUT.nbytes
    assert [Path(f["path"]).name for f in found["files"]] == LAYOUT.files
    assert sum(f["nbytes"] for f in found["files"]) == LAYOUT.nbytes
    assert found["dtypes"]["F32"] == {"tensors": 4, "nbytes": 2 * 4 * (1920 + 40), "parameters": 2 * (1920 + 40)}
    assert [e["name"] for e in found["entries"]] == [t.name for t in LAYOUT.tensors]


def test_inspect_of_a_checkpoint_without_tensors(cli, write):
    run = cli("inspect", write())
    assert run.returncode == OK, run.stderr
    assert "0 tensors" in run.stdout


def test_a_reader_that_has_seen_enough_is_no_error(small):
    run = subprocess.run(
        f"{sys.executable} -m penstock.cli inspect --json --tensors {small} | head -c 1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stderr == ""
    assert run.stdout == "{0\n"


@pytest.mark.parametrize(("words", "status"), [("inspect /nonexistent --json", 3), ("lod --json", 2)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_status_of_an_error_is_told_although_nobody_reads_it(words, status, unbuffered):
    # The reader is gone before the program begins
    run = subprocess.run(
        f"exec {{out}}> >(exit); wait $!; {sys.executable} -m penstock.cli {words} >&$out 2>/dev/null; echo $?",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert (run.stdout, run.stderr) == (f"{status}\n", "")


def test_a_terminal_that_is_not_utf_8_gets_escapes(cli, write, tmp_path):
    longer = tmp_path / ("a_long_folder_" * 6)
    longer.mkdir()
    path = longer / "m.safetensors"
    path.write_bytes(write().read_bytes())
    run = cli("inspect", path, PYTHONIOENCODING="latin-1", COLUMNS="40")
    assert run.returncode == OK, run.stderr
    assert "m.safetensors" in run.stdout


@pytest.mark.parametrize(
    "more", [(), ("--framework", "np", "--names", "layers.*"), ("--dtype", "raw"), ("-o", "copy=true")]
)
def test_load_prints_the_report(cli, small, more):
    run = cli("load", small, *more)
    assert run.returncode == OK, run.stderr
    assert "GB/s" in run.stdout or "no byte moved" in run.stdout
    assert run.stderr == ""  # no bar where there is no terminal


def test_load_as_json(cli, small):
    found = document(cli("load", small, "--json", "-o", "staging=64MiB", "--order", "layer"))
    assert found["nbytes"] == LAYOUT.nbytes
    assert found["tensors"] == len(LAYOUT.tensors)


def test_a_bad_option_is_wrong_usage(cli, small):
    run = cli("load", small, "-o", "stagin=3")
    assert run.returncode == USAGE
    assert "staging" in run.stderr
    assert cli("load", small, "-o", "staging").returncode == USAGE
    for impossible in ("io=mmap", "threads=-1", "copy=7"):
        assert cli("load", small, "-o", impossible).returncode == USAGE, impossible


def test_verify_accepts_a_whole_checkpoint(cli, small):
    run = cli("verify", small)
    assert run.returncode == OK, run.stderr
    assert "all well" in run.stdout
    assert run.stdout.count("ok ") == 3
    assert document(cli("verify", small, "--json"))["ok"] is True


def test_verify_finds_a_truncated_file(cli, write):
    path = write(Tensor("a", "F32", (100,)))
    os.truncate(path, path.stat().st_size - 1)
    run = cli("verify", path)
    assert run.returncode == FAILED
    assert "FAILED" in run.stdout
    assert "model.safetensors" in run.stdout
    assert run.stderr == ""
    [problem] = document(cli("verify", path, "--json"))["problems"]
    assert problem["path"].endswith("model.safetensors")


@pytest.mark.parametrize("what", ["none.safetensors", "none", "org/none", "hf://org/none", "dangling"])
def test_verify_of_what_is_not_there_is_an_error_and_no_check_that_failed(cli, tmp_path, what):
    (tmp_path / "dangling").symlink_to("nowhere")
    source = tmp_path / what if "org" not in what else what
    run = cli("verify", source, HF_HUB_CACHE=str(tmp_path / "hub"))
    assert (run.returncode, run.stdout) == (ERROR, "")
    assert run.stderr.startswith("penstock verify: ")
    run = cli("verify", source, "--json", HF_HUB_CACHE=str(tmp_path / "hub"))
    assert run.returncode == ERROR
    assert document(run)["error"]["kind"] == "NotFound"


def test_verify_of_a_checkpoint_that_lacks_a_file_is_a_check_that_failed(cli, small, tmp_path):
    shutil.copytree(small, tmp_path / "x")
    (tmp_path / "x" / LAYOUT.files[1]).unlink()
    for source in (tmp_path / "x", tmp_path / "x" / "model.safetensors.index.json"):
        run = cli("verify", source)
        assert run.returncode == FAILED
        assert LAYOUT.files[1] in run.stdout


@pytest.mark.parametrize("name", ["pt", "torch", "pytorch", "np", "numpy", "jax", "flax", "dlpack"])
def test_load_takes_every_name_of_a_framework_that_the_api_takes(cli, torch_cli, write, name):
    command = torch_cli if MODULES.get(name, name) == "torch" else cli
    run = command("load", write(Tensor("a", "F32", (4,))), "--framework", name)
    assert run.returncode == (OK if importlib.util.find_spec(MODULES.get(name, name)) else ERROR), run.stderr


def test_load_refuses_a_framework_that_is_none(cli, small):
    run = cli("load", small, "--framework", "mxnet")
    assert run.returncode == USAGE
    assert "tensorflow" in run.stderr


#: What a framework's name is short for.
MODULES = {"pt": "torch", "pytorch": "torch", "np": "numpy", "flax": "jax", "dlpack": "penstock"}


def test_verify_compares_blobs_of_a_hub_cache_with_their_names(cli, write, tmp_path):
    path = write(Tensor("a", "F32", (100,)), name="blob")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    path.rename(blobs / digest)
    link = snapshot / "model.safetensors"
    link.symlink_to(blobs / digest)
    run = cli("verify", link, "--sha256")
    assert run.returncode == OK, run.stdout + run.stderr
    assert f"{digest} (blob name)" in run.stdout
    with (blobs / digest).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    run = cli("verify", link, "--sha256")
    assert run.returncode == FAILED
    assert "damaged" in run.stdout
    assert cli("verify", link).returncode == OK  # only a digest can see that


def test_verify_compares_with_a_list(cli, small, tmp_path):
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in sorted(small.glob("*.safetensors"))]
    listed = tmp_path / "SHA256SUMS"
    listed.write_text("\n".join(lines) + "\n")
    found = document(cli("verify", small, "--digests", listed, "--json"))
    assert found["ok"] is True
    assert {f["compared_with"] for f in found["files"]} == {"list"}
    listed.write_text("\n".join(["0" * 64 + lines[0][64:], *lines[1:], "1" * 64 + "  other.safetensors"]))
    run = cli("verify", small, "--digests", listed)
    assert run.returncode == FAILED
    assert "2 problems" in run.stdout
    assert "other.safetensors" in run.stdout
    listed.write_text("nonsense\n")
    run = cli("verify", small, "--digests", listed)
    assert run.returncode == USAGE
    assert "line 1" in run.stderr


def test_verify_that_compared_nothing_says_so_and_has_a_status_of_its_own(cli, small, tmp_path):
    run = cli("verify", small, "--sha256")
    assert run.returncode == UNCOMPARED
    assert "no content was compared" in run.stdout
    assert run.stdout.count("hashed ") == 3
    found = document(cli("verify", small, "--sha256", "--json"))
    assert (found["ok"], found["compared"]) == (False, 0)
    first = sorted(small.glob("*.safetensors"))[0]
    listed = tmp_path / "SHA256SUMS"
    listed.write_text(f"{hashlib.sha256(first.read_bytes()).hexdigest()}  {first.name}\n")
    run = cli("verify", small, "--digests", listed)
    assert run.returncode == OK
    assert "contents of 1 of 3 files were compared" in run.stdout
    assert document(cli("verify", small, "--json"))["compared"] is None


def test_warm_and_evict_change_what_is_resident(cli, write):
    path = write(Tensor("a", "F32", (1 << 20,)))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    run = cli("evict", path, "--json")
    found = document(run)
    assert run.returncode == (OK if found["resident_bytes"] == 0 else FAILED)
    run = cli("warm", path, "--json")
    assert run.returncode == OK, run.stderr
    assert document(run)["resident_bytes"] == path.stat().st_size
    assert "in the page cache" in cli("warm", path).stdout


def test_doctor_says_what_it_found_and_what_follows(cli, small):
    run = cli("doctor", small)
    assert run.returncode == OK, run.stderr
    for word in ("file system", "memory", "locked memory", "huge pages", "GPU", "O_DIRECT read", "memory copy",
                 "penstock will therefore:"):  # fmt: skip
        assert word in run.stdout, word
    assert sorted(p.name for p in small.iterdir()) == sorted(
        [*LAYOUT.files, "model.safetensors.index.json", ".synth.json"]
    )


@pytest.mark.parametrize("name", ["a blank", "\u00e9", "back\\slash", "\u00e9 \\ both"])
def test_doctor_finds_the_mount_whatever_its_name(tmp_path, monkeypatch, name):
    from penstock import _doctor

    mount = tmp_path / name
    mount.mkdir()
    written = str(mount).replace("\\", "\\134").replace(" ", "\\040")
    lines = "1 0 8:1 / / rw - ext4 /dev/root rw\n" + f"2 1 8:2 / {written} rw - nfs4 server:/x rw\n"
    texts = {"mountinfo": lines, "fdinfo": "pos:\t0\nmnt_id:\t2\n"}
    monkeypatch.setattr(_doctor, "_text", lambda path: next((texts[one] for one in texts if one in path), None))
    found = _doctor._mount(str(mount))
    assert (found["type"], found["mounted_at"], found["from"]) == ("nfs4", str(mount), "server:/x")


def test_doctor_says_what_it_can_where_sys_is_hidden(small):
    """As in a container whose root is mapped to another user: the folders are there, and closed."""
    hidden = 'mount -t tmpfs -o mode=700,uid=1 none /sys && exec setpriv --bounding-set=-all "$@"'
    command = ["unshare", "--mount", "sh", "-c", hidden, "-", sys.executable, "-m", "penstock.cli", "doctor"]
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can hide /sys from itself")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives root no mount namespace")
    done = subprocess.run([*command, "--no-measure", "--json", str(small)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file_system"]["type"] and "rotational" not in found["file_system"]


def test_doctor_as_json(cli, small):
    found = document(cli("doctor", small, "--json", "--no-measure"))
    assert found["rates"] == {}
    assert found["system"]["cpus"] == len(os.sched_getaffinity(0))
    assert found["file_system"]["type"]
    assert found["therefore"]


def test_doctor_of_nothing_is_an_error(cli, tmp_path):
    run = cli("doctor", tmp_path / "nothing")
    assert run.returncode == ERROR
    assert "nothing" in run.stderr


@pytest.mark.machine
def test_ctrl_c_ends_a_load_at_once(big):
    # 23,438 reads of 4 KiB, one after the other: seconds
    options = ["-o", "io=direct", "-o", "extent=4096", "-o", "staging=8192", "-o", "depth=1"]
    code = """
import sys, torch
from penstock.cli import main
print("ready", flush=True)
sys.exit(main(sys.argv[1:]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "load", str(big), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    if process.returncode == OK:
        pytest.skip("the load was done before the signal came")
    assert process.returncode == 130, stderr
    assert stderr == "penstock: interrupted\n"
    assert time.monotonic() - start < 2


def test_main_can_be_called(small, capsys):
    from penstock.cli import main

    assert main(["inspect", str(small), "--depth", "1"]) == OK
    assert "layers" in capsys.readouterr().out


def test_a_reader_that_goes_away_does_not_hide_a_failed_check(tmp_path: Path):
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 64)
    command = f"{sys.executable} -m penstock.cli verify damaged.safetensors | true; exit ${{PIPESTATUS[0]}}"
    for unbuffered in ("", "1"):
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert done.returncode == 1, done.stderr
        assert b"Traceback" not in done.stderr and b"ignored" not in done.stderr


def test_negative_threads_are_wrong_usage(cli, tmp_path: Path):
    assert cli("warm", tmp_path, "--threads", "-1").returncode == 2


def test_an_error_that_an_interrupt_led_to_is_an_interrupt(python, small):
    """Python's own locks can be in such a state after Ctrl-C in a wait."""
    program = """
    import sys, threading
    from penstock import cli
    def run(args):
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()
    cli._inspect = run
    sys.exit(cli.main(["inspect", sys.argv[1]]))
    """
    done = python(textwrap.dedent(program), str(small))
    assert (done.returncode, done.stderr) == (130, "penstock: interrupted\n")

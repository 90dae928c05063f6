"""Runs the example programs and the tests of the Run:ai model streamer on Penstock, with only the import changed.

    python tools/runai_examples.py CHECKOUT [--rounds 20] [--original]

CHECKOUT is a checkout of https://github.com/run-ai/runai-model-streamer at `COMMIT`; a digest of the files that are run
is compared. They are copied to a folder that goes again, and each import of ``runai_model_streamer`` there names
`penstock.compat.runai_model_streamer`. What needs a bucket runs where PENSTOCK_TEST_SERVERS names a folder with servers
(`make test-servers`), and their clients are installed. ``--original`` runs all of it on the installed
runai-model-streamer besides, unchanged: it shows which programs fail there too.

Prints a line for each program. `EXPECTED` lists those that fail, each with its reason: any other failure, and one of
these that passes, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "f73a19ac0d30c416ecf90aa6042bdeb4db21150f"
DIGEST = "b84f0386c3c9648c851c17fd392743d1212b7193d26165d49335bd6a80ccc5f0"
PACKAGE = "py/runai_model_streamer/runai_model_streamer"
#: The folders that are copied.
FOLDERS = ("examples", "tests", *(f"{PACKAGE}/{part}/tests" for part in (
    "safetensors_streamer", "file_streamer", "distributed_streamer")))  # fmt: skip
FACE = "penstock.compat.runai_model_streamer"
#: The tests of its package, by file, and the ones that ranks run together.
UNIT = (
    "safetensors_streamer.tests.test_safetensors_streamer",
    "safetensors_streamer.tests.test_object_storage_model",
    "file_streamer.tests.test_file_streamer",
)
RANKS = (
    "safetensors_streamer.tests.dist_test_safetensors_streamer",
    "distributed_streamer.tests.dist_test_distributed_streamer",
)
#: The rules by which an import changes.
IMPORTS = (
    (r"from runai_model_streamer(?:\.\w+)* import", f"from {FACE} import"),
    # The tests of ObjectStorageModel replace the function that it calls, in the module where it stands
    (r"import runai_model_streamer(?:\.\w+)* as _ss_module", "import penstock.compat._runai_buckets as _ss_module"),
)

TEXT = "it compares the words of the error; the error is a ValueError here too"
INTERNAL = "it imports or replaces names that are no part of the interface"
CUT = "a cut file is an error of stream_file, as in 0.17.1; in 0.15.9 it was one of get_tensors"
ALIGNED = "it wants addresses that 512 divides; here they are aligned to the dtype, as owned tensors of 0.17.1 are"
CUDA = "'CUDA:0' is no device for torch (\"cuda:0\" is): it fails with any loader. It passes with the device 'cpu'"
#: Programs that fail, and the reasons.
EXPECTED = {
    "unit/TestSafetensorsStreamer.test_header_too_large": TEXT,
    "unit/TestSafetensorsStreamer.test_invalid_json": TEXT,
    "unit/TestSafetensorsStreamer.test_payload_inconsistency_shape_mismatch": TEXT,
    "unit/TestSafetensorsStreamer.test_overlapping_tensors": TEXT,
    "unit/TestSafetensorsStreamer.test_unknown_dtype": TEXT,
    "unit/TestSafetensorsStreamer.test_truncated_tensor_data": CUT,
    "unit/tests.test_file_streamer": INTERNAL,
    "ranks/TestDistributedStreamer.test_1_success_alignment": ALIGNED,
    "examples/stream_chunks_from_file": "at this commit FileStreamer has no stream_file: it fails with Run:ai's own",
    "examples/stream_multi_safetensors_to_gpu": CUDA,
    "examples/stream_safetensors_to_gpu": CUDA,
}


class Outcome(NamedTuple):
    """The end of one program, or of all rounds of it."""

    name: str
    state: str
    """passed, failed or skipped."""
    why: str = ""


# The checkout


def digest_of(checkout: Path) -> str:
    """A digest of the names and the content of all files that are run."""
    found = hashlib.sha256()
    for path in sorted(file for folder in FOLDERS for file in (checkout / folder).rglob("*") if file.is_file()):
        if "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(checkout)}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def changed(text: str) -> str:
    """The text of a program with the import changed."""
    for old, new in IMPORTS:
        text = re.sub(old, new, text)
    return text


def copied(checkout: Path, into: Path, original: bool) -> None:
    """Copies the programs. Their imports are changed unless they run on the original."""
    for folder in FOLDERS:
        shutil.copytree(checkout / folder, into / folder, ignore=shutil.ignore_patterns("__pycache__"))
    if not original:
        for path in into.rglob("*.py"):
            path.write_text(changed(path.read_text()))


# Tests, in a process of their own


class Results(unittest.TestResult):
    """Prints each outcome as a line of JSON."""

    def told(self, test: Any, state: str, why: str = "") -> None:
        name = test.id() if hasattr(test, "id") else str(test)
        print("::" + json.dumps([name, state, why]), flush=True)

    def addSuccess(self, test: Any) -> None:
        self.told(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self.told(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self.told(test, "failed", f"{err[0].__name__}: {err[1]}")

    addError = addFailure


def run_module(name: str, rounds: int) -> None:
    """Runs the tests of a module, several times; the ranks of a launcher do so together."""
    if "WORLD_SIZE" in os.environ:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    try:
        module = importlib.import_module(name)
    except (ImportError, unittest.SkipTest) as error:
        Results().told(name, "skipped" if isinstance(error, unittest.SkipTest) else "failed", str(error))
        return
    for round in range(rounds):
        random.seed(round)
        unittest.TestLoader().loadTestsFromModule(module).run(Results())


class Runner:
    """Starts programs in the folder with the copies, and collects how they end."""

    def __init__(self, folder: Path, original: bool) -> None:
        self.folder, self.original = folder, original
        self.outcomes: list[Outcome] = []

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("AWS_", "AZURE_", "RUNAI_"))}
        path = [str(self.folder), str(self.folder / PACKAGE), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        return {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", **more}

    def _started(self, arguments: list[str], more: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, *arguments], cwd=self.folder, env=self.environment(more), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def module(self, group: str, name: str, rounds: int = 1, ranks: int = 0, **more: str) -> None:
        """The tests of a module, as often as `rounds` says; each passes if it passes in all."""
        ended: dict[str, tuple[Counter[str], str]] = {}
        for test, state, why in self._told(name, ["--module", name, "--rounds", str(rounds)], ranks, more):
            short = ".".join(test.split(".")[-2:])
            states, first = ended.get(short, (Counter(), ""))
            states[state] += 1
            ended[short] = states, first or why
        for test, (states, why) in sorted(ended.items()):
            state = next(state for state in ("failed", "skipped", "passed") if states[state])
            self.outcomes.append(Outcome(f"{group}/{test}", state, why))

    def _told(self, name: str, arguments: list[str], ranks: int, more: dict[str, str]) -> Iterator[list[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        joint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        started = [
            self._started(arguments, {**more, **({**joint, "RANK": str(rank)} if ranks else {})})
            for rank in range(ranks or 1)
        ]
        for process in started:
            try:
                said = process.communicate(timeout=180)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                said = process.communicate()[0] + f"\n::{json.dumps([name, 'failed', 'not over after 180 s'])}"
            lines = [line for line in said.splitlines() if line.startswith("::")]
            if process.returncode or not lines:
                lines.append("::" + json.dumps([name, "failed", f"status {process.returncode}: {said[-300:]}"]))
            for line in lines:
                print(f"{name}: {line[2:240]}", file=sys.stderr, flush=True)  # the table comes at the end
                yield json.loads(line[2:])


# Servers for buckets


class Buckets:
    """Servers, with a bucket `models` each, as long as `until` is open."""

    def __init__(self, until: ExitStack, folder: Path) -> None:
        self._until, self._folder = until, folder
        self._servers = Path(os.environ.get("PENSTOCK_TEST_SERVERS", "/nowhere"))
        sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/servers")]
        self.lacking: dict[str, str] = {}

    def _has(self, scheme: str, program: str, client: str) -> bool:
        if not (self._servers / program).exists():
            self.lacking[scheme] = f"{program} was not built: make test-servers"
        elif importlib.util.find_spec(client.partition(".")[0]) is None:
            self.lacking[scheme] = f"{client} is not installed"
        return scheme not in self.lacking

    def _place(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir()
        return place

    def s3(self) -> dict[str, str] | None:
        """The variables for versitygw; None without it."""
        if not self._has("s3", "versitygw", "boto3"):
            return None
        import versitygw

        server = versitygw.Server(self._place("s3"))
        self._until.callback(server.close)
        return {
            "AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": versitygw.KEY,
            "AWS_SECRET_ACCESS_KEY": versitygw.SECRET, "AWS_REGION": versitygw.REGION,
            "AWS_DEFAULT_REGION": versitygw.REGION, "AWS_EC2_METADATA_DISABLED": "true", "AWS_BUCKET": "models",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }  # fmt: skip

    def gs(self) -> dict[str, str] | None:
        """The variables for fake-gcs-server; None without it."""
        if not self._has("gs", "fake-gcs-server", "google.cloud.storage"):
            return None
        from real_server import RealServer

        program = self._servers / "fake-gcs-server"
        server = RealServer(self._place("gs"), lambda port: [
            program, "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}", "-scheme", "http",
            "-backend", "memory"])  # fmt: skip
        self._until.callback(server.close)
        server.send("POST", "/storage/v1/b?project=p", b'{"name": "models"}', {"Content-Type": "application/json"}, 200)
        return {
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": server.endpoint, "API_ENDPOINT_OVERRIDE": server.endpoint,
            "GOOGLE_CLOUD_PROJECT": "p", "GCS_BUCKET": "models",
            "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS": "True",
        }  # fmt: skip

    def az(self) -> dict[str, str] | None:
        """The variables for Azurite; None without it."""
        if not self._has("az", "azurite/node_modules/.bin/azurite-blob", "azure.storage.blob"):
            return None
        import test_azurite as azurite

        server = azurite.Server(self._place("az"))
        self._until.callback(server.close)
        text = f"DefaultEndpointsProtocol=http;AccountName={azurite.ACCOUNT};AccountKey={azurite.KEY};"
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"{text}BlobEndpoint={server.endpoint};", "AZURE_CONTAINER": "models"
        }  # fmt: skip


# Example programs: notebooks

#: A program in place of wget, which nothing here could reach: it gives a checkpoint, or a book with three chapters.
WGET = """#!{python}
import sys
from pathlib import Path
target = Path(sys.argv[sys.argv.index("-O") + 1])
if target.suffix == ".txt":
    target.write_text("A book\\n" + "".join(f"CHAPTER {{n}}\\n" + "words " * 500 for n in range(3)))
else:
    import torch
    from safetensors.torch import save_file
    save_file({{f"{{target.stem}}.{{n}}": torch.randn(300, n + 1) for n in range(20)}}, target)
"""
#: Cells that a notebook lets its reader choose from, or that install packages.
LEFT_OUT = ("!pip", "# 1. External Credentials")


def cells_of(notebook: Path, original: bool) -> list[str]:
    """The cells of a notebook with code."""
    cells = [
        "".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    kept = [cell for cell in cells if not cell.startswith(LEFT_OUT)]
    return kept if original else [changed(cell) for cell in kept]


def run_notebook(notebook: Path, original: bool, device: str | None) -> None:
    """Runs the cells one after the other, with the reader's values for what a cell asks to be filled in."""
    values = json.loads(os.environ.get("RUNAI_EXAMPLES_VALUES", "{}"))
    known: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells_of(notebook, original):
        streams = "import SafetensorsStreamer" in cell or "import FileStreamer" in cell
        if device is not None:
            cell = cell.replace("'CUDA:0'", repr(device))
        try:
            exec(compile(cell, notebook.name, "exec"), known)
        except Exception as error:
            if streams:
                Results().told(notebook.stem, "failed", f"{type(error).__name__}: {error}")
                return
            # A cell that needs an account of Google: what it would have made is there by other means
            print(f"a cell before the streamer's failed: {type(error).__name__}: {error}", file=sys.stderr)
        known |= {name: value for name, value in values.items() if name in known or name.endswith("_location")}
    Results().told(notebook.stem, "passed")


def with_examples(runner: Runner, wgets: Path, s3: dict[str, str] | None, gs: dict[str, str] | None) -> None:
    """Runs all notebooks."""
    (wgets / "wget").write_text(WGET.format(python=sys.executable))
    (wgets / "wget").chmod(0o755)
    path = {"PATH": f"{wgets}{os.pathsep}{os.environ['PATH']}"}
    for notebook in sorted((runner.folder / "examples").glob("*.ipynb")):
        variables, values = path, {}
        scheme = "gs" if "gcs" in notebook.stem else "s3" if "s3" in notebook.stem or "custom" in notebook.stem else ""
        if scheme:
            given = gs if scheme == "gs" else s3
            if given is None:
                runner.outcomes.append(
                    Outcome(f"examples/{notebook.stem}", "skipped", "its server or client is not here")
                )
                continue
            variables = {**path, **given}
            values = uploaded(given) if scheme == "gs" else values_of_s3(given)
        variables = {**variables, "RUNAI_EXAMPLES_VALUES": json.dumps(values)}
        arguments = ["--notebook", str(notebook), *(["--original"] if runner.original else [])]
        devices = [None, "cpu"] if "'CUDA:0'" in notebook.read_text() else [None]
        for device in devices:
            chosen = arguments if device is None else [*arguments, "--device", device]
            for name, state, why in runner._told(notebook.stem, chosen, 0, variables):
                suffix = "" if device is None else f" ({device})"
                runner.outcomes.append(Outcome(f"examples/{name}{suffix}", state, why))


def values_of_s3(given: dict[str, str]) -> dict[str, str]:
    """The reader's values for the notebooks of S3."""
    return {
        "s3_endpoint": given["AWS_ENDPOINT_URL"], "s3_bucket": "models", "s3_location": "desired/path",
        "s3_access_key": given["AWS_ACCESS_KEY_ID"], "s3_access_secret": given["AWS_SECRET_ACCESS_KEY"],
    }  # fmt: skip


def uploaded(given: dict[str, str]) -> dict[str, str]:
    """Puts a checkpoint where the notebook of Google Cloud Storage would, with a client of Google's; its values."""
    import torch
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from safetensors.torch import save

    endpoint = {"api_endpoint": given["CLOUD_STORAGE_EMULATOR_ENDPOINT"]}
    client = storage.Client(project="p", credentials=AnonymousCredentials(), client_options=endpoint)
    content = save({"a": torch.randn(100, 3)})
    client.bucket("models").blob("desired/model.safetensors").upload_from_string(content)
    return {"gcs_bucket": "models", "gcs_location": "desired", "gcs_upload_location": "desired/model.safetensors"}


# All of it


def everything(checkout: Path, original: bool, rounds: int) -> list[Outcome]:
    """The outcomes of all programs."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as until:
        folder, wgets, servers = (Path(place, name) for name in ("programs", "bin", "servers"))
        for made in (folder, wgets, servers):
            made.mkdir()
        copied(checkout, folder, original)
        runner, buckets = Runner(folder, original), Buckets(until, servers)
        for name in ("test_safetensors_streamer", "test_file_streamer"):
            runner.module("fuzzing", f"tests.fuzzing.{name}", rounds)
        asked: dict[str, Callable[[], dict[str, str] | None]] = {"s3": buckets.s3, "gs": buckets.gs, "az": buckets.az}
        given = {scheme: ask() for scheme, ask in asked.items()}
        for scheme, module in (("s3", "s3.test_s3"), ("gs", "gcs.test_gcs"), ("az", "azure.test_azure")):
            variables = given[scheme]
            if variables is None:
                runner.outcomes.append(Outcome(f"cases {scheme}", "skipped", buckets.lacking[scheme]))
            else:
                runner.module(f"cases {scheme}", f"tests.{module}", max(1, rounds // 10), **variables)
        for name in UNIT:
            runner.module("unit", name)
        for name in RANKS:
            runner.module("ranks", name, ranks=2)
        with_examples(runner, wgets, given["s3"], given["gs"])
        return runner.outcomes


def shown(ours: list[Outcome], originals: list[Outcome] | None) -> int:
    """Prints the outcomes; how many are not as expected."""
    theirs = {one.name: one for one in originals or []}
    wrong = 0
    for one in ours:
        reason = EXPECTED.get(one.name)
        asked = "passed" if reason is None else "failed"
        unexpected = one.state not in (asked, "skipped")
        wrong += unexpected
        beside = f" (Run:ai's own: {theirs[one.name].state})" if one.name in theirs else ""
        why = "" if one.state == "passed" else f": {one.why[:200]}" if reason is None or unexpected else f": {reason}"
        print(f"{'UNEXPECTED ' * unexpected}{one.state:8}{one.name}{beside}{why}")
    counts = Counter(one.state for one in ours)
    print(f"\n{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {wrong} unexpected")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=20, help="of the fuzzing; a tenth of the cases (default 20)")
    parser.add_argument("--original", action="store_true", help="run all of it on the installed original too")
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument("--notebook", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.module:
        run_module(given.module, given.rounds)
        return 0
    if given.notebook:
        run_notebook(given.notebook, given.original, given.device)
        return 0
    if given.checkout is None or not given.checkout.is_dir():
        parser.error(
            "give a checkout of https://github.com/run-ai/runai-model-streamer: make runai-examples RUNAI=PATH"
        )
    found = digest_of(given.checkout)
    if found != DIGEST:
        print(f"{given.checkout} is no checkout of {COMMIT}: the digest of its programs is {found}, not {DIGEST}")
        return 2
    originals = everything(given.checkout, True, given.rounds) if given.original else None
    return 1 if shown(everything(given.checkout, False, given.rounds), originals) else 0


if __name__ == "__main__":
    sys.exit(main())

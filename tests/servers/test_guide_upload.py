"""The guide *From training to serving without a disk*: its programs and commands, as a new user would run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import penstock
import pytest
from real_server import program
from versitygw import KEY, REGION, SECRET, Server

pytest.importorskip("torch")

GUIDES = Path(__file__).parents[2] / "docs/guides.md"
TITLE = "## From training to serving without a disk\n"
AWS = program("clients/bin/aws")


def blocks(language: str) -> list[str]:
    """The fenced blocks of the guide in one language."""
    text = GUIDES.read_text().partition(TITLE)[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("versitygw"))
    yield server
    server.close()


@pytest.fixture
def environment(server: Server) -> dict[str, str]:
    """The variables that the guide has a user set, with the values of this server."""
    exports = [word for line in blocks("bash")[0].splitlines() if line.startswith("export") for word in line.split()]
    found = {word.partition("=")[0] for word in exports if "=" in word}
    of = {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
    assert found == of.keys()
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PENSTOCK_STORAGE"))}
    return {**mine, **of}


def here(text: str) -> str:
    """A command with this server's bucket for the guide's."""
    return text.replace("s3://bucket/", "s3://models/").replace("--bucket bucket", "--bucket models")


def written(folder: Path) -> list[list[str]]:
    """The programs of the guide as files; the commands that it runs them with."""
    commands = []
    for code in blocks("py"):
        [command] = re.findall(r'^"""(.*)"""', code)
        words = shlex.split(here(command))
        (folder / words[1]).write_text(code)
        assert command in blocks("bash")[0], "the guide runs it as its first line says"
        commands.append([sys.executable, *words[1:]])
    return commands


def test_a_service_takes_every_checkpoint_of_a_training(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    train, serve = written(tmp_path)
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(serve, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as serving,
        subprocess.Popen(train, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as training,
    ):
        try:
            said, errors = training.communicate(timeout=300)
            assert training.returncode == 0, errors
            heard, errors = serving.communicate(timeout=300)
            assert serving.returncode == 0, errors
        finally:
            serving.kill()
            training.kill()
    assert [line.split(":")[0] for line in said.splitlines()] == ["step 10", "step 20", "step 30"], said
    steps = [int(line.split()[-1]) for line in heard.splitlines() if line.startswith("serving step")]
    assert steps == sorted(set(steps)) and steps[-1] == 30
    place = next(word for word in train if word.startswith("s3://"))
    assert penstock.open(place, storage=server.storage()).metadata["step"] == "30"
    inspect = here(next(line for line in blocks("bash")[0].splitlines() if line.startswith("penstock ")))
    words = [sys.executable, "-m", "penstock.cli", *shlex.split(inspect)[1:]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "step: 30" in done.stdout, done.stdout + done.stderr


def test_parts_of_a_killed_save_are_listed(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    if not AWS.exists():
        pytest.skip("no AWS command line: make test-servers")
    code = (
        "import numpy, penstock, os, signal\n"
        "state = {f'w{i}': numpy.zeros(1 << 22, numpy.uint8) for i in range(20)}\n"
        "kill = lambda done, all: os.kill(os.getpid(), signal.SIGKILL)\n"
        "penstock.save(state, 's3://models/run-7/killed/', progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -9
    listing, rule = (here(command) for command in blocks("bash")[1].replace("\\\n", " ").splitlines())
    listed = subprocess.run(
        [AWS, *shlex.split(listing)[1:]], env=environment, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0 and "run-7/killed/model.safetensors" in listed.stdout, listed.stdout + listed.stderr
    ruled = subprocess.run([AWS, *shlex.split(rule)[1:]], env=environment, capture_output=True, text=True, check=False)
    # As the guide says: the command is well-formed if that is all that the server says
    assert "NotImplemented" in ruled.stderr, ruled.stderr

"""Loads and saves in a restricted pod: bit-equal, and every refusal of the sandbox is in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from restricted_pods import Model, Pods, digests

REFUSED_URING = [("io_uring", "threads")]
#: Where there is something to write to, and where there is nothing at all, not even /dev/shm.
PLACES = ("emptyDir", "nothing")
WAYS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "as it comes": ({"way": "load"}, []),
    "torch": ({"way": "load", "framework": "pt"}, []),
    "kept": ({"way": "load", "options": {"cache": "keep"}}, []),
    "copied": ({"way": "load", "options": {"copy": True}}, []),
    "copied, past the page cache": ({"way": "load", "options": {"copy": True, "cache": "bypass"}}, REFUSED_URING),
    "direct": ({"way": "load", "options": {"io": "direct"}}, REFUSED_URING),
    "io_uring": ({"way": "load", "options": {"io": "uring"}}, REFUSED_URING),
    "threads": ({"way": "load", "options": {"io": "threads"}}, []),
    "buffered": ({"way": "load", "options": {"io": "buffered"}}, []),
    "io_uring, page cache": (
        {"way": "load", "options": {"io": "uring_buffered"}},
        [("io_uring", "threads")],
    ),
    "load_into": ({"way": "load_into"}, []),
    "load_into, past the page cache": ({"way": "load_into", "options": {"cache": "bypass"}}, REFUSED_URING),
    "stream": ({"way": "stream", "options": {"window": 16_000_000}}, []),
    "stream, past the page cache": (
        {"way": "stream", "options": {"window": 16_000_000, "cache": "bypass"}},
        REFUSED_URING,
    ),
}


def place(where: str, empty_dir: Path) -> list[str]:
    return [f"--volume={empty_dir}:/tmp:rw"] if where == "emptyDir" else ["--shm", "0"]


def test_the_pod_has_none_of_the_rights_of_root(pods: Pods, mounted_model: Model):
    found = pods.python({"way": "rights"}, mounted_model.volume).result
    assert found["ids"] == [65534] * 6
    assert found["capabilities"] == ["0" * 16] * 5
    assert (found["no_new_privs"], found["seccomp"], found["pid"]) == ("1", "2", 1)
    assert found["memlock"] == [8 << 20, 8 << 20]
    assert found["shm"] == 64 << 20
    written = {"/": "EROFS", "/tmp": "EROFS", "/etc": "EROFS", "/dev/shm": "granted", "/models": "EROFS"}
    assert found["written"] == written
    calls = dict.fromkeys(("io_uring_setup", "unshare", "mount", "bpf"), "EPERM")
    assert found["calls"] == {**calls, "memfd_create": "granted"}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_a_cold_load_is_right_and_tells_what_was_refused(
    pods: Pods, mounted_model: Model, empty_dir: Path, way: str, where: str
):
    specification, fallbacks = WAYS[way]
    mounted_model.evict()
    ended = pods.python({**specification, "source": "/models"}, mounted_model.volume, *place(where, empty_dir))
    assert ended.result["digests"] == mounted_model.digests
    assert ended.fallbacks == fallbacks, ended.result["text"]
    assert all("not permitted" in one["reason"] for one in ended.result["fallbacks"])
    assert not ended.errors


def test_a_warm_load_is_mapped(pods: Pods, mounted_model: Model):
    for file in mounted_model.files:
        file.read_bytes()
    ended = pods.python({"way": "load", "source": "/models"}, mounted_model.volume, "--shm", "0")
    assert ended.result["digests"] == mounted_model.digests
    assert ended.fallbacks == []
    # Who does not own the files is not told what of them is in the page cache: it is sampled
    assert ended.result["residency_probes"] > 0


def test_a_save_to_an_empty_dir_is_right(pods: Pods, mounted_model: Model, empty_dir: Path):
    specification = {"way": "save", "source": "/models", "to": "/tmp/saved.safetensors"}
    ended = pods.python(specification, mounted_model.volume, f"--volume={empty_dir}:/tmp:rw")
    assert ended.result["digests"] == mounted_model.digests
    assert ended.fallbacks == REFUSED_URING or ended.fallbacks == []
    assert digests(empty_dir / "saved.safetensors") == mounted_model.digests


@pytest.mark.parametrize("to", ["/saved.safetensors", "/models/saved.safetensors", "/tmp/saved.safetensors"])
def test_a_save_to_what_is_read_only_is_an_error_that_says_so(pods: Pods, mounted_model: Model, to: str):
    found = pods.python({"way": "save", "source": "/models", "to": to}, mounted_model.volume).result
    assert found["os"], found
    assert "Read-only file system" in found["message"]
    assert str(Path(to).parent) in found["message"]


def test_the_commands_work(pods: Pods, mounted_model: Model, empty_dir: Path):
    volumes = (mounted_model.volume, f"--volume={empty_dir}:/out:rw")
    for command in (
        ["inspect", "/models"],
        ["verify", "/models"],
        ["warm", "/models"],
        ["load", "/models"],
        ["convert", "--no-progress", "/models", "/out/converted"],
        ["verify", "/out/converted"],
    ):
        assert pods.penstock(*command, options=volumes).said


def test_the_doctor_says_what_the_pod_has(pods: Pods, mounted_model: Model):
    options = (mounted_model.volume, "--memory", str(1 << 30), "--shm", "0")
    found = json.loads(pods.penstock("doctor", "--json", "/models", options=options).said)
    assert "not permitted" in found["probe"]["io_uring"]
    assert found["system"]["memlock_bytes"] == 8 << 20
    assert found["system"]["cgroup"]["limit"] == 1 << 30
    assert found["probe"]["memory_available"] < 1 << 30
    assert found["file_system"]["mounted_at"] == "/models"
    said = pods.penstock("doctor", "--no-measure", "/models", options=options).said
    assert "direct reads go through a pool of threads" in said
    assert "locked memory 8" in said

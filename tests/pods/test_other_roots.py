"""Files of another container (`/proc/PID/root`), and image volumes: overlays, erofs and squashfs, all read-only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from restricted_pods import INSIDE, Model, Pods

#: As KServe's modelcar: the weights are in another container, and both see each other's processes.
SHARED = ("--share-pid",)


@contextmanager
def sidecar(pods: Pods, *volumes: str) -> Iterator[int]:
    """Another container with these volumes, by the number of its process."""
    command = pods.command([sys.executable, str(INSIDE), '{"way": "wait"}'], *SHARED, *volumes)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


@pytest.mark.parametrize("way", ["load", "load_into", "stream", "save"])
def test_files_of_another_container_load(pods: Pods, mounted_model: Model, empty_dir: Path, way: str):
    mounted_model.evict()
    with sidecar(pods, mounted_model.volume) as pid:
        source = f"/proc/{pid}/root/models"
        specification = {"way": way, "source": source, "to": "/tmp/saved.safetensors"}
        ended = pods.python(specification, *SHARED, f"--volume={empty_dir}:/tmp:rw")
    assert ended.result["digests"] == mounted_model.digests
    assert ended.fallbacks == []


def test_the_doctor_says_on_what_files_of_another_container_are(pods: Pods, mounted_model: Model):
    here = json.loads(
        pods.penstock("doctor", "--json", "--no-measure", "/models", options=(mounted_model.volume,)).said
    )
    with sidecar(pods, mounted_model.volume) as pid:
        there = f"/proc/{pid}/root/models"
        found = json.loads(pods.penstock("doctor", "--json", "--no-measure", there, options=SHARED).said)
    assert found["probe"]["kind"] == here["probe"]["kind"] == "local"
    for name in ("type", "device"):
        assert found["file_system"][name] == here["file_system"][name], found["file_system"]
    assert found["file_system"]["mounted_at"] == here["file_system"]["mounted_at"] == "/models"


def test_files_of_a_container_that_ends_meanwhile_are_an_error(pods: Pods, mounted_model: Model):
    with sidecar(pods, mounted_model.volume) as pid:
        pass
    done = pods.penstock("inspect", f"/proc/{pid}/root/models", options=SHARED, status=3)
    assert f"/proc/{pid}/root/models: cannot open: No such file" in done.errors, done.errors


@contextmanager
def mounted(kind: str, mounted_model: Model, folder: Path) -> Iterator[Path]:
    """An image volume: the layers of an image, mounted read-only as containerd does."""
    at, layer, other = folder / "mounted", folder / "layer", folder / "other"
    for one in (at, other):
        one.mkdir()
    (other / "config.json").write_text("{}")
    shutil.copytree(mounted_model.folder, layer)
    (layer / "link.safetensors").symlink_to("model.safetensors")
    done: list[Path] = []

    def mount(*arguments: str | Path, place: Path = at) -> None:
        subprocess.run(["mount", *map(str, arguments), str(place)], check=True, capture_output=True, text=True)
        done.append(place)

    def packed(tool: str, package: str, *arguments: str | Path) -> None:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: {package})")
        subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True)

    image = folder / "image"
    try:
        lower = layer
        if "erofs" in kind:
            packed("mkfs.erofs", "erofs-utils", image, layer)
            lower = folder / "erofs" if "overlay" in kind else at
            lower.mkdir(exist_ok=True)
            mount("-t", "erofs", "-o", "ro,loop", image, place=lower)
        elif "squashfs" in kind:
            packed("mksquashfs", "squashfs-tools", layer, image, "-noI", "-noD", "-no-progress")
            lower = folder / "squashfs" if "overlay" in kind else at
            lower.mkdir(exist_ok=True)
            mount("-t", "squashfs", "-o", "ro,loop", image, place=lower)
        if "overlay" in kind:
            mount("-t", "overlay", "-o", f"ro,lowerdir={lower}:{other}", "image")
        yield at
    finally:
        for place in reversed(done):
            subprocess.run(["umount", str(place)], check=False)
        shutil.rmtree(layer)
        image.unlink(missing_ok=True)


#: What the sandbox refuses, and what squashfs has not.
REFUSED = {("io_uring", "threads"), ("O_DIRECT", "buffered"), ("RWF_DONTCACHE", "page cache")}
#: What an image volume is mounted as: what Penstock takes it for, and how a load to the CPU then goes.
IMAGES = {
    "overlay": ("local", "mapped"),
    "erofs": ("local", "mapped"),
    "squashfs": ("local", "mapped"),
    "overlay of erofs": ("local", "mapped"),
    # Seen from a pod nothing says what is below: it might be the network
    "overlay of squashfs": ("network", "buffered"),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_volume_loads(pods: Pods, mounted_model: Model, tmp_path: Path, kind: str):
    with mounted(kind, mounted_model, tmp_path) as at:
        volume = f"--volume={at}:/models"
        plain = pods.python({"way": "load", "source": "/models/link.safetensors"}, volume, "--shm", "0").result
        assert plain["digests"] == mounted_model.digests
        assert {name for name, way in plain["routes"].items() if way["bytes"]} == {IMAGES[kind][1]}, plain["text"]
        assert plain["fallbacks"] == []
        for way, options in (
            ("load", {"copy": True}),
            ("load", {"cache": "bypass"}),
            ("load_into", {}),
            ("stream", {"window": 16_000_000}),
        ):
            specification = {"way": way, "source": "/models/link.safetensors", "options": options}
            ended = pods.python(specification, volume, "--shm", "0")
            assert ended.result["digests"] == mounted_model.digests, (way, options)
            # What this file system or the sandbox refuses, and nothing else
            assert set(ended.fallbacks) <= REFUSED, ended.result["text"]
        found = json.loads(pods.penstock("doctor", "--json", "--no-measure", "/models", options=(volume,)).said)
        assert found["file_system"]["type"] == kind.split(" of ")[0]
        assert found["probe"]["kind"] == IMAGES[kind][0]

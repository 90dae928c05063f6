"""The memory that a save to a bucket takes, and the files that it opens."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import fakegpu
import pytest
from s3_server import Answer, serving
from saving_costs import MIB, bounded, saved
from test_uploads import PLACE, bucket, settings
from upload_server import Parts, Uploads

__all__ = ["bucket"]  # a fixture


class Forgetful(Uploads):
    """Takes objects, and forgets their bytes: another process' memory is measured, and this one has none to spare."""

    def __init__(self) -> None:
        super().__init__()
        self.knows_checksums = False
        self.received_bytes = 0
        self.tags = itertools.count(1)

    def part(self, upload: Parts, number: int, fields: Mapping[str, str], body: bytes) -> Answer:
        with self.guard:
            self.received_bytes += len(body)
        return 200, {"ETag": f'"{next(self.tags):032x}"'}, b""

    def complete(self, name: str, upload: Parts, fields: Mapping[str, str], body: bytes) -> Answer:
        self.stored(upload.key, b"forgotten")
        text = '<CompleteMultipartUploadResult><ETag>"0"</ETag></CompleteMultipartUploadResult>'
        return 200, {}, text.encode()


@pytest.fixture
def forgetful() -> Iterator[Forgetful]:
    with serving(Forgetful()) as found:
        yield found


@pytest.mark.parametrize("staging", ["default", 96 * MIB])
@pytest.mark.parametrize("kind", ["in order", "packed", "gpu"])
def test_a_save_takes_staging_memory_and_little_more(
    forgetful: Forgetful, tmp_path: Path, kind: str, staging: int | str
) -> None:
    if kind == "gpu" and not fakegpu.LIBRARY:
        pytest.skip(fakegpu.NO_LIBRARY)
    options = {} if staging == "default" else {"staging": staging}
    forgetful.delay = 0.1  # as many parts as there are connections are under way
    found = saved(kind, PLACE, settings(forgetful), options, tmp_path)
    assert forgetful.received_bytes >= found["file_bytes"] >= found["nbytes"]
    bounded(found, 256 * MIB if isinstance(staging, str) else staging)


#: Saves between two looks at files that are not there, which the trace shows.
TRACED = """
import json, os, sys
import numpy, penstock

place, storage = sys.argv[1], json.loads(sys.argv[2])
random = numpy.random.default_rng(0)
state = {f"w{i}": random.integers(0, 255, (2000, 1000 + i), numpy.uint8) for i in range(6)}
state["t"] = random.integers(0, 255, (1500, 2000), numpy.uint8).T
os.path.exists("/begun")
penstock.save(state, place, storage=storage, progress=False)
penstock.save(state, place, max_shard_size=5_000_000, storage=storage, progress=False)
os.path.exists("/over")
"""
#: Calls that make a file, change one, or give one another name.
WRITES = re.compile(
    r"\b(?:creat|memfd_create|memfd_secret|mknod|mknodat|rename|renameat|renameat2|link|linkat|symlink|symlinkat|"
    r"truncate|ftruncate|fallocate|mkdir|mkdirat|shmget)\(|\bopen(?:at2?)?\(.*\bO_(?:WRONLY|RDWR|CREAT|TMPFILE|TRUNC)\b"
)


def calls(text: str) -> list[str]:
    """The lines of a trace between the two looks."""
    return text.partition('"/begun"')[2].partition('"/over"')[0].splitlines()[1:]


def test_a_save_to_a_bucket_opens_no_file_for_writing(bucket: Uploads, tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace here")
    out = tmp_path / "trace"
    watched = "trace=%file,memfd_create,memfd_secret,ftruncate,fallocate,shmget"
    command = [strace, "-f", "-qq", "-e", watched, "-o", str(out)]
    program = [sys.executable, "-c", TRACED, PLACE, json.dumps(settings(bucket))]
    done = subprocess.run([*command, *program], env=dict(os.environ), capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    assert len(bucket.objects) > 3, "shards and an index"
    found = calls(out.read_text())
    assert found, "the trace has the save"
    assert [line for line in found if WRITES.search(line)] == []


def test_the_pattern_finds_what_writes() -> None:
    """As strace prints it."""
    for line in (
        '7 openat(AT_FDCWD, "/tmp/x", O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 3',
        '7 openat(AT_FDCWD, "/tmp", O_RDWR|O_TMPFILE, 0600) = 3',
        '7 open("/x", O_RDWR) = 3',
        '7 memfd_create("slab", MFD_CLOEXEC) = 4',
        '7 renameat2(AT_FDCWD, "a", AT_FDCWD, "b", 0) = 0',
        "7 ftruncate(4, 100) = 0",
    ):
        assert WRITES.search(line), line
    for line in (
        '7 openat(AT_FDCWD, "/proc/stat", O_RDONLY|O_CLOEXEC) = 3',
        '7 readlink("/proc/self/exe", "x", 9) = 1',
    ):
        assert not WRITES.search(line), line

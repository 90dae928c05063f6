"""`benches/upload.py`: the bare loop of parts, the bounds, and the table that the documents show."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from s3_server import KEYS
from test_docs_figures import program
from test_uploads import bucket
from upload_server import Uploads

__all__ = ["bucket"]  # a fixture


@pytest.fixture(scope="module")
def upload() -> ModuleType:
    return program("upload")


@pytest.mark.parametrize("checksums", [False, True])
def test_the_bare_loop_puts_every_byte_in_parts_side_by_side(bucket: Uploads, checksums: bool) -> None:
    """Its signatures are checked by the double; the ETag of each part too, when they are joined."""
    bucket.delay = 0.05
    parts = program("part_loop")
    content = np.random.default_rng(0).integers(0, 255, 12_000_001, np.uint8)
    keys = parts.Credentials(*next(iter(KEYS.items())), "us-east-1")
    loop = parts.PartLoop(
        bucket.endpoint, "/bucket/a b/x", memoryview(content), 5 << 20, 2, keys, checksums=checksums
    )  # fmt: skip
    assert loop.put() > 0
    assert bucket.objects == {"a b/x": content.tobytes()} and bucket.most_at_once == 2
    assert [query.get("partNumber") for method, _, query in bucket.requests if method == "PUT"] in (
        ["1", "2", "3"], ["2", "1", "3"],
    )  # fmt: skip


def test_the_bare_loop_says_what_a_server_refuses(bucket: Uploads) -> None:
    parts = program("part_loop")
    loop = parts.PartLoop(
        bucket.endpoint, "/bucket/x", memoryview(bytes(100)), 60, 2, parts.Credentials("nobody", "x", "us-east-1")
    )
    with pytest.raises(parts.Refused, match="InvalidAccessKeyId"):
        loop.put()
    keys = parts.Credentials(*next(iter(KEYS.items())), "us-east-1")
    with pytest.raises(parts.Refused, match="EntityTooSmall"):
        parts.PartLoop(bucket.endpoint, "/bucket/x", memoryview(bytes(100)), 60, 2, keys).put()


def measured(upload: ModuleType, **seconds: float) -> dict[str, Any]:
    """One place at which each client took these seconds for a GB."""
    names = {"ours": upload.OURS, "disk": upload.DISK, "memory": upload.MEMORY, "loop": upload.LOOP,
             "checked": upload.CHECKED}  # fmt: skip

    def runs(middle: float) -> list[dict[str, Any]]:
        about = {"bytes": 10**9, "cpu_s": 0.5, "server_cpu_s": 1.5, "memory": 3e6}
        return [about | {"seconds": middle + more} for more in (0.1, 0.0, -0.25)]

    found = {name: runs(seconds[key]) if key in seconds else [] for key, name in names.items()}
    place = {"folder": "/x", "file_system": "tmpfs", "absent": {upload.DISK: "there is no boto3"}, "runs": found}
    return place | {"claims": upload.claims(place)}


def test_bounds_are_of_medians_and_of_those_that_ran(upload: ModuleType) -> None:
    place = measured(upload, ours=1.0, memory=1.25, loop=0.9, checked=0.8)
    assert [(round(one["value"], 3), one["bound"], one["holds"]) for one in place["claims"]] == [
        (1.25, 1.3, False), (0.9, 0.85, True), (0.8, 0.85, False),
    ]  # fmt: skip
    assert measured(upload, memory=1.25, loop=0.9)["claims"] == []


def test_the_table_has_a_row_of_each_client_that_ran(upload: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    upload.show({"places": [measured(upload, ours=1.0, memory=1.5)]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == [
        f"| tmpfs | {upload.OURS} | 1.00 s (0.75 to 1.10) | 1.00 | 0.50 | 1.50 | 3 |",
        f"| tmpfs | {upload.MEMORY} | 1.50 s (1.25 to 1.60) | 0.67 | 0.50 | 1.50 | 3 |",
    ]
    assert "- tmpfs: times as fast as safetensors, boto3, file in memory: 1.50 (bound 1.3: holds)" in lines
    assert any("there is no boto3" in line for line in lines)


def test_bytes_that_differ_from_what_was_sent_end_the_run(upload: ModuleType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sent = torch.arange(100, dtype=torch.uint8)
    (tmp_path / "x").write_bytes(sent.numpy().tobytes())
    upload.compare(sent, tmp_path / "x")
    (tmp_path / "x").write_bytes(bytes(100))
    with pytest.raises(SystemExit, match="other bytes"):
        upload.compare(sent, tmp_path / "x")

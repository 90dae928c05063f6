"""Loads from S3 with credentials from services that are at the addresses of Amazon's machines.

    unshare --net python tests/fixed_addresses.py FOLDER KIND

The addresses are added to the loopback device, so this is for a network namespace of its own. KIND is `container` or
`instance`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import penstock
from penstock.bench import reference
from s3_server import Bucket, serving

ADDRESSES = {"container": "169.254.170.2", "instance": "169.254.169.254"}


def main(folder: Path, kind: str) -> None:
    for command in (["link", "set", "lo", "up"], ["address", "add", f"{ADDRESSES[kind]}/32", "dev", "lo"]):
        subprocess.run(["ip", *command], check=True)
    objects = {f"m/{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_ENDPOINT_URL": "http://127.0.0.1", "AWS_REGION": "us-east-1", "HOME": "/nonexistent"}
    if kind == "container":
        os.environ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = "/v2/credentials/task"
    with serving(Bucket(objects), ("", 80)) as bucket:
        found = penstock.open("s3://bucket/m/").load(framework="np")
    entries = reference.entries_of(folder)
    assert sorted(found) == sorted(entries)
    assert all(found[name].tobytes() == reference.raw(entry).tobytes() for name, entry in entries.items())
    assert bucket.credentials == 1 and all(key for _, key in bucket.asked), bucket.asked


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

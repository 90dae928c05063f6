"""`penstock doctor /proc/PID/root/models` described the file system of this process's own /models, or of its root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from penstock import _doctor


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_the_doctor_describes_the_file_system_of_another_process(tmp_path: Path):
    at = tmp_path / "mo dels"
    at.mkdir()
    script = 'mount -t tmpfs -o size=1m models "$0" && echo mounted && read -r end'
    other = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, at], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    with other:
        try:
            assert other.stdout.readline() == "mounted\n"
            there = f"/proc/{other.pid}/root{at}"
            (tmp_path / "link").symlink_to(there)
            for path in (there, str(tmp_path / "link")):
                found = _doctor._mount(path)
                assert (found["type"], found["mounted_at"], found["from"]) == ("tmpfs", str(at), "models"), path
            assert _doctor._mount(str(at))["type"] != "tmpfs" or _doctor._mount(str(at))["from"] != "models"
        finally:
            other.stdin.close()

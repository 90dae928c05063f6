"""Has systemd judge unit files: ``python tools/recipes/units.py FILE.service...``. An unknown setting is an error.

`systemd-analyze verify` wants the programs that a unit starts. They are another machine's, so a copy of the unit is
judged that starts /bin/true in their place. Exits with 1 and what systemd said if a unit is wrong, and with 77 where
systemd is not installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The most that a unit may be exposed, of 10, by `systemd-analyze security`: it calls less than 5 medium.
EXPOSED = 5.0


def judged(files: list[Path]) -> list[str]:
    """What systemd says against these units; nothing if they are right."""
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for file in files:
            text = file.read_text()
            if not re.search(r"^ExecStart=/\S+", text, re.M):
                return [f"{file}: there is no ExecStart= with a whole path"]
            copy = Path(folder, file.name)
            copy.write_text(re.sub(r"^(Exec\w+=)/\S+", r"\1/bin/true", text, flags=re.M))
            copies.append(copy)
        # Templates are judged as an instance of theirs
        units = [str(copy).replace("@.", "@model.") for copy in copies]
        verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        if done.returncode and not said:
            said = [f"systemd-analyze verify: status {done.returncode}"]
        for copy in copies:
            limit = f"--threshold={round(EXPOSED * 10)}"
            security = ["systemd-analyze", "security", "--no-pager", "--offline=yes", limit, str(copy)]
            done = subprocess.run(security, capture_output=True, text=True, check=False)
            if done.returncode:
                said.append(f"{copy.name}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return said


def main() -> int:
    if shutil.which("systemd-analyze") is None:
        print("systemd-analyze is not installed: the units are not judged", file=sys.stderr)
        return 77
    files = [Path(one) for one in sys.argv[1:]]
    if said := judged(files):
        print("\n".join(said), file=sys.stderr)
        return 1
    for file in files:
        print(f"{file}: a unit, exposed less than {EXPOSED} of 10")
    return 0


if __name__ == "__main__":
    sys.exit(main())

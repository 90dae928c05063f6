"""The first process of a pod with an engine's ranks: starts one for each command, and ends with them.

    python pod_ranks.py LOG COMMANDS

COMMANDS is JSON: a list of commands. What rank N says goes to LOG.N. The first rank that fails ends the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(log: str, commands: list[list[str]]) -> int:
    begins = [int(fd) for fd in os.environ.get("PENSTOCK_POD_BEGINS", "").split(",") if fd]  # tools/pod
    ranks = []
    for number, command in enumerate(commands):
        with Path(f"{log}.{number}").open("wb") as output:
            ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, pass_fds=begins))
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.1)
    return max((abs(rank.wait()) for rank in ranks), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))

"""Runs a command in what a restricted Kubernetes pod gives its process. Needs root, and Linux 5.12.

    python tools/pod [options] -- COMMAND...

The command is no root, has no capability and cannot get one, sees a root that is read-only, may lock 8 MiB of memory,
has a /dev/shm of 64 MiB, and makes those system calls that ``--profile`` allows. The kernel does all that, no double:
namespaces, mounts, a control group of version 2 or 1, and libseccomp. The network is that of this machine.

Exits with the command's status, or with 128 plus the number of the signal that ended it. 125: no pod could be made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

from memory import Group, NoGroup
from sandbox import Pod, Volume
from seccomp import Filter

#: Two descriptors for the command: it writes a byte to the first when its load begins, and reads one from the second.
BEGINS = "PENSTOCK_POD_BEGINS"


def _volume(text: str) -> Volume:
    source, place, *more = text.split(":")
    if more not in ([], ["rw"]) or not place.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r}: give SOURCE:/PLACE or SOURCE:/PLACE:rw")
    if not Path(source).exists():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no {source}")
    return Volume(Path(source).resolve(), Path(place), bool(more))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("tools/pod", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--profile", metavar="FILE", required=True,
        help='"linux.seccomp" of the OCI runtime specification (`make .pods/seccomp.json`), or none')  # fmt: skip
    add("--user", type=int, default=65534, help="uid and gid (default: %(default)s)")
    add("--image", type=Path, action="append", default=[], metavar="FOLDER",
        help="a folder that the image has besides /usr, /etc and this Python; may be repeated")  # fmt: skip
    add("--volume", type=_volume, action="append", default=[], metavar="SOURCE:/PLACE[:rw]",
        help="a volume, read-only without rw; may be repeated. SOURCE:/tmp:rw is an emptyDir")  # fmt: skip
    add("--shm", type=int, default=64 << 20, metavar="BYTES", help="the size of /dev/shm; 0: read-only, too")
    add("--memlock", type=int, default=8 << 20, metavar="BYTES", help="how much memory it may lock")
    add("--memory", type=int, metavar="BYTES", help="the memory limit from the start on")
    add("--memory-besides", type=int, metavar="BYTES",
        help=f"the memory limit besides what it holds when it says, by {BEGINS}, that its load begins")  # fmt: skip
    add("--share-pid", action="store_true", help="shareProcessNamespace: /proc lists the processes of this machine")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable; there are no others")
    add("--facts", type=Path, metavar="FILE", help="what came of the memory limit, and of the profile, as JSON")
    add("command", nargs="+", metavar="COMMAND")
    return parser.parse_args()


def _first_process(pod: Pod, root: Path, group: Group | None, command: list[str], env: dict[str, str]) -> None:
    """Never returns."""
    try:
        pod.enter(root, group)
        os.execvpe(command[0], command, env)
    except BaseException:
        traceback.print_exc()
    os._exit(125)


def _status(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def _limited_when_told(group: Group, besides: int, told: int, answer: int) -> None:
    """Waits until the command says that its load begins, or has ended."""
    while os.read(told, 1):
        group.restrict(group.held() + besides)
        os.write(answer, b"x")


def main() -> int:
    given = _arguments()
    if os.geteuid() != 0:
        print("tools/pod: only root can make a pod", file=sys.stderr)
        return 125
    profile = None if given.profile == "none" else Filter(json.loads(Path(given.profile).read_text()))
    image = {Path(one).resolve() for one in [sys.prefix, sys.base_prefix, sys.exec_prefix, *given.image]}
    image |= {Path(one).absolute() for one in (sys.prefix,)}  # an environment may be reached by a link
    pod = Pod(profile, given.user, sorted(image), given.volume, given.shm, given.memlock, given.share_pid)
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": "/"}
    env |= dict(one.split("=", 1) for one in given.env)
    group = None
    if given.memory or given.memory_besides:
        try:
            group = Group()
        except NoGroup as error:
            print(f"tools/pod: no control group for the memory limit: {error}", file=sys.stderr)
            return 125
    told, tells = os.pipe()
    hears, answer = os.pipe()
    if given.memory_besides:
        for descriptor in (tells, hears):
            os.set_inheritable(descriptor, True)
        env[BEGINS] = f"{tells},{hears}"
    try:
        if group is not None and given.memory:
            group.restrict(given.memory)
        with tempfile.TemporaryDirectory(prefix="penstock-pod-") as root:
            outer = os.fork()
            if outer == 0:
                try:
                    pod.unshare(group)
                    os.close(told)
                    os.close(answer)
                    first = os.fork()
                    if first == 0:
                        _first_process(pod, Path(root), group, given.command, env)
                    os.close(tells)
                    os._exit(_status(first))
                except BaseException:
                    traceback.print_exc()
                os._exit(125)
            os.close(tells)
            os.close(hears)
            if group is not None and given.memory_besides:
                _limited_when_told(group, given.memory_besides, told, answer)
            status = _status(outer)
        if given.facts:
            facts = {"status": status, "unknown_calls": profile.unknown if profile else []}
            given.facts.write_text(json.dumps(facts | (group.facts() if group else {})))
        return status
    finally:
        if group is not None:
            group.close()


if __name__ == "__main__":
    sys.exit(main())

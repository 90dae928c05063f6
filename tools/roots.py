"""Installs a release in bare roots of Debian, and loads with it there: what `make roots` runs.

    python tools/roots.py [--wheels dist] [--work .roots] [--torch SITE_PACKAGES] [ROOT]...

For each ROOT (11, 12, 13, testing; default: all) debootstrap makes `--work`/debian-ROOT, once, with Python and nothing
else. In each, pip installs the wheel without an index into two new environments, one without torch and one with it. In
both: import, load a small checkpoint, `penstock doctor`, and that no `.pth` of Penstock is there before
`penstock[patch]` is installed. Prints a line for each, and says why a root is skipped.

Debian 11 has Python 3.9: 3.11 is built there, from the source package of Debian 12. torch is Debian's own package
(python3-torch); in Debian 11 it is what `--torch` shows: the site-packages of a Python 3.11. Needs root, and Debian's
package archive.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Root(NamedTuple):
    """One release of Debian."""

    suite: str
    include: tuple[str, ...]
    python: str
    own_torch: bool
    """Whether its package python3-torch is for this Python."""


PYTHON = ("ca-certificates", "python3", "python3-venv")
BUILD = (
    "ca-certificates",
    "gcc",
    "libc6-dev",
    "make",
    "zlib1g-dev",
    "libffi-dev",
    "libssl-dev",
    "xz-utils",
    "dpkg-dev",
)
ROOTS = {
    "11": Root("bullseye", BUILD, "/opt/python/bin/python3", False),
    "12": Root("bookworm", PYTHON, "/usr/bin/python3", True),
    "13": Root("trixie", PYTHON, "/usr/bin/python3", True),
    "testing": Root("testing", PYTHON, "/usr/bin/python3", True),
}

#: Which source package has a Python that is new enough, in which suite.
SOURCE, SOURCE_SUITE = "python3.11", "bookworm"
BUILD_PYTHON = f"""
mirror=$(sed -n 's/^deb \\([^ ]*\\) .*/\\1/p' /etc/apt/sources.list | head -1)
echo "deb-src $mirror {SOURCE_SUITE} main" > /etc/apt/sources.list.d/source.list
apt-get -qq update
mkdir -p /usr/src/python && cd /usr/src/python
apt-get -qq source --download-only {SOURCE}
tar xf {SOURCE}_*.orig.tar.* && cd Python-*
./configure -q --prefix=/opt/python > configure.log 2>&1 || {{ tail -5 configure.log; exit 1; }}
make -s -j2 > make.log 2>&1 || {{ tail -5 make.log; exit 1; }}
make -s install > install.log 2>&1 || {{ tail -5 install.log; exit 1; }}
cd / && rm -rf /usr/src/python
"""

#: A mirror may be older than Debian wants it to be: here that is no danger.
INSTALL_TORCH = """
python3 -c 'import torch' 2>/dev/null && exit
apt-get -qq -o Acquire::Check-Valid-Until=false update
apt-get -qq install --no-install-recommends python3-torch >/dev/null
"""

#: What is tried in each environment: $1 is the Python of the root, $2 the environment, $3 more for venv.
TRY = """
"$1" -m venv --clear $3 "$2"
site=$("$2"/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -z "$TORCH" ] || echo "$TORCH" > "$site/torch.pth"
install() {  # also where --torch shows an environment that has Penstock
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --find-links /penstock --ignore-installed "$1"
}
PYTHON=$2/bin/python
install penstock
cd "$2"
PENSTOCK_PATCH=1 ./bin/python - <<'END'
import sys, sysconfig
from pathlib import Path
found = [path.name for path in Path(sysconfig.get_path("purelib")).glob("*.pth") if "penstock" in path.name]
assert not found, found
assert not [name for name in sys.modules if "penstock" in name], sys.modules
END
./bin/python - <<'END'
import json, struct, sys
from pathlib import Path
import penstock
assert not {"torch", "numpy"} & set(sys.modules)
values = list(range(30000))
head = json.dumps({"a": {"dtype": "I32", "shape": [300, 100], "data_offsets": [0, 120000]}}).encode()
head += b" " * (-len(head) % 8)
Path("model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<30000i", *values))
for io in ("auto", "mapped", "buffered", "threads"):
    state = penstock.open("model.safetensors").load(framework="dlpack", options={"io": io})
    assert list(state) == ["a"]
try:
    import torch
except ImportError:
    print("no torch", end="")
else:
    for options in ({}, {"copy": True}, {"io": "threads"}):
        tensor = penstock.open("model.safetensors").load(options=options)["a"]
        assert tensor.flatten().tolist() == values, options
    print("torch", torch.__version__, end="")
END
./bin/penstock load --no-progress model.safetensors > load.txt
PENSTOCK_PATCH=1 ./bin/penstock doctor --no-measure > doctor.txt
grep -q 'PENSTOCK_PATCH=1 has no effect' doctor.txt
./bin/penstock --version > version.txt
install 'penstock[patch]'
PENSTOCK_PATCH=1 ./bin/python -c 'import sys; assert "_penstock_patch" in sys.modules'
PENSTOCK_PATCH=1 ./bin/penstock doctor --no-measure > doctor.txt
! grep -q 'has no effect' doctor.txt
printf ', %s, glibc %s' "$(./bin/python --version)" "$(ldd --version | sed -n '1s/.* //p')"
"""


def inside(root: Path, script: str, *arguments: str, shown: dict[str, Path] | None = None, **more: str) -> str:
    """What a shell script prints in the root; the folders ``shown`` are there, read-only, while it runs.

    Raises CalledProcessError, with what it printed.
    """
    mounts = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    for to, folder in (shown or {}).items():
        (root / to.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mounts += [f"mount --bind {folder} {root}{to}", f"mount -o remount,bind,ro {root}{to}"]
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8", **more}
    variables |= {"DEBIAN_FRONTEND": "noninteractive"}
    words = [f"{name}={value}" for name, value in variables.items()]
    enter = shlex.join(
        ["chroot", str(root), "env", "-i", *words, "bash", "-euo", "pipefail", "-c", script, "-", *arguments]
    )
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-ec",
        "\n".join([*mounts, f"exec {enter}"]),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, "the script in the root", done.stdout, done.stderr)
    return done.stdout.strip()


def make(name: str, root: Path) -> str | None:
    """Makes a root unless it is there; why that was not possible."""
    about = ROOTS[name]
    if (root / ".made").exists():
        return None
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(about.include)}", about.suite, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"debootstrap: {(done.stdout + done.stderr).strip().splitlines()[-1]}"
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    if not about.own_torch:
        try:
            inside(root, BUILD_PYTHON)
        except subprocess.CalledProcessError as error:
            return f"Python could not be built: {(error.stdout + error.stderr).strip().splitlines()[-1]}"
    (root / ".made").touch()
    return None


def try_in(name: str, root: Path, wheels: Path, torch: Path | None) -> int:
    """Tries a root; returns how many of its two environments failed."""
    about, failed = ROOTS[name], 0
    for with_torch in (False, True):
        said = f"debian-{name} {'with' if with_torch else 'without'} torch"
        shown = {"/penstock": wheels}
        more, variables = "", {"TORCH": ""}
        if with_torch and about.own_torch:
            try:
                inside(root, INSTALL_TORCH)
            except subprocess.CalledProcessError as error:
                why = (error.stdout + error.stderr).strip() or f"exit code {error.returncode}"
                print(f"skip {said}: its package python3-torch cannot be installed: {why}", flush=True)
                continue
            more = "--system-site-packages"
        elif with_torch:
            if torch is None:
                print(f"skip {said}: give --torch the site-packages of a Python 3.11 that has it", flush=True)
                continue
            shown["/torch"] = torch
            variables["TORCH"] = "/torch"
        try:
            found = inside(root, TRY, about.python, "/tmp/with" if with_torch else "/tmp/without", more,
                           shown=shown, **variables)  # fmt: skip
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"FAIL {said}: {error.stdout.strip()}\n{error.stderr.strip()}", flush=True)
        else:
            print(f"pass {said}: {found}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=Path("dist"))
    parser.add_argument("--work", type=Path, default=Path(".roots"))
    parser.add_argument("--torch", type=Path, help="for Debian 11: the site-packages of a Python 3.11 with torch")
    parser.add_argument("roots", nargs="*", metavar="ROOT", help=f"of {', '.join(ROOTS)} (default: all)")
    given = parser.parse_args()
    if unknown := set(given.roots) - set(ROOTS):
        parser.error(f"{', '.join(sorted(unknown))}: the roots are {', '.join(ROOTS)}")
    if not list(given.wheels.glob("penstock-*_x86_64.whl")) or not list(given.wheels.glob("penstock_patch-*.whl")):
        parser.error(f"{given.wheels} has no release: make release")
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        print("skip all roots: this needs root, and debootstrap (apt-get install debootstrap)")
        return 77
    failed = skipped = 0
    for name in given.roots or ROOTS:
        root = given.work.absolute() / f"debian-{name}"
        root.parent.mkdir(parents=True, exist_ok=True)
        if (why := make(name, root)) is not None:
            print(f"skip debian-{name}: {why}", flush=True)
            skipped += 1
            continue
        failed += try_in(name, root, given.wheels.absolute(), given.torch and given.torch.absolute())
    print(f"{len(given.roots or ROOTS) - skipped} roots tried, {failed} environments failed, {skipped} roots skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes a virtual environment, reusing a torch that is already there.

    python tools/environment.py DIR [--torch] [--path FOLDER] [--bare PACKAGE] [--wanted PACKAGE] REQUIREMENT...

torch is by far the largest thing that the tests, the demo and the benchmark need. Where the interpreter that runs this
script has one, a `.pth` file shows it to the new environment; otherwise `--torch` installs it. The other requirements
are always installed into the environment itself, so that their versions and command-line tools are its own; `--bare`
ones without what they depend on. What not every platform and Python has is `--wanted`, with what it depends on but
torch, or `--optional`, bare: where it cannot be had, that is said, and the rest goes on. `--path` puts a folder of
Python sources on the environment's path.

Standard library only. Does nothing when the environment already holds what is asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

OUTER_TORCH = "outer-torch.pth"


def torch_home() -> Path | None:
    """The directory to put on `sys.path` to import the running interpreter's torch, if it has one."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.parent


def site_packages(python: Path) -> Path:
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip())


def has_torch(python: Path) -> bool:
    query = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", query], check=False).returncode == 0


def pip_install(python: Path, requirements: list[str]) -> None:
    # Of thousands of files few are ever imported: torch and what it needs would take half a minute
    flags = ["--disable-pip-version-check", "--quiet", "--no-compile"]
    print("installing:", " ".join(requirements), flush=True)
    subprocess.run([str(python), "-m", "pip", "install", *flags, *requirements], check=True)


def compile_torch(python: Path) -> None:
    """Keeps the modules of torch compiled: a program that may not write them would compile them each time."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Where it cannot be imported, that is for those to say who need it
    subprocess.run([str(python), "-c", "import torch, torch._dynamo"], env=environment, check=False)


def install_what_can_be_had(python: Path, flags: list[str], packages: list[str]) -> None:
    """All at once, so that their versions go together; if that fails one by one."""
    if not packages:
        return
    try:
        pip_install(python, [*flags, *packages])
    except subprocess.CalledProcessError:
        for package in packages:
            try:
                pip_install(python, [*flags, package])
            except subprocess.CalledProcessError:
                print(f"{package} cannot be installed here", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--torch", action="store_true", help="torch is needed: reuse one, else install one")
    parser.add_argument("--bare", action="append", default=[], metavar="PACKAGE", help="install without dependencies")
    parser.add_argument("--optional", action="append", default=[], metavar="PACKAGE", help="the same, if it can be had")
    parser.add_argument("--wanted", action="append", default=[], metavar="PACKAGE", help="install, if it can be had")
    parser.add_argument("--path", action="append", default=[], metavar="FOLDER", help="also import from here")
    parser.add_argument("requirements", nargs="*")
    arguments = parser.parse_intermixed_args()

    directory: Path = arguments.directory.absolute()
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    packages = [*arguments.requirements, *arguments.bare, *arguments.wanted, *arguments.optional]
    wanted = [*packages, *arguments.path, f"torch={arguments.torch}", " ".join(sys.version.split())]
    held = stamp.read_text().splitlines() if python.exists() and stamp.exists() else []
    if set(wanted) <= set(held):
        return

    if wanted[-1] not in held:
        held = []
        if not python.exists() or stamp.exists():
            venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(directory)
    stamp.unlink(missing_ok=True)
    site = site_packages(python)

    # pip would count what the .pth file shows as installed, and leave out the command-line tools we came for.
    (site / OUTER_TORCH).unlink(missing_ok=True)
    if arguments.requirements:
        pip_install(python, arguments.requirements)
    if arguments.bare:
        pip_install(python, ["--no-deps", *arguments.bare])
    without_torch = site / "without-torch.txt"
    # A version that needs torch would bring gigabytes, and a torch of its own choice
    without_torch.write_text("torch<0\n")
    install_what_can_be_had(python, ["--constraint", str(without_torch)], arguments.wanted)
    install_what_can_be_had(python, ["--no-deps"], arguments.optional)
    if arguments.torch and not has_torch(python):
        home = torch_home()
        if home is not None and home != site:
            (site / OUTER_TORCH).write_text(f"{home}\n")
            print(f"using the torch in {home}", flush=True)
        if not has_torch(python):
            pip_install(python, ["torch"])
            compile_torch(python)
    if arguments.path:
        (site / "sources.pth").write_text("".join(f"{Path(path).absolute()}\n" for path in arguments.path))
    stamp.write_text("\n".join(dict.fromkeys([*held, *wanted])))


if __name__ == "__main__":
    main()

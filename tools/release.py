"""Builds all files of a release of one commit into a folder: what `make release` runs.

    python tools/release.py [--out dist] [--work FOLDER] [--target TRIPLE]... [--rehearsal]

Everything is built from an export of HEAD, in FOLDER (default: a temporary one). What the tree has beside HEAD is not
in the release. The sdist is that export with the crates' sources (`cargo vendor`), and the wheels are built from the
same files, offline. Two runs on one commit write the same bytes, whatever FOLDER is, with the same tools: times are the
commit's, paths are mapped, archives are sorted.

| file | what it is |
|---|---|
| penstock-VERSION-cp310-abi3-manylinux_2_28_*.whl | a wheel for each target |
| penstock_patch-VERSION-py3-none-any.whl | what reads PENSTOCK_PATCH |
| penstock-VERSION.tar.gz | the sdist, which builds without a network |
| penstock-VERSION.cdx.json | the bill of materials; the wheels have it too |
| THIRD-PARTY-LICENSES.txt, LICENSE | the licences; the wheels have them too |
| SHA256SUMS | digests of all these, for `sha256sum --check` |

Needs git, Rust with each target, and an environment with maturin, ziglang and hatchling (`make release` makes it).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import glibc
import sbom

from crates import ROOT, TARGETS, metadata, version

#: A crate of another platform keeps its manifest, so that Cargo.lock holds, and none of these.
_LEFT_OUT = ("[[bin]]", "[[example]]", "[[test]]", "[[bench]]", "[lib]", "[lints", "[profile", "[badges")
_VENDORED = """\
# The sources of all crates are in vendor/: a build asks no network.
[source.crates-io]
replace-with = "vendored-sources"

[source.vendored-sources]
directory = "vendor"

[net]
offline = true
"""


class Commit(NamedTuple):
    """What is released."""

    name: str
    """The whole hash."""
    time: int
    """Seconds since 1970."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def head() -> Commit:
    """The commit that is checked out. Raises SystemExit outside of a clone."""
    try:
        found = Commit(git("rev-parse", "HEAD"), int(git("log", "-1", "--format=%ct")))
    except (subprocess.CalledProcessError, FileNotFoundError):
        sys.exit(f"{ROOT} is no clone that git can read: a release is made of a commit")
    if git("status", "--porcelain"):
        print("note: this tree has changes that HEAD has not; the release is HEAD, without them", flush=True)
    return found


def export(commit: Commit, folder: Path) -> None:
    """The files of the commit, and its name in COMMIT, which a build from the sdist says."""
    folder.mkdir(parents=True)
    packed = subprocess.run(
        ["git", "archive", "--format=tar", commit.name], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    (folder / "COMMIT").write_text(f"{commit.name}\n")


def vendor(folder: Path) -> None:
    """The sources of the crates of Cargo.lock, without the contents of those that no Linux build compiles."""
    command = ["cargo", "vendor", "--locked", "--versioned-dirs", "--quiet", "vendor"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    used = {f"{p['name']}-{p['version']}" for target in TARGETS for p in metadata(target, folder)["packages"]}
    for crate in sorted((folder / "vendor").iterdir()):
        if crate.name not in used:
            _hollow(crate)
    (folder / ".cargo").mkdir()
    (folder / ".cargo" / "config.toml").write_text(_VENDORED)


def _hollow(crate: Path) -> None:
    """Leaves of a crate what cargo wants to see of it: name, version, features, requirements."""
    kept, wanted = [], True
    for line in (crate / "Cargo.toml").read_text().splitlines():
        if line.startswith("["):
            wanted = not line.startswith(_LEFT_OUT)
        if wanted and not line.startswith(("build = ", "links = ", "readme = ", "default-run = ")):
            kept.append(line)
    package = json.loads((crate / ".cargo-checksum.json").read_text())["package"]
    shutil.rmtree(crate)
    (crate / "src").mkdir(parents=True)
    (crate / "src" / "lib.rs").write_text("")
    (crate / "Cargo.toml").write_text("\n".join([*kept, "", "[lib]", 'path = "src/lib.rs"', ""]))
    (crate / ".cargo-checksum.json").write_text(json.dumps({"files": {}, "package": package}))


#: For `--rehearsal`. The wheel says so: `penstock --version` lists the feature "debug".
_UNOPTIMISED = {"LTO": "off", "OPT_LEVEL": "0", "DEBUG": "0", "CODEGEN_UNITS": "16", "DEBUG_ASSERTIONS": "true"}


def build_environment(source: Path, work: Path, commit: Commit, rehearsal: bool) -> dict[str, str]:
    """The variables of a build: none that a user has set for cargo, rustc or a compiler."""
    ours = (
        "CARGO_",
        "RUSTFLAGS",
        "RUSTC",
        "PENSTOCK_",
        "PYTHON",
        "MATURIN_",
        "CFLAGS",
        "CXXFLAGS",
        "LDFLAGS",
        "CC",
        "AR",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    mapped = {str(source): "/penstock", str(work): "/build"}
    profile = {f"CARGO_PROFILE_RELEASE_{name}": value for name, value in _UNOPTIMISED.items()} if rehearsal else {}
    return {
        **kept,
        **profile,
        "SOURCE_DATE_EPOCH": str(commit.time),
        "RUSTFLAGS": " ".join(f"--remap-path-prefix={path}={to}" for path, to in mapped.items()),
        "CFLAGS": " ".join(f"-ffile-prefix-map={path}={to}" for path, to in mapped.items()),
        "CARGO_TARGET_DIR": str(work / "target"),
        "CARGO_HOME": str(work / "cargo"),  # empty: all crates are in vendor/, and other builds hold no lock on it
        "CARGO_INCREMENTAL": "0",
        "PYO3_PYTHON": sys.executable,
        "PYTHONDONTWRITEBYTECODE": "1",  # hatchling's hook of patch/ is in the tree that becomes the sdist
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }


def wheels(source: Path, work: Path, environment: dict[str, str], targets: list[str], bill: Path) -> list[Path]:
    """A wheel for each target, and that of penstock-patch."""
    out = work / "wheels"
    for target in targets:
        print(f"building the wheel for {target}", flush=True)
        command = [
            *(str(Path(sys.executable).parent / "maturin"), "build", "--release", "--zig", "--locked", "--offline"),
            *("--target", target, "--compatibility", "manylinux_2_28", "--sbom-include", str(bill), "--out", str(out)),
        ]
        subprocess.run(command, cwd=source, env=environment, check=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=source / "patch", env=environment, check=True)
    return sorted(out.glob("*.whl"))


def sdist(source: Path, wheel: Path, path: Path, commit: Commit) -> None:
    """The exported folder as an archive, with the wheel's metadata: sorted, owned by nobody, dated as the commit."""
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        (source / "PKG-INFO").write_bytes(packed.read(name))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(source.rglob("*"), key=lambda path: path.relative_to(source).as_posix()):
            if (file.is_dir() and not file.is_symlink()) or "__pycache__" in file.parts:
                continue
            entry = tar.gettarinfo(file, f"{path.name.removesuffix('.tar.gz')}/{file.relative_to(source).as_posix()}")
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = commit.time
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            if entry.isreg():
                with file.open("rb") as data:
                    tar.addfile(entry, data)
            else:
                tar.addfile(entry)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=commit.time) as packed_file:
        packed_file.write(plain.getvalue())


def validate(bill: Path) -> str | None:
    """What CycloneDX's own validator says is wrong. Raises SystemExit where it is not installed."""
    if importlib.util.find_spec("cyclonedx") is None or importlib.util.find_spec("jsonschema") is None:
        sys.exit("the bill of materials cannot be checked: pip install 'cyclonedx-python-lib[json-validation]'")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.read_text())
    return None if wrong is None else str(wrong)


def check(files: list[Path], bill: Path) -> list[str]:
    """What is wrong with the files of a release; prints a line for each thing that was looked at."""
    wrong = []

    def said(what: str, problem: str | None) -> None:
        print(f"pass {what}" if problem is None else f"FAIL {what}: {problem}", flush=True)
        if problem is not None:
            wrong.append(what)

    said(f"{bill.name} is CycloneDX 1.6", validate(bill))
    for wheel in (file for file in files if file.suffix == ".whl"):
        with zipfile.ZipFile(wheel) as packed:
            names = packed.namelist()
        lines = [name for name in names if name.endswith(".pth")]
        if wheel.name.startswith("penstock_patch-"):
            said(f"{wheel.name} has the one .pth", None if lines == ["penstock_patch.pth"] else str(lines))
            continue
        said(f"{wheel.name} has no .pth", f"it has {lines}" if lines else None)
        for wanted in ("licenses/LICENSE", "licenses/THIRD-PARTY-LICENSES.txt", f"sboms/{bill.name}"):
            there = any(name.endswith(f".dist-info/{wanted}") for name in names)
            said(f"{wheel.name} has {wanted}", None if there else "it is not there")
        for name, data in glibc.shared_objects(wheel):
            found = glibc.glibc(data)
            newer = [one for one in found if glibc.number(one) > glibc.number(glibc.MOST)]
            of = f"{name} ({glibc.machine(data)}) needs glibc {found[-1]} by its symbols; not run on glibc {glibc.MOST}"
            said(of, f"GLIBC_{newer[-1]} is newer than {glibc.MOST}" if newer else None)
    return wrong


def sums(out: Path) -> str:
    """SHA256SUMS of a folder."""
    files = sorted(file for file in out.iterdir() if file.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def release(work: Path, out: Path, targets: list[str], rehearsal: bool) -> list[str]:
    """Writes a release of HEAD into ``out``, which it empties before; returns what is wrong with it."""
    os.umask(0o022)
    commit, name = head(), f"penstock-{version()}"
    source = work / name
    for folder in (source, work / "wheels", work / "target"):
        shutil.rmtree(folder, ignore_errors=True)
    export(commit, source)
    vendor(source)
    bill = source / f"{name}.cdx.json"
    bill.write_text(json.dumps(sbom.bill(commit.name, commit.time, source), indent=1) + "\n")
    made = wheels(source, work, build_environment(source, work, commit, rehearsal), targets, bill)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in (*made, bill, source / "LICENSE", source / "THIRD-PARTY-LICENSES.txt"):
        shutil.copyfile(file, out / file.name)
    [wheel, *_] = (file for file in made if file.name.startswith("penstock-"))
    sdist(source, wheel, out / f"{name}.tar.gz", commit)
    wrong = check(sorted(out.iterdir()), out / bill.name)
    (out / "SHA256SUMS").write_text(sums(out))
    print((out / "SHA256SUMS").read_text(), end="")
    print(f"release of {commit.name} in {out}: {'failed' if wrong else 'complete'}", flush=True)
    return wrong


def targets_there(wanted: list[str]) -> list[str]:
    """The targets, each with a standard library here. Raises SystemExit, which names what is missing."""
    for target in wanted:
        folder = subprocess.run(
            ["rustc", "--target", target, "--print", "target-libdir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        if not any(Path(folder).glob("libstd-*.rlib")):
            sys.exit(
                f"Rust has no standard library for {target} here: rustup target add {target}, or leave that wheel out "
                f"with RELEASE='--target {TARGETS[0]}'"
            )
    return wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="is emptied before (default: dist)")
    parser.add_argument("--work", type=Path, help="where to build (default: a temporary folder)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated (default: all)")
    help = "do not optimise: to try the tools in a quarter of the time. Not for publishing"
    parser.add_argument("--rehearsal", action="store_true", help=help)
    given = parser.parse_args()
    targets = targets_there(given.target or list(TARGETS))
    if given.work is not None:
        return 1 if release(given.work.absolute(), given.out.absolute(), targets, given.rehearsal) else 0
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as work:
        return 1 if release(Path(work), given.out.absolute(), targets, given.rehearsal) else 0


if __name__ == "__main__":
    sys.exit(main())

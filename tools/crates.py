"""Which crates the extension module is made of, for the two platforms that have wheels: from `cargo metadata`.

`licences.py` collects their licence texts, `sbom.py` lists them. Standard library only.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
EXTENSION = "penstock-python"


class Crate(NamedTuple):
    """One version of one crate."""

    name: str
    version: str
    licence: str
    """An SPDX expression."""
    checksum: str | None
    """SHA-256 of its package, from Cargo.lock; None for a crate of this project."""
    folder: Path
    """Its sources on this machine."""
    repository: str | None
    linked: bool
    """Whether the extension module contains it. Otherwise it is code that ran while that was built."""
    needs: tuple[str, ...]
    """``name@version`` of each crate that it needs itself."""

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


def metadata(target: str, root: Path = ROOT) -> dict[str, Any]:
    """What cargo says of the workspace for one target. Raises CalledProcessError; cargo says on standard error why."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout)
    return found


def checksums(lock: str) -> dict[str, str]:
    """``name@version`` of each crate of a Cargo.lock, and the SHA-256 of its package."""
    found = {}
    for block in lock.split("[[package]]")[1:]:
        fields = dict(re.findall(r'^(name|version|checksum) = "([^"]+)"', block, re.M))
        if "checksum" in fields:
            found[f"{fields['name']}@{fields['version']}"] = fields["checksum"]
    return found


def _reached(graph: dict[str, Any], packages: dict[str, Any], of: str, linked: bool) -> set[str]:
    """The ids of what a crate needs to be built, or (``linked``) of what it then contains."""
    seen: set[str] = set()
    waiting = [of]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        for needed in graph[at]["deps"]:
            runs = ["proc-macro"] in [target["kind"] for target in packages[needed["pkg"]]["targets"]]
            kinds = {kind["kind"] for kind in needed["dep_kinds"]} - {"dev"}
            if kinds and not (linked and (runs or None not in kinds)):
                waiting.append(needed["pkg"])
    return seen


def crates(root: Path = ROOT) -> list[Crate]:
    """The crates of the extension module, by name and version: linked or used to build it, on any of `TARGETS`."""
    sums = checksums((root / "Cargo.lock").read_text())
    found: dict[str, Crate] = {}
    for target in TARGETS:
        said = metadata(target, root)
        packages = {package["id"]: package for package in said["packages"]}
        graph = {node["id"]: node for node in said["resolve"]["nodes"]}
        [start] = (key for key, package in packages.items() if package["name"] == EXTENSION)
        built = _reached(graph, packages, start, linked=False)
        linked = _reached(graph, packages, start, linked=True)
        for key in built:
            package = packages[key]
            name = f"{package['name']}@{package['version']}"
            needs = {
                f"{packages[d['pkg']]['name']}@{packages[d['pkg']]['version']}"
                for d in graph[key]["deps"]
                if {kind["kind"] for kind in d["dep_kinds"]} - {"dev"}
            }
            before = found.get(name)
            found[name] = Crate(
                package["name"],
                package["version"],
                # crates of before 2018 write a slash for OR
                (package["license"] or "").replace("/", " OR "),
                sums.get(name),
                Path(package["manifest_path"]).parent,
                package["repository"],
                key in linked or (before is not None and before.linked),
                tuple(sorted(needs | set(before.needs if before else ()))),
            )
    return [found[name] for name in sorted(found)]


def version(root: Path = ROOT) -> str:
    """Penstock's version: that of the workspace."""
    said = re.search(r'^version = "([^"]+)"', (root / "Cargo.toml").read_text(), re.M)
    assert said is not None, "Cargo.toml has no version"
    return said[1]

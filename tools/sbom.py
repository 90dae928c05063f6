"""Writes the software bill of materials of a release: CycloneDX 1.6, JSON.

    python tools/sbom.py FILE [--commit HASH] [--time SECONDS]

Crates are those of Cargo.lock that the extension module contains (scope "required") or that ran while it was built
("excluded"). Python packages are Penstock's two, what the extras of pyproject.toml ask for ("optional"), and the build
back ends ("excluded"). The same commit gives the same bytes: the time is the commit's, the serial number comes from its
hash, and no path of this machine is in it.

Standard library only. `make release` checks it with CycloneDX's own validator, and so does
`tests/test_release_tools.py` where that is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crates import EXTENSION, ROOT, Crate, crates, version

Component = dict[str, Any]


def _crate(crate: Crate) -> Component:
    found: Component = {
        "type": "library",
        "bom-ref": f"pkg:cargo/{crate.key}",
        "name": crate.name,
        "version": crate.version,
        "scope": "required" if crate.linked else "excluded",
        "licenses": [{"expression": crate.licence}],
        "purl": f"pkg:cargo/{crate.key}",
    }
    if crate.checksum is not None:
        found["hashes"] = [{"alg": "SHA-256", "content": crate.checksum}]
    if crate.repository is not None:
        found["externalReferences"] = [{"type": "vcs", "url": crate.repository}]
    return found


def _requirements(pyproject: str, table: str) -> list[str]:
    """The requirements that a table of pyproject.toml lists. By hand: Python 3.10 has no reader of TOML."""
    body = re.search(rf"^\[{re.escape(table)}\]\n(.*?)(?=^\[|\Z)", pyproject, re.M | re.S)
    lines = re.findall(r"^\w+ = \[(.*?)\]", body[1], re.M | re.S) if body else []
    return sorted({name for line in lines for name in re.findall(r'"([A-Za-z][^"]*)"', line)})


def _python(requirement: str, scope: str) -> Component:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    key = re.sub(r"[-_.]+", "-", name[0]).lower()
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{key}",
        "name": key,
        "scope": scope,
        "purl": f"pkg:pypi/{key}",
        "properties": [{"name": "penstock:requirement", "value": requirement}],
    }


def bill(commit: str, time: int, root: Path = ROOT) -> dict[str, Any]:
    """The document. ``time``: seconds since 1970."""
    ours = version(root)
    found = crates(root)
    pyproject = (root / "pyproject.toml").read_text()
    own: Component = {
        "type": "library",
        "bom-ref": f"pkg:pypi/penstock@{ours}",
        "name": "penstock",
        "version": ours,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": f"pkg:pypi/penstock@{ours}",
        "properties": [{"name": "penstock:commit", "value": commit}],
    }
    patch = {
        **own,
        "bom-ref": f"pkg:pypi/penstock-patch@{ours}",
        "name": "penstock-patch",
        "scope": "optional",
        "purl": f"pkg:pypi/penstock-patch@{ours}",
    }
    rustc = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
    rust: Component = {
        "type": "library",
        "bom-ref": f"pkg:generic/rust-std@{rustc}",
        "name": "rust-std",
        "version": rustc,
        "scope": "required",
        "licenses": [{"expression": "MIT OR Apache-2.0"}],
        "purl": f"pkg:generic/rust-std@{rustc}",
    }
    optional = [
        _python(requirement, "optional")
        for requirement in _requirements(pyproject, "project.optional-dependencies")
        if not requirement.startswith("penstock")
    ]
    backends = [
        _python(requirement, "excluded")
        for text in (pyproject, (root / "patch" / "pyproject.toml").read_text())
        for requirement in _requirements(text, "build-system")
    ]
    components = [patch, rust, *map(_crate, found), *optional, *backends]
    depends = {
        own["bom-ref"]: [f"pkg:cargo/{EXTENSION}@{ours}"],
        patch["bom-ref"]: [own["bom-ref"]],
        **{f"pkg:cargo/{crate.key}": [f"pkg:cargo/{need}" for need in crate.needs] for crate in found},
    }
    stamp = datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'penstock/{ours}/{commit}')}",
        "version": 1,
        "metadata": {"timestamp": stamp, "component": own},
        "components": sorted(components, key=lambda component: str(component["bom-ref"])),
        "dependencies": [{"ref": ref, "dependsOn": sorted(on)} for ref, on in sorted(depends.items())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--time", type=int, default=0, metavar="SECONDS", help="since 1970")
    given = parser.parse_args()
    document = bill(given.commit, given.time)
    given.file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{given.file.name}: {len(document['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())

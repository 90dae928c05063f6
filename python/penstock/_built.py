"""The build of penstock: version, commit, features, platform. For ``penstock --version`` and bug reports."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import _core

__all__ = ["build", "described", "unread_patch_variable"]


def build() -> dict[str, Any]:
    """Version, commit, features, target; and the Python, C library and kernel that it runs on.

    ``commit`` is "unknown" where the build was not told it (`make develop`, `pip install` of a folder), and ends with
    "-dirty" where the tree had changes that no commit has.
    """
    commit, target, features, optimised = _core.built()
    if ".abi3." in Path(_core.__file__).name:
        features = ["abi3", *features]
    return {
        "version": _core.__version__,
        "commit": commit,
        "features": features if optimised else [*features, "debug"],
        "target": target,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "kernel": platform.release(),
        "patch": _patch_version(),
    }


def described() -> str:
    """`build` for people: four lines, and the first is ``penstock VERSION``."""
    found = build()
    return "\n".join(
        [
            f"penstock {found['version']}",
            f"commit {found['commit']}",
            f"features {', '.join(found['features'])}; PENSTOCK_PATCH "
            + (f"read by penstock-patch {found['patch']}" if found["patch"] else "not read (no penstock-patch)"),
            f"platform {found['target']}, {found['python']}, {found['libc']}, Linux {found['kernel']}",
        ]
    )


def _patch_version() -> str | None:
    """The version of penstock-patch, if it is installed."""
    try:
        return metadata.version("penstock-patch")
    except metadata.PackageNotFoundError:
        return None


def unread_patch_variable() -> str | None:
    """The reason that ``PENSTOCK_PATCH`` has no effect here, and the cure; None if it has one, or is not set."""
    value = os.environ.get("PENSTOCK_PATCH", "0")
    if value in ("", "0") or "_penstock_patch" in sys.modules:
        return None
    if find_spec("_penstock_patch") is None:
        return (
            f"PENSTOCK_PATCH={value} has no effect: the package that reads it is not installed. Install it "
            "(pip install 'penstock[patch]'), or start the program with python -m penstock.run"
        )
    return (
        f"PENSTOCK_PATCH={value} has no effect: this interpreter did not read penstock_patch.pth (python -S, or not in "
        "its site-packages). Call penstock.patch(), or start the program with python -m penstock.run"
    )

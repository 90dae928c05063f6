"""A hook of hatchling: penstock-patch depends on the penstock that has its own version, and on no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameVersion(MetadataHookInterface):
    """Fills in `dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Raises OSError if this folder does not lie in the project, which has the version."""
        workspace = (Path(self.root).parent / "Cargo.toml").read_text()
        version = re.search(r'(?m)^version = "([^"]+)"', workspace)
        assert version is not None, "Cargo.toml has no version"
        metadata["dependencies"] = [f"penstock=={version[1]}"]

"""The index beside the files that an engine has chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .._checkpoint import Checkpoint
from .._patience import patiently


def absent(files: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """Says of an index beside exactly these files which of its tensors none of them has.

    An index that does not parse says nothing here: engines read it themselves.

    Raises:
        StalledError: the file system hangs.
    """
    folders, names = {Path(file).parent for file in files}, {Path(file).name for file in files}
    if len(folders) != 1 or len(names) < 2:
        return []
    (folder,), found = folders, []
    for index in patiently(lambda: sorted(folder.glob("*.safetensors.index.json")), None, str(folder)):
        try:
            of = json.loads(patiently(index.read_bytes, None, str(index)))["weight_map"]
            lacking = sorted(of.keys() - checkpoint.keys()) if set(of.values()) == names else []
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if lacking:
            some = ", ".join(f"{name!r} ({of[name]})" for name in lacking[:5]) + (", ..." if len(lacking) > 5 else "")
            what = "1 tensor of the index is" if len(lacking) == 1 else f"{len(lacking)} tensors of the index are"
            found.append(f"{index}: {what} in no shard file, so this checkpoint lacks them: {some}")
    return found

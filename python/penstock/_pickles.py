"""Files of `torch.save`: the files of a folder that hold weights, and their tensors. No code in them is run.

The content of a file decides what it is, and not its name: pickles are called ``.safetensors`` and the other way round.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ._errors import InvalidError, NotFoundError, PenstockError, UnsupportedError
from ._paths import is_web

#: The names that `torch.save` of weights is given.
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: Names of weights in folders of transformers, diffusers and peft, in the order in which they are looked for.
_STEMS = ("pytorch_model", "diffusion_pytorch_model", "adapter_model")
#: State of a training, which no folder's weights are: of Trainer, Accelerate, DeepSpeed, FSDP.
_STATE = re.compile(
    r"(optim(izer)?|(lr_)?scheduler|scaler|rng_state|random_state|training_arg|trainer_state|sampler|dataloader"
    r"|dl_state|custom_checkpoint)s?(?![a-z]).*|.*(?<![a-z])optim(izers?)?(_states?)?\.\w+",
    re.IGNORECASE,
)
#: The number of a shard, and of how many.
_NUMBER = r"-\d+-of-\d+"
#: Where trainers keep the state dict in what they save.
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "params_ema", "params-ema", "params")
#: Names of ranks' parts of one model, with the same tensor names: Llama's own files, Megatron's, DeepSpeed's.
_OF_A_RANK = re.compile(r"consolidated\.\d+|mp_rank_\d+|.*(?<![a-z])rank[-_.]?\d+", re.IGNORECASE)
_HEAD = 64
#: The first torch whose ``torch.load(weights_only=True)`` runs nothing.
_SAFE = (2, 6)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts "shard-2" before "shard-10"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _start(file: Path) -> bytes:
    """The first bytes of a file; none if it is no file or cannot be read: opening it tells why."""
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as opened:
            return opened.read(_HEAD)
    except OSError:
        return b""


def _is_zip(start: bytes) -> bool:
    return start.startswith(b"PK\x03\x04")


def is_pickle(file: Path) -> bool:
    """Whether `torch.save` may have written the file: a zip archive, or before torch 1.6 several pickles."""
    start = _start(file)
    # The second: the number with which the old format begins, in protocol 0 and 1
    plain = len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5
    return _is_zip(start) or (plain and not _is_header(start)) or start.startswith(b"L119547037146038801333356L")


def _is_header(start: bytes) -> bool:
    """Whether a file begins as safetensors files do: with the length of a header, and its first brace."""
    return len(start) > 8 and start[8:].lstrip()[:1] == b"{" and int.from_bytes(start[:8], "little") <= 100_000_000


def is_misnamed(file: Path) -> bool:
    """Whether a safetensors file has the name of what `torch.save` writes."""
    return file.suffix in SUFFIXES and _is_header(_start(file))


def is_state(name: str) -> bool:
    """Whether a file that is called so holds the state of a training, and no weights."""
    return _STATE.fullmatch(name) is not None


def _seen(folder: Path, *suffixes: str) -> list[Path]:
    """Files in a folder with such endings, hidden ones and the state of a training left out, in natural order."""
    found = [path for path in folder.iterdir() if path.suffix in suffixes and not path.name.startswith(".")]
    return sorted((path for path in found if not is_state(path.name)), key=lambda path: _natural(path.name))


def _all(shards: list[Path]) -> list[Path]:
    """The same files.

    Raises:
        NotFoundError: by their names they are some of a set of shards, and others of it are not there.
        InvalidError: they are of several sets.
    """
    sets: dict[tuple[str, str, str], list[str]] = {}
    for path in shards:
        if found := re.fullmatch(r"(.*)-(\d+)-of-(\d+)(\..*)", path.name):
            sets.setdefault((found[1], found[3], found[4]), []).append(found[2])
    for (stem, count, ending), numbers in sets.items():
        there = set(map(int, numbers))
        first = 0 if 0 in there else 1
        width = len(numbers[0])
        # A count may be any number: no more names are made than are told
        gaps = (number for number in range(first, first + int(count)) if number not in there)
        missing = [f"{stem}-{number:0{width}}-of-{count}{ending}" for number in islice(gaps, 4)]
        if missing:
            names = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
            what = "this shard is" if len(missing) == 1 else "these shards are"
            folder = shards[0].parent
            raise NotFoundError(f"{what} missing in {folder}: {names}", path=str(folder / missing[0]))
    heads = [(stem, ending) for stem, _, ending in sets]
    if len(set(heads)) < len(heads):
        listed = ", ".join(f"{stem}-*-of-{count}{ending}" for stem, count, ending in sets)
        raise InvalidError(f"several sets of shards in this folder: {listed}", path=str(shards[0].parent))
    return shards


def _variant(folder: Path, stem: str, names: Mapping[str, Path]) -> list[Path]:
    """The files of the only variant, whole or in shards; empty if there is none."""
    variants: dict[str, list[Path]] = {}
    for name, path in names.items():
        if found := re.fullmatch(rf"{stem}(?:{_NUMBER})?\.([^.]+?)(?:{_NUMBER})?\.bin", name):
            variants.setdefault(found[1], []).append(path)
    if len(variants) > 1:
        listed = ", ".join(path.name for paths in variants.values() for path in paths)
        raise InvalidError(f"several variants in this folder: give one of them: {listed}", path=str(folder))
    for label, paths in variants.items():
        return [names[whole]] if (whole := f"{stem}.{label}.bin") in names else _all(paths)
    return []


def _of_folder(folder: Path) -> list[Path]:
    """The weights in a folder without safetensors files."""
    named = _seen(folder, ".safetensors")
    if named:
        return named if all(map(is_pickle, named)) else []
    names = {path.name: path for path in _seen(folder, *SUFFIXES)}
    for stem in _STEMS:
        if f"{stem}.bin" in names:
            return [names[f"{stem}.bin"]]
        index = folder / f"{stem}.bin.index.json"
        if index.is_file():
            return _of_index(index)
        shards = [path for name, path in names.items() if re.fullmatch(rf"{stem}{_NUMBER}\.bin", name)]
        if found := _all(shards) or _variant(folder, stem, names):
            return found
    for suffix in SUFFIXES:
        here = [path for path in names.values() if path.suffix == suffix and (is_pickle(path) or is_misnamed(path))]
        if here:
            return _all(here)
    others = [path.name for path in folder.iterdir() if path.suffix in SUFFIXES and path.name not in names]
    if others and not names:
        holds = "holds" if len(others) == 1 else "hold"
        what = f"no weights in this folder: {', '.join(sorted(others))} {holds} the state of a training"
        raise NotFoundError(what, path=str(folder))
    return list(names.values())


def _warn_of_others(folder: Path, taken: Sequence[Path]) -> None:
    """Names the weights in a folder that are not converted."""
    others = [path for path in _seen(folder, *SUFFIXES) if path not in taken and (is_pickle(path) or is_misnamed(path))]
    if taken and others:
        passed, names = ", ".join(path.name for path in others), ", ".join(path.name for path in taken)
        warnings.warn(
            f"{folder}: {passed} passed over, and {names} converted: give the files if others are meant",
            RuntimeWarning,
            stacklevel=5,
        )


def _of_index(index: Path) -> list[Path]:
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
        return [index.parent / name for name in sorted(shards, key=_natural)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidError(f"{index} is not an index of shards: {error}", path=str(index)) from None


def _cached(source: str) -> Path:
    """The path that a source stands for: of this machine, or in the Hub cache."""
    path = Path(source)
    if path.exists() or is_web(source):
        return path
    from . import _hub

    try:
        return _hub.find(source).path
    except PenstockError:
        return path  # opening it tells why


def weights(sources: Sequence[str]) -> list[Path]:
    """The files among the sources that `torch.save` wrote; empty where they are safetensors files.

    Raises:
        InvalidError: some are, and some are not.
        NotFoundError: a folder has nothing but the state of a training, or some shards of a set.
    """
    if any(map(is_web, sources)):
        return []
    found: list[Path] = []
    for source in sources:
        path = _cached(source)
        if path.is_dir():
            of_folder = _of_folder(path)
            _warn_of_others(path, of_folder)
            found += of_folder
        elif path.name.endswith(".bin.index.json"):
            found += _of_index(path)
        elif path.name.endswith(".index.json") and path.is_file():
            shards = _of_index(path)
            found += shards if any(map(is_pickle, shards)) else []
        else:
            found.append(path)
    pickles = [path for path in found if is_pickle(path) or (path.suffix in SUFFIXES and not path.exists())]
    others = [path for path in found if path not in pickles]
    if pickles and others:
        _tell(others)
        listed = ", ".join(path.name for path in others)
        raise InvalidError(f"torch.save wrote some of these files, and not {listed}: convert them one by one")
    return pickles


def misnamed(sources: Sequence[str]) -> list[str] | None:
    """The safetensors files that the sources stand for, if they have the names of what `torch.save` writes."""
    if any(map(is_web, sources)):
        return None
    found: list[Path] = []
    for path in map(_cached, sources):
        found += _of_folder(path) if path.is_dir() else [path]
    return [str(path) for path in found] if found and all(map(is_misnamed, found)) else None


def _tell(files: Sequence[Path]) -> None:
    """Raises what opening such a file says that it is: a pointer of Git LFS, a web page, and so on."""
    from . import _core

    for file in files:
        if not is_misnamed(file) and file.suffix in SUFFIXES:
            _core.Checkpoint.open([str(file)], None, None)


def _why(error: Exception) -> str:
    """The message of torch, without its advice to run the code in the file."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    way_out = (
        "nothing in the file is run. Where the model was made, save its tensors alone: "
        "torch.save(model.state_dict(), FILE)"
    )
    found = re.search(r"(?:Unsupported (?:class|global):? )?GLOBAL (\S+)|Unsupported class (\S+)", text)
    if found:
        return (
            f"torch.load(weights_only=True): it needs {(found[1] or found[2]).rstrip('.,')}, which is code; {way_out}"
        )
    if found := re.search(r"Unsupported operand \d+", text):
        return (
            f"torch.load(weights_only=True): {found[0]}: it is a pickle, of a later protocol than torch.save takes by "
            f"itself; {way_out}, without pickle_protocol="
        )
    if "weights_only" in text or "Weights only" in text or "WeightsUnpickler" in text:
        reason = re.search(r"WeightsUnpickler error: ([^\n]+)", text)
        what = reason[1] if reason else text.split("\n")[0].split(". ")[0]
        return f"torch.load(weights_only=True): {what}; {way_out}"
    return f"torch.load(weights_only=True): {text}"


def _load(file: Path) -> Any:
    """The content of the file; an archive is mapped, if the kernel does that."""
    import torch

    with file.open("rb") as opened:
        if _is_zip(_start(file)):
            # By a path without an ending: torch takes a file called .safetensors for one
            path = f"/proc/self/fd/{opened.fileno()}"
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, OSError) as error:
                if "mmap" not in str(error) and not isinstance(error, FileNotFoundError):
                    raise
        return torch.load(opened, map_location="cpu", weights_only=True)


def _check_version(version: str, file: Path) -> None:
    """Checks that ``torch.load(weights_only=True)`` of this torch runs nothing.

    Raises:
        UnsupportedError: it may, or the version cannot be read.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _SAFE:
        why = (
            f"torch.save wrote it, and torch {version} is not known to read it safely: before 2.6, "
            "torch.load(weights_only=True) can run code in a file (CVE-2025-32434). Update torch, for example in an "
            "environment of its own for this command"
        )
        raise UnsupportedError(why, path=str(file))


def of_a_rank(file: Path) -> bool:
    """Whether a file is called like the part of a model that one of several ranks has."""
    return _OF_A_RANK.match(file.name) is not None


def _inside(loaded: Mapping[Any, Any], file: Path) -> Mapping[Any, Any]:
    """The state dict in what a trainer saved: under one of the usual names, or the only one that is there."""
    import torch

    def is_state_dict(value: Any) -> bool:
        named = isinstance(value, Mapping) and bool(value)
        return named and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())

    dicts = [key for key, value in loaded.items() if is_state_dict(value)]
    usual = [key for key in _INSIDE if isinstance(loaded.get(key), Mapping)]
    if not usual and (len(dicts) != 1 or any(isinstance(value, torch.Tensor) for value in loaded.values())):
        return loaded
    taken = (usual or dicts)[0]
    if others := [str(key) for key in dicts if key != taken]:
        warnings.warn(
            f"{file}: the tensors in {taken!r} are converted, and those in {', '.join(map(repr, others))} passed over",
            RuntimeWarning,
            stacklevel=6,
        )
    found: Mapping[Any, Any] = loaded[taken]
    return found


def tensors_of(file: Path) -> Iterator[tuple[str, Any]]:
    """The tensors in a file that `torch.save` wrote, by name.

    Raises:
        NotFoundError: it is not there.
        InvalidError: it holds something else, or cannot be read without running code.
        UnsupportedError: torch is not installed, or so old that a file can run code.
    """
    try:
        import torch
    except ImportError:
        raise UnsupportedError("reading what torch.save wrote needs torch") from None
    _check_version(torch.__version__, file)
    if not file.exists():
        raise NotFoundError("this shard is missing", path=str(file))
    try:
        loaded = _load(file)
    except Exception as error:
        raise InvalidError(_why(error), path=str(file)) from None
    if isinstance(loaded, Mapping) and not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        loaded = _inside(loaded, file)
    if not isinstance(loaded, Mapping):
        raise InvalidError(f"it holds a {type(loaded).__name__}, not a dict of tensors", path=str(file))
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            what = f"{name} is a {type(tensor).__name__}, not a tensor"
            if isinstance(tensor, torch.Tensor):
                what = f"{name!r} is the name of a tensor, and not a string"
            raise InvalidError(f"{what}: give a file of tensors alone, by name", path=str(file), tensor=str(name))
        yield name, tensor.detach()


def not_here(source: str, error: PenstockError) -> PenstockError:
    """The error for a file or repository of a server that holds what `torch.save` wrote."""
    if "torch.save" not in str(error):
        return error
    why = "torch.save wrote it, and only local files of this kind can be converted: fetch it, and convert the copy"
    return type(error)(why, path=source)

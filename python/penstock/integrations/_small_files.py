"""The small files of a model that an engine gets: all that look like configuration or like a tokenizer's.

Some lie in folders: named templates for chats, what belongs to a processor, modules of sentence-transformers, packages
that Python files import. A file that no engine needs never ends a start: if it is too long, or no file can be called
so, it is passed over with a warning.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from .._errors import NotFoundError, UnsupportedError
from .._paths import without_secrets
from ._remote import checked_name

logger = logging.getLogger("penstock")

Names = Callable[[str], list[str]]
"""The names of the files in a folder of the model, or in itself (""). Those of folders in there end with a slash."""
Read = Callable[[Sequence[str]], list[bytes]]
"""All bytes of these files. UnsupportedError: one of them is too long."""

_ENDINGS = (
    ".json", ".jinja", ".model", ".tiktoken", ".txt", ".vocab", ".yaml", ".yml", ".bpe", ".codes", ".spm",
)  # fmt: skip
_CODE = ".py"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
#: Files that an engine reads by name. None may be missing: without one the engine may start as another model.
_NEEDED = re.compile(
    r"(config|params|generation_config|adapter_config|tekken|vocab|modules|added_tokens|special_tokens_map"
    r"|(tokenizer|processor|preprocessor|image_processor|video_preprocessor|video_processor|feature_extractor)(_config)?"
    r"|quantization_config|quantize_config|quant_config|hf_quant_config|config_sentence_transformers"
    r"|sentence_[a-z]+_config|.*\.safetensors\.index|chat_template)\.json"
    r"|(merges|vocab)\.txt|vocab\.bpe|.*\.(jinja|model|tiktoken|py)|tokenizer\..*"
)
#: Names further folders with configurations, of sentence-transformers models.
_MODULES = "modules.json"
#: The folder of transformers for chat templates that have names.
_TEMPLATES = "additional_chat_templates"
#: A model with one of these has a processor, whose parts may lie in folders. Nothing says what these are called: a part
#: is what has one of the others.
_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_OF_PARTS = (
    *_OF_PROCESSORS, "tokenizer_config.json", "tokenizer.json", "vocab.json", "vocab.txt",
    "image_processor_config.json", "video_preprocessor_config.json", "feature_extractor_config.json",
)  # fmt: skip
#: Folders of trainings have copies of all files of the model.
_NO_PARTS = ("checkpoint-",)
#: Folders that are looked into, at most.
_MOST_FOLDERS = 64
#: As transformers looks for the files that a file of Python needs.
_IMPORT = re.compile(r"^\s*(?:from\s+(\.+)([\w.]*)\s+import\b|import\s+(\.+)([\w.]+))", re.MULTILINE)
#: Folders of packages, at most: a file may import what is not there.
_MOST_PACKAGES = 64
_ASKED_TOGETHER = 8


def small_files(place: str, names: Names, read: Read, code: bool) -> dict[str, bytes]:
    """The files of the model at ``place`` that an engine may want, by their paths in it.

    Args:
        place: Its address, for messages.
        names: Lists a folder of it.
        read: Reads files of it.
        code: Whether Python files are among them.

    Raises:
        UnsupportedError: a file that engines need is too long.
        PenstockError: as ``names`` and ``read``.
    """

    def fetched(folder: str, wanted: Callable[[str], bool], there: Sequence[str] | None = None) -> dict[str, bytes]:
        there = names(folder) if there is None else there
        found = [name for name in there if name[-1:] != "/" and wanted(name) and _has_a_place(name, place)]
        return _read([f"{folder}/{name}" if folder else name for name in found], read, place)

    def is_wanted(name: str) -> bool:
        of_tokenizer = name.startswith("tokenizer.") and not name.endswith((_CODE, *_WEIGHTS))
        fits = name.endswith((*_ENDINGS, _CODE) if code else _ENDINGS) or of_tokenizer
        return fits and ".bin.index." not in name

    def one(folder: str) -> dict[str, bytes]:
        with suppress(NotFoundError):  # not every model has it, and a module may have nothing to configure
            return fetched(folder, is_wanted)
        return {}

    def part(folder: str) -> dict[str, bytes]:
        """The files of a folder, if it belongs to a processor."""
        with suppress(NotFoundError):
            there = names(folder)
            return fetched(folder, is_wanted, there) if any(name in there for name in _OF_PARTS) else {}
        return {}

    top = names("")
    files = fetched("", is_wanted, top)
    known = list(dict.fromkeys(_folders(files)))
    parts = _parts(top, files, known)
    with ThreadPoolExecutor(_ASKED_TOGETHER, "penstock-small-files") as together:
        for more in (*together.map(one, known), *together.map(part, parts)):
            files |= more
    if code:
        files |= _packages(files, lambda folder: fetched(folder, lambda name: name.endswith(_CODE)))
    return files


def _folders(files: Mapping[str, bytes]) -> Iterator[str]:
    """The folders that may have more of them."""
    yield from _modules(files.get(_MODULES, b"[]"))
    yield _TEMPLATES


def _parts(top: Sequence[str], files: Mapping[str, bytes], known: Sequence[str]) -> list[str]:
    """The folders that may have parts of a processor, if there is one."""
    if not any(name in files for name in _OF_PROCESSORS):
        return []
    folders = [name[:-1] for name in top if name.endswith("/") and not name.startswith((".", *_NO_PARTS))]
    found = [name for name in folders if name not in known]
    if found[_MOST_FOLDERS:]:
        first = ", ".join(found[_MOST_FOLDERS : _MOST_FOLDERS + 3])
        logger.warning(
            "penstock: %d folders are not looked into for parts of a processor, %s among them: the first %d are",
            len(found) - _MOST_FOLDERS, first, _MOST_FOLDERS,
        )  # fmt: skip
    return found[:_MOST_FOLDERS]


def _modules(modules: bytes) -> list[str]:
    """The folders of the modules that a sentence-transformers model has besides the first."""
    try:
        paths = [str(module["path"]) for module in json.loads(modules)]
    except (ValueError, TypeError, KeyError):
        return []  # the engine will say what is wrong with it
    return [path for path in paths if re.fullmatch(r"\w[\w.-]*", path)]


def _packages(files: Mapping[str, bytes], fetched: Callable[[str], dict[str, bytes]]) -> dict[str, bytes]:
    """The Python files in folders that these import, directly or not."""
    found: dict[str, bytes] = {}
    asked: set[str] = set()
    new = {path: text for path, text in files.items() if path.endswith(_CODE)}
    while new and len(asked) < _MOST_PACKAGES:
        imported = {folder for path, text in new.items() for folder in _imported(path, text)}
        new = {}
        for folder in sorted(imported - asked)[: _MOST_PACKAGES - len(asked)]:
            asked.add(folder)
            with suppress(NotFoundError):  # it is a module, not a package
                new |= fetched(folder)
        found |= new
    return found


def _imported(path: str, text: bytes) -> Iterable[str]:
    """The folders that the modules may be in which a file imports from beside itself."""
    here = path.split("/")[:-1]
    for match in _IMPORT.finditer(text.decode(errors="replace")):
        dots, module = match[1] or match[3], match[2] or match[4] or ""
        up = len(dots) - 1
        if up > len(here):
            continue
        base = here[: len(here) - up]
        parts = [part for part in module.split(".") if part]
        if base and not parts:
            yield "/".join(base)
        for count in range(1, len(parts) + 1):
            yield "/".join([*base, *parts[:count]])


def _has_a_place(name: str, place: str) -> bool:
    """Whether a file can be called so in a folder."""
    try:
        checked_name(name, place)
    except UnsupportedError:  # nor does an engine look for such a name
        _passed_over(name[:80], place, "no file can be called so")
        return False
    return True


def _read(paths: list[str], read: Read, place: str) -> dict[str, bytes]:
    if not paths:
        return {}
    with suppress(UnsupportedError):  # one of them is too long
        return dict(zip(paths, read(paths), strict=True))
    needed = [path for path in paths if _NEEDED.fullmatch(path.rpartition("/")[2])]
    files = dict(zip(needed, read(needed), strict=True))
    for path in paths:
        if path not in files:
            try:
                files[path] = read([path])[0]
            except UnsupportedError as error:
                _passed_over(path, place, error.message)
    return files


def _passed_over(name: str, place: str, why: str) -> None:
    logger.warning(
        "penstock: %r of %s is passed over, and engines do without it: %s", name, without_secrets(place), why
    )

"""Runs a program as ``__main__`` with safetensors patched: for `penstock.run`, which is ``__main__`` until then."""

from __future__ import annotations

import io
import runpy
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ["main"]

USAGE = "usage: python -m penstock.run [-m MODULE | SCRIPT | -] [ARGUMENT...]"
_WRONG, _ERROR = 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a program as ``__main__`` with safetensors patched; the patch is never undone.

    ``argv``: what follows ``python -m penstock.run`` (None: this process' own). Returns 0 at the end of the program, 2
    for wrong usage or a file that cannot be opened, and 3 if safetensors cannot be patched. What the program raises
    passes through, SystemExit included.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if not given or given == ["-m"] or (given[0][:1] == "-" and given[0] not in ("-m", "-")):
        sys.stderr.write(f"{USAGE}\n")
        return _WRONG
    from ._errors import PenstockError
    from ._patch import patch

    try:
        patch()
    except PenstockError as error:
        sys.stderr.write(f"penstock.run: {error}\n")
        return _ERROR
    program = ModuleType("__main__")
    program.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = program
    if given[0] == "-m":
        sys.argv[:] = ["-m", *given[2:]]  # runpy puts the module's file in place of the first
        return _run_module(given[1])
    sys.argv[:] = given
    name = given[0]
    path = name if name.startswith("/") else f"{Path.cwd()}/{name}"  # as Python has it: a/../b stays
    if name != "-" and (Path(name).is_dir() or zipfile.is_zipfile(name)):
        _first_on_path(path)
        return _run_module("__main__", alter_argv=False)
    return _run_script(program, "<stdin>" if name == "-" else path)


def _first_on_path(folder: str) -> None:
    """Replaces the working directory, which ``python -m`` has put first, except with ``python -P`` or ``-I``."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return
    sys.path[:1] = [folder]


def _run_module(name: str, alter_argv: bool = True) -> int:
    # Not public, but what ``python -m`` itself calls: `runpy.run_module` would take __main__ away again at the end,
    # while threads and exit handlers of the program still need it.
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    _as_without_us(lambda: run(name, alter_argv))
    return 0


def _run_script(program: ModuleType, path: str) -> int:
    if path == "<stdin>":
        source = sys.stdin.buffer.read()
        _first_on_path("")
    else:
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            sys.stderr.write(f"penstock.run: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
            return _WRONG
        _first_on_path(str(Path(path).resolve().parent))
        program.__file__ = path
    program.__loader__ = _loader(path)
    program.__dict__.setdefault("__annotations__", {})

    def run() -> None:
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
        exec(code, program.__dict__)

    _as_without_us(run)
    return 0


def _loader(path: str) -> Any:
    from importlib.machinery import BuiltinImporter, SourceFileLoader

    return BuiltinImporter if path == "<stdin>" else SourceFileLoader("__main__", path)


def _as_without_us(run: Any) -> None:
    """Calls a program. What it raises goes on to the interpreter, which shows it without the lines of this module."""
    try:
        run()
    except BaseException:
        # The hook is the program's, if it has set one. It sees the same traceback as without this module.
        shown = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            short = _without_us(trace)
            return shown(kind, error.with_traceback(short), short)

        sys.excepthook = hook
        raise


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that this module has called; `penstock.run` is below it."""
    ours = {__file__, str(Path(__file__).with_name("run.py"))}
    last, at = None, trace
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if name in ours:
            last = at
        elif "runpy" not in name:
            break
        at = at.tb_next
    return trace if last is None else last.tb_next

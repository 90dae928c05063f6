"""How the command line talks: columns that fit, colour where it helps, and a hint for a mistyped word."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NoReturn


def width() -> int | None:
    """Columns of the terminal, or those that COLUMNS asks for; None where the output goes to a file or a program."""
    if not os.environ.get("COLUMNS", "").isdecimal() and not sys.stdout.isatty():
        return None
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def shortened(text: str, room: int) -> str:
    """``text`` in at most ``room`` columns: the middle is left out, because paths and names differ at their ends."""
    if len(text) <= room:
        return text
    tail = max(room - room // 3 - 1, 1)
    return f"{text[: max(room - tail - 1, 0)]}…{text[-tail:]}"


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = (), narrow: int = 0) -> str:
    """Columns two spaces apart; those in ``right`` are aligned to the right.

    Where a terminal is too narrow, the cells of column ``narrow`` are shortened. A file or a pipe gets them whole.
    """
    lines = [list(row) for row in rows]
    if not lines:
        return ""
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    columns = width()
    if columns is not None:
        rest = sum(widths) - widths[narrow] + 2 * (len(widths) - 1)
        widths[narrow] = min(widths[narrow], max(columns - rest, 12))
        for row in lines:
            row[narrow] = shortened(row[narrow], widths[narrow])
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    )


def wrapped(text: str) -> str:
    """``text`` with its lines cut at words to fit the terminal; a line goes on below the second column of its first."""
    columns = width()
    if columns is None:
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) <= columns:
            lines.append(line)
            continue
        label = re.match(r" *(?:- )?(?:\S+(?: \S+)*  +)?", line)
        indent = len(label[0]) if label is not None else 0
        lines += textwrap.wrap(
            line,
            columns,
            subsequent_indent=" " * (indent if indent < columns // 2 else 4),
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
    return "\n".join(lines)


@cache
def _console() -> Any:
    """rich's console on standard output, if rich is installed and there is a terminal that shows colour."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.color_system is not None and not console.no_color else None


def styled(text: str, style: str) -> str:
    """``text`` in a style of rich ("bold", "green", "bold red"), where it can be shown; else as it is."""
    console = _console()
    if console is None:
        return text
    from rich.text import Text

    with console.capture() as captured:
        console.print(Text(text, style=style), end="", soft_wrap=True)
    found: str = captured.get()
    return found


def meant(word: str, known: Iterable[str]) -> str:
    """The question "Did you mean ...?" after a space, where a known word comes close to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f" Did you mean {close[0]}?" if close else ""


class WrongUsage(Exception):
    """Arguments that make no sense: the message, and in ``usage`` how the command is used."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class _Help(argparse.HelpFormatter):
    """Help whose descriptions may be lists: a line with a tab is a word and what it means, in two columns."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\t" not in text:
            return super()._fill_text(text, width, indent)
        column = min(self._max_help_position, width // 2)
        lines = []
        for line in text.splitlines():
            word, _, meaning = line.partition("\t")
            first, *rest = textwrap.wrap(meaning, max(width - column, 20), break_on_hyphens=False)
            head = f"{indent}{word}"
            lines += [f"{head:<{column}}{first}"] if len(head) + 2 <= column else [head, " " * column + first]
            lines += [" " * column + more for more in rest]
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """An argument parser that says what a mistyped command, option or choice was perhaps meant to be.

    A word that a command does not know is an error of that command, with its own usage.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Help, **more})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse. Raises WrongUsage."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            chosen = self._chosen(found)
            known = [word for word in chosen._option_string_actions if word.startswith("--")]
            hints = {meant(word.partition("=")[0], known) for word in rest if word.startswith("-")}
            chosen.error(f"unrecognized arguments: {' '.join(rest)}.{''.join(sorted(hints))}")
        return found

    def _chosen(self, found: argparse.Namespace) -> Parser:
        """The parser of the command, or of the command below it."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(str(getattr(found, action.dest, "")))
                if isinstance(chosen, Parser):
                    return chosen._chosen(found)
        return self

    def error(self, message: str) -> NoReturn:
        """Raises WrongUsage with ``message``, and a hint for a word that is not among the choices."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong is not None:
            message += "." * bool(hint := meant(wrong[1], re.findall(r"[\w.-]+", wrong[2]))) + hint
        raise WrongUsage(f"{self.prog}: error: {message}", self.format_usage())

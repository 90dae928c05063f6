"""tools/plain_words.py: documentation begins with the noun."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from textwrap import dedent

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
plain_words = importlib.import_module("plain_words")
sys.path.pop(0)

#: Texts that hide their noun, by tree. These numbers only fall: mend a text, and lower its number.
ALLOWED = {"core": 0, "python-crate": 0, "serve": 0, "package": 0}


@pytest.mark.parametrize("tree", plain_words.TREES)
def test_no_further_text_hides_its_noun(tree: str):
    found = plain_words.hidden(tree)
    listed = f"`python tools/plain_words.py {tree}` lists them"
    assert len(found) <= ALLOWED[tree], f"{len(found)} texts hide their noun, {ALLOWED[tree]} may: {listed}"
    assert len(found) == ALLOWED[tree], f"fewer texts hide their noun: lower the number of {tree} to {len(found)}"


def _begins(text: str) -> bool:
    return plain_words.Text(Path("x"), 1, text).hides_the_noun()


def test_a_text_hides_its_noun_if_it_begins_with_a_word_of_the_list():
    assert all(_begins(f"{word} comes of it.") for word in plain_words.WORDS)
    assert _begins("Of a shard: its name.") and _begins("What?")
    assert not any(map(_begins, ("Whether it ends.", "Where it ends.", "Offset of it.", "The part that is left.", "")))


def test_every_doc_comment_of_rust_is_one_text(tmp_path: Path):
    file = tmp_path / "a.rs"
    file.write_text(
        dedent("""\
        //! What it is for.
        //! More of that.

        /// Who calls.
        fn f() {
            // What no documentation shows
            //// What no documentation shows
            let a = "x"; /// Of no interest
        }
        /// A field.
        ///
        /// What it holds.
        ///
        /// # Errors
        /// Those of it.
        /// What a second line says.
        //! Those
    """)
    )
    assert [(text.line, text.text) for text in plain_words.rust_texts(file)] == [
        (1, "What it is for."),
        (4, "Who calls."),
        (10, "A field."),
        (15, "Those of it."),
        (17, "Those"),
    ]


def test_docstrings_strings_below_attributes_and_marked_comments_of_python_are_texts(tmp_path: Path):
    file = tmp_path / "a.py"
    file.write_text(
        dedent('''\
        """What it is for.

        More of that."""
        #: Who calls.
        #: More of that.
        a = "What no documentation shows"  # What no documentation shows
        """Those."""

        class B:
            """A class."""

            #: Of it.
            c: int = 1

            def d(self):
                """
                Which way.
                """
                return f"""What {a}"""
    ''')
    )
    texts = sorted((text.line, text.text) for text in plain_words.python_texts(file))
    assert texts == [
        (1, "What it is for."),
        (4, "Who calls."),
        (7, "Those."),
        (10, "A class."),
        (12, "Of it."),
        (16, "Which way."),
    ]


def test_the_command_lists_and_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    file = plain_words.ROOT / "crates/core/src/lib.rs"
    monkeypatch.setattr(plain_words, "texts", lambda tree: [plain_words.Text(file, 7, text) for text in ("A", "Of b")])
    assert plain_words.main(["--count"]) == 0
    assert capsys.readouterr().out == "core: 1\npython-crate: 1\nserve: 1\npackage: 1\n"
    assert plain_words.main(["core"]) == 0
    assert capsys.readouterr().out == "crates/core/src/lib.rs:7: Of b\n"
    with pytest.raises(SystemExit):
        plain_words.main(["nowhere"])

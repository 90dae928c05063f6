"""tools/product_lines.py: which lines of Rust and of Python count."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
product_lines = importlib.import_module("product_lines")
sys.path.pop(0)

RUST = {
    "comments and blank lines": (2, "// one\n\n//! two\nfn f() {} // three\n/// four\nfn g() {}\n/* five */\n"),
    "a block comment beside code": (2, "let a = 1; /* one\ntwo */ let b = 2;\n"),
    "block comments in each other": (1, "/* one /* two */\nstill */\nfn f() {}\n"),
    "slashes in strings": (3, 'let a = "http://a"; let b = "/*";\nlet c = 1;\nlet d = "*/";\n'),
    "a quote that is escaped": (2, r'let a = "\\\" // ";' + "\nlet b = 1;\n"),
    "a string of several lines": (3, 'let a = "one\n// two\n\nthree";\n'),
    "raw strings": (4, 'let a = r#"one " // two\n/* three\n"#;\nlet b = br"\\"; // four\n'),
    "characters and lifetimes": (
        3,
        "let a = ('\"', '\\'', b'/', '\\u{2f}');\nfn f<'a>(a: &'a str) {}\nlet b = '/';\n// '\n",
    ),
    "a module of tests": (
        2,
        "fn f() {}\n#[cfg(test)]\n#[allow(dead_code)]\nmod tests {\n    fn g() {}\n}\nfn h() {}\n",
    ),
    "what only tests have": (
        6,
        """
        #[cfg(test)]
        use a::{b, c};
        #[cfg(any(test, feature = "testing"))]
        pub(crate) fn f<A, B>() where A: C, B: C { g(); }
        struct S {
            kept: u8,
            #[cfg(test)]
            pub(crate) gone: Map<u8, u8>,
            also_kept: u8,
            #[cfg(all(test, not(loom)))]
            last: u8
        }
        #[cfg(test)]
        const C: [u8; 2] = { [1, 2] };
        fn kept() {
            #[cfg(test)]
            if a { b() } else { c() }
        }
        #[cfg(test)]
        thread_local! { static T: u8 = 1; }
        """,
    ),
    "arms of a match": (4, "match a {\n    #[cfg(test)]\n    A { .. } => b,\n    B => c,\n}\nfn f() {}\n"),
    "what products have": (
        9,
        """
        #[cfg(not(test))]
        fn a() {}
        #[cfg(feature = "remote")]
        mod b {}
        #[cfg(any(test, debug_assertions))]
        fn c() {}
        #[cfg_attr(test, allow(dead_code))]
        #[cfg(all(not(loom), unix))]
        fn d() {}
        """,
    ),
    "a file of tests": (0, "#![cfg(test)]\nfn f() {}\n"),
}

PYTHON = {
    "comments and blank lines": (2, "# one\n\na = 1  # two\nb = 2\n"),
    "docstrings": (
        4,
        '"""One.\n\nTwo.\n"""\nclass A:\n    """Three."""\n\n    b: int\n    """Four."""\n\n    def c(self):\n'
        '        "Five"\n        return 6\n',
    ),
    "strings with a hash": (2, "a = '# one'\nb = '''# two'''\n"),
    "a string of several lines": (3, 'a = """one\n# two\n\nthree"""\n'),
    "an f-string of several lines": (3, 'a = f"""one\n{b}\n\nthree"""\n'),
    "a docstring and code in one line": (1, 'def f(): "ä"; return "b"\n'),
    "a docstring in parts": (2, 'def f():\n    "one" \\\n    "two"\n    return 1\n'),
    "a call of several lines": (3, "f(\n    # one\n    a,\n\n)\n"),
}


@pytest.mark.parametrize("what", RUST)
def test_lines_of_rust(what):
    expected, text = RUST[what]
    assert product_lines.rust(dedent(text)).lines == expected


@pytest.mark.parametrize("what", PYTHON)
def test_lines_of_python(what):
    expected, text = PYTHON[what]
    assert product_lines.python(text) == expected


def test_a_crate_is_what_its_root_reaches():
    files = {
        "c/src/lib.rs": "mod a;\n#[cfg(test)]\nmod tests;\npub mod b;\n",
        "c/src/a.rs": "mod c;\n",
        "c/src/a/c.rs": "fn f() {}\n",
        "c/src/b/mod.rs": "mod d;\n#[cfg(all(test, not(loom)))]\nmod simulator;\n",
        "c/src/b/d.rs": "fn f() {}\nfn g() {}\n",
        "c/src/b/simulator/mod.rs": "mod e;\n",
        "c/src/b/simulator/e.rs": "fn f() {}\n",
        "c/src/tests.rs": "fn f() {}\n",
    }
    reached = product_lines.crate(files, "c/src/lib.rs")
    assert reached == {f"c/src/{name}.rs": n for name, n in {"lib": 2, "a": 1, "a/c": 1, "b/mod": 1, "b/d": 2}.items()}
    with pytest.raises(ValueError, match=r"a\.rs: mod c is in no file"):
        product_lines.crate({name: text for name, text in files.items() if name != "c/src/a/c.rs"}, "c/src/lib.rs")


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_revisions_are_compared(tmp_path, monkeypatch, capsys):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, stdout=subprocess.PIPE)

    write("crates/core/src/lib.rs", "mod plan;\n")
    write("crates/core/src/plan/mod.rs", "fn f() {}\n")
    write("crates/fakegpu/src/lib.rs", "fn f() {}\n")
    write("python/penstock/_load.py", "a = 1\n")
    write("python/penstock/bench/rounds.py", "a = 1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "a")
    write("crates/core/src/plan/mod.rs", "fn f() {}\n" * 1200)
    write("python/penstock/compat/new.py", "a = 1\n")
    (tmp_path / "python/penstock/_load.py").unlink()

    monkeypatch.setattr(product_lines, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["product_lines.py", "--against", "HEAD"])
    assert product_lines.main() == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["folder", "HEAD", "working", "tree", "difference"],
        ["crates/core/src", "1", "1", "+0"],
        ["crates/core/src/plan", "1", "1,200", "+1,199"],
        ["Rust", "2", "1,201", "+1,199"],
        [],
        ["python/penstock", "1", "0", "-1"],
        ["python/penstock/compat", "0", "1", "+1"],
        ["Python", "1", "1", "+0"],
    ]
    monkeypatch.setattr(sys, "argv", ["product_lines.py", "--at", "HEAD"])
    assert product_lines.main() == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["Python", "1"]

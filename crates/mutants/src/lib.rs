//! Mistakes that are seeded into a copy of a source file, so that a simulator shows that it catches each.
//!
//! The file itself has the logic alone. A table beside the simulator lists the mistakes:
//!
//! ```text
//! # The window of a stream.
//!
//! IgnoreDepth
//! - TakesSlab::AtRequest => «self.reads < self.bounds.depth»,
//! + true
//! ```
//!
//! The first line is the name. Lines with `-` are text of the file, and what stands in « » is replaced by the lines with `+`:
//! an expression, whole statements, or nothing (then the lines with `+` are added there). White space does not count, comments
//! do. A name may come several times: one mistake at several places. Several mistakes may replace the same text.
//!
//! A text that the file does not have exactly once is an error of the compiler. Each replaced text becomes
//! `if Mutant::Name.is_committed() { mistake } else { text }`. So the copy is the file as long as no mistake is committed.

use proc_macro::{TokenStream, TokenTree};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// `seed!(Mutant, "src/source.rs", "src/mutants.txt")`, in a module with `use super::*`: an enum of the mistakes, and the copy
/// of the file's first `pub(crate) struct` and all that follows it, except the tests.
#[proc_macro]
pub fn seed(input: TokenStream) -> TokenStream {
    let words: Vec<String> = input
        .into_iter()
        .filter(|token| !matches!(token, TokenTree::Punct(_)))
        .map(|token| token.to_string().trim_matches('"').to_owned())
        .collect();
    let code = match &words[..] {
        [name, source, table] => expand(name, source, table),
        _ => Err("expected a name, a source file and a table".to_owned()),
    };
    let code = code.unwrap_or_else(|error| format!("compile_error!({error:?});"));
    code.parse().expect("what was Rust is Rust")
}

/// A mistake at one place.
#[derive(Debug, Default)]
struct Site {
    mutant: String,
    /// Text of the file, with « » around what is replaced.
    text: String,
    mistake: String,
}

fn expand(name: &str, source: &str, table: &str) -> Result<String, String> {
    let root = std::env::var("CARGO_MANIFEST_DIR").map_err(|error| error.to_string())?;
    let path = |file: &str| Path::new(&root).join(file).display().to_string();
    let read = |file: &str| std::fs::read_to_string(path(file)).map_err(|error| format!("{file}: {error}"));
    let (code, listed) = (read(source)?, read(table)?);
    let sites = sites(&listed);
    let copy = seeded(name, logic(&code), &sites).map_err(|error| format!("{table}: {error} in {source}"))?;
    let mut names: Vec<&str> = Vec::new();
    for site in &sites {
        if !names.contains(&site.mutant.as_str()) {
            names.push(&site.mutant);
        }
    }
    let list = names.join(", ");
    let all: String = names.iter().map(|mutant| format!("{name}::{mutant}, ")).collect();
    Ok(format!(
        "/// One mistake.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum {name} {{ {list} }}
        thread_local! {{
            static COMMITTED: std::cell::Cell<Option<{name}>> = const {{ std::cell::Cell::new(None) }};
        }}
        impl {name} {{
            pub(crate) const ALL: &[{name}] = &[{all}];
            /// From now on, this thread makes this mistake or none.
            pub(crate) fn commit(mutant: Option<{name}>) {{ COMMITTED.set(mutant); }}
            fn is_committed(self) -> bool {{ COMMITTED.get() == Some(self) }}
        }}
        // Another table or file is compiled anew.
        const _: (&str, &str) = (include_str!({:?}), include_str!({:?}));
        {copy}",
        path(source),
        path(table),
    ))
}

/// The first `pub(crate) struct` of a file, with its attributes, and all that follows it, except the tests.
fn logic(code: &str) -> &str {
    let structure = code.find("\npub(crate) struct ").unwrap_or(0);
    let start = code[..structure].rfind("\n\n").unwrap_or(0);
    let end = code[structure..].find("\n#[cfg(test)]").map_or(code.len(), |at| structure + at);
    &code[start..end]
}

/// The entries of a table.
fn sites(table: &str) -> Vec<Site> {
    let mut sites: Vec<Site> = Vec::new();
    for line in table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match (sites.last_mut(), line.strip_prefix("- "), line.strip_prefix("+ ")) {
            (Some(site), Some(text), _) => site.text += &format!("{text}\n"),
            (Some(site), _, Some(mistake)) => site.mistake += &format!("{mistake}\n"),
            _ => sites.push(Site { mutant: line.to_owned(), ..Site::default() }),
        }
    }
    sites
}

/// The code with these mistakes, none of which is committed yet.
fn seeded(name: &str, code: &str, sites: &[Site]) -> Result<String, String> {
    let mut at: BTreeMap<(usize, usize), Vec<&Site>> = BTreeMap::new();
    for site in sites {
        let found = places(code, &site.text).ok_or(format!("{} needs one « and one »", site.mutant))?;
        let [place] = &found[..] else {
            return Err(format!("the text of {} stands {} times", site.mutant, found.len()));
        };
        at.entry((place.start, place.end)).or_default().push(site);
    }
    let (mut copy, mut done) = (String::new(), 0);
    for ((start, end), sites) in at {
        if start < done {
            return Err(format!("the text of {} overlaps another one", sites[0].mutant));
        }
        let text = &code[start..end];
        let expression = !text.is_empty() && !text.ends_with(';');
        copy += &code[done..start];
        copy += if expression { "(" } else { "" };
        for Site { mutant, mistake, .. } in sites {
            copy += &format!("if {name}::{mutant}.is_committed() {{ {mistake} }} else ");
        }
        copy += &format!("{{ {text} }}");
        copy += if expression { ")" } else { "" };
        done = end;
    }
    Ok(copy + &code[done..])
}

/// The places of the code where this text stands: of the part between « and ».
fn places(code: &str, text: &str) -> Option<Vec<Range<usize>>> {
    let (before, rest) = text.split_once('«')?;
    let (replaced, after) = rest.split_once('»').filter(|(_, after)| !after.contains(['«', '»']))?;
    let place = |from: usize| {
        let start = behind(code, from, before)?;
        // What is replaced begins with its first letter.
        let start = start + code[start..].len() - code[start..].trim_start().len();
        let end = behind(code, start, replaced)?;
        behind(code, end, after).map(|_| start..end)
    };
    // Each place is found once: at the first letter.
    let letters = code.char_indices().filter(|(_, letter)| !letter.is_whitespace());
    Some(letters.filter_map(|(from, _)| place(from)).collect())
}

/// Where the text ends that begins at `from`. White space does not count.
fn behind(code: &str, from: usize, text: &str) -> Option<usize> {
    text.split_whitespace().try_fold(from, |at, word| {
        let rest = code[at..].trim_start();
        rest.starts_with(word).then(|| code.len() - rest.len() + word.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "fn f(&mut self) {\n    if self.a < 2\n        && self.b {\n        self.c = 1;\n    }\n}\n";

    fn copy(table: &str) -> Result<String, String> {
        seeded("M", CODE, &sites(table))
    }

    #[test]
    fn the_copy_is_the_code_while_no_mistake_is_committed() {
        let table = "Less\n- if «self.a < 2» && self.b\n+ self.a < 3\n\nNever\n- if «self.a < 2» &&\n+ false\n\n\
                     # Nothing\nTwice\n- «self.c = 1;»\n\nMore\n- self.c = 1;«» }\n+ self.d();\n+ self.e();\n";
        let copy = copy(table).expect("a copy");
        let words: Vec<&str> = copy.split_whitespace().collect();
        assert_eq!(
            words.join(" "),
            "fn f(&mut self) { if (if M::Less.is_committed() { self.a < 3 } else if M::Never.is_committed() { false } \
             else { self.a < 2 }) && self.b { if M::Twice.is_committed() { } else { self.c = 1; } \
             if M::More.is_committed() { self.d(); self.e(); } else { }} }"
        );
    }

    #[test]
    fn a_text_that_stands_nowhere_or_twice_or_overlaps_another_one_is_refused() {
        let refused = |table: &str| copy(table).expect_err("no copy");
        assert_eq!(refused("A\n- «self.x»\n"), "the text of A stands 0 times");
        assert_eq!(refused("A\n- «self.»\n"), "the text of A stands 3 times");
        assert_eq!(refused("A\n- self.a\n"), "A needs one « and one »");
        assert_eq!(refused("A\n- «self.a < 2»\nB\n- «2 && self.b»\n"), "the text of B overlaps another one");
    }

    #[test]
    fn the_logic_is_the_first_structure_that_the_crate_sees_and_what_follows_it() {
        let code = "use a;\n\nstruct A;\n\n/// About.\n#[derive(B)]\npub(crate) struct C;\n\nfn d() {}\n\n#[cfg(test)]\nmod t;\n";
        assert_eq!(logic(code).trim(), "/// About.\n#[derive(B)]\npub(crate) struct C;\n\nfn d() {}");
    }
}

//! AWS's configuration files: the credentials file, and the one with profiles and sections of services. Read as botocore reads
//! them.

use crate::store::remote::environment::Environment;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Keys and values of a section. The value of a key with indented lines begins with a newline.
pub(super) type Values = BTreeMap<String, String>;

/// Both files.
pub(super) struct AwsFiles {
    credentials: Vec<(String, Values)>,
    config: Vec<(String, Values)>,
    /// Where they were looked for, and the variables that say so.
    pub(super) paths: Vec<String>,
}

/// The values of one profile.
pub(super) struct ProfileValues {
    /// Values of the credentials file.
    pub(super) credentials: Values,
    /// Values of the configuration file.
    pub(super) config: Values,
    /// Whether one of them has the profile.
    pub(super) is_there: bool,
}

impl AwsFiles {
    /// A file that cannot be read counts as missing, as for the tools of AWS.
    pub(super) fn read(environment: &Environment) -> AwsFiles {
        let file = |variable: &str, usual: &str| {
            let home = environment.get("HOME");
            match environment.get(variable) {
                Some(path) => Some(expanded(path, home)),
                None => home.map(|home| Path::new(home).join(".aws").join(usual)),
            }
        };
        let (credentials, config) =
            (file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), file("AWS_CONFIG_FILE", "config"));
        let sections = |path: &Option<PathBuf>| {
            let bytes = path.as_ref().and_then(|path| std::fs::read(path).ok()).unwrap_or_default();
            sections(&String::from_utf8_lossy(&bytes))
        };
        AwsFiles {
            credentials: sections(&credentials),
            config: sections(&config),
            paths: [(credentials, "AWS_SHARED_CREDENTIALS_FILE"), (config, "AWS_CONFIG_FILE")]
                .into_iter()
                .filter_map(|(path, variable)| {
                    let by = environment.get(variable).map_or_else(String::new, |_| format!(" ({variable})"));
                    Some(format!("{}{by}", path?.display()))
                })
                .collect(),
        }
    }

    pub(super) fn profile(&self, name: &str) -> ProfileValues {
        let credentials = joined(self.credentials.iter().filter(|(header, _)| header == name));
        let config = joined(self.config.iter().filter(|(header, _)| {
            named(header, "profile").is_some_and(|found| found == name) || (name == "default" && header == name)
        }));
        let is_there = credentials.is_some() || config.is_some();
        ProfileValues { credentials: credentials.unwrap_or_default(), config: config.unwrap_or_default(), is_there }
    }

    /// The section of services that a profile names.
    pub(super) fn services(&self, name: &str) -> Option<Values> {
        joined(self.config.iter().filter(|(header, _)| named(header, "services").is_some_and(|found| found == name)))
    }
}

impl ProfileValues {
    /// A value; that of the credentials file goes first.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let of = |values: &'_ Values| values.contains_key(key);
        let values = if of(&self.credentials) { &self.credentials } else { &self.config };
        value(values, key)
    }

    /// A value that is indented below a key.
    pub(super) fn nested(&self, key: &str, below: &str) -> Option<&str> {
        let text = self.credentials.get(key).or(self.config.get(key))?;
        nested(text, below)
    }
}

pub(super) fn value<'a>(values: &'a Values, key: &str) -> Option<&'a str> {
    values.get(key).map(String::as_str).filter(|value| !value.is_empty())
}

/// The value of a key in indented lines.
pub(super) fn nested<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let lines = text.strip_prefix('\n')?.lines().filter_map(|line| line.split_once('='));
    let mut lines = lines.rev();
    let found = lines.find(|(name, _)| name.trim() == key);
    found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
}

/// A path with `~` and variables in it, as botocore takes it.
fn expanded(path: &str, home: Option<&str>) -> PathBuf {
    let mut text = String::new();
    let mut rest = path;
    while let Some((before, after)) = rest.split_once('$') {
        text += before;
        let (name, behind) = match after.strip_prefix('{').and_then(|inside| inside.split_once('}')) {
            Some(found) => found,
            None => after.split_at(after.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(after.len())),
        };
        match std::env::var(name) {
            Ok(value) if !name.is_empty() => text += &value,
            _ => text += &rest[before.len()..rest.len() - behind.len()],
        }
        rest = behind;
    }
    text += rest;
    match (text.strip_prefix('~'), home) {
        (Some(rest), Some(home)) if rest.is_empty() || rest.starts_with('/') => PathBuf::from(format!("{home}{rest}")),
        _ => PathBuf::from(text),
    }
}

/// The sections of a file, in its order.
fn sections(text: &str) -> Vec<(String, Values)> {
    let mut found: Vec<(String, Values)> = Vec::new();
    // The key of the last line, and how far that was indented.
    let mut last: Option<(String, usize)> = None;
    for line in text.trim_start_matches('\u{feff}').lines() {
        let inner = line.trim();
        if inner.is_empty() || inner.starts_with(['#', ';']) {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let section = found.last_mut().map(|(_, values)| values);
        if let (Some(values), Some((key, outer))) = (section, &last) {
            if indent > *outer {
                let value = values.entry(key.clone()).or_default();
                value.push('\n');
                value.push_str(inner);
                continue;
            }
        }
        let header = inner.strip_prefix('[').and_then(|rest| rest.rsplit_once(']'));
        if let Some((header, _)) = header.filter(|(header, _)| !header.is_empty()) {
            found.push((header.to_owned(), Values::new()));
            last = None;
        } else if let (Some((_, values)), Some((key, value))) = (found.last_mut(), inner.split_once(['=', ':'])) {
            let key = key.trim().to_ascii_lowercase();
            values.insert(key.clone(), value.trim().to_owned());
            last = Some((key, indent));
        }
    }
    found
}

fn joined<'a>(sections: impl Iterator<Item = &'a (String, Values)>) -> Option<Values> {
    let mut found: Option<Values> = None;
    for (_, values) in sections {
        found.get_or_insert_default().extend(values.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    found
}

/// The name in a header of this kind: `profile NAME`, perhaps in quotes.
fn named(header: &str, kind: &str) -> Option<String> {
    let words = words(header)?;
    match &words[..] {
        [first, name] if first == kind => Some(name.clone()),
        _ => None,
    }
}

/// The words of a text, as a shell takes it apart; `None` if a quote has no end.
fn words(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next()? {
                        end if end == letter => break,
                        '\\' if letter == '"' => match letters.next()? {
                            escaped @ ('"' | '\\') => word.push(escaped),
                            other => word.extend(['\\', other]),
                        },
                        inner => word.push(inner),
                    }
                }
            }
            '\\' => word.get_or_insert_default().push(letters.next()?),
            space if space.is_whitespace() => words.extend(word.take()),
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Some(words)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_words_of_a_shell() {
        for (header, expected) in [
            ("profile work", Some("work")),
            ("profile \"my work\"", Some("my work")),
            ("profile 'my work'", Some("my work")),
            ("profile\tmy\\ work", Some("my work")),
            ("profile \"a\\\"b\"", Some("a\"b")),
            ("profile my work", None),
            ("profile \"open", None),
            ("profiles work", None),
            ("work", None),
        ] {
            assert_eq!(named(header, "profile").as_deref(), expected, "{header}");
        }
    }

    #[test]
    fn lines_that_are_indented_belong_to_the_key_above() {
        let text =
            "\u{feff}# no\n[profile a]\nRegion: r-1\ns3 =\n  addressing_style = path\n  # no\n  endpoint_url=x\n\
                    output = json\n[services b] # no\n s3 =\n   endpoint_url = http://h:1/?a=b\n";
        let found = sections(text);
        assert_eq!(found[0].1["region"], "r-1");
        assert_eq!(found[0].1["output"], "json");
        assert_eq!(nested(&found[0].1["s3"], "addressing_style"), Some("path"));
        assert_eq!((&*found[1].0, nested(&found[1].1["s3"], "endpoint_url")), ("services b", Some("http://h:1/?a=b")));
        assert_eq!(nested("region = no", "region"), None);
    }

    #[test]
    fn paths_begin_at_home() {
        for (path, expected) in
            [("~/x", "/h/x"), ("~", "/h"), ("~other/x", "~other/x"), ("/a/~", "/a/~"), ("$NO_SUCH_/x$", "$NO_SUCH_/x$")]
        {
            assert_eq!(expanded(path, Some("/h")), PathBuf::from(expected));
        }
        let cargo = std::env::var("CARGO_MANIFEST_DIR").unwrap();
        for path in ["$CARGO_MANIFEST_DIR/x", "${CARGO_MANIFEST_DIR}/x"] {
            assert_eq!(expanded(path, None), Path::new(&cargo).join("x"));
        }
    }
}

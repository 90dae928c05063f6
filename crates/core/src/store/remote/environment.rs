//! Environment variables for the tools of one provider.

use std::collections::BTreeMap;
use std::fmt;

/// Some variables, as they were when a checkpoint was opened.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct Environment(BTreeMap<String, String>);

impl Environment {
    /// These variables of this process. Bytes that are no UTF-8 are replaced, so that an error can name the variable.
    pub(super) fn of_process(names: &[&str]) -> Environment {
        let value = |name: &&str| {
            let value = std::env::var_os(name)?;
            Some(((*name).to_owned(), meant(&value.to_string_lossy()).to_owned()))
        };
        Environment(names.iter().filter_map(value).collect())
    }

    #[cfg(test)]
    pub(super) fn of(values: &[(&str, &str)]) -> Environment {
        Environment(values.iter().map(|(name, value)| ((*name).to_owned(), meant(value).to_owned())).collect())
    }

    /// The first of these that is set, and its name. An empty variable is not set.
    pub(super) fn named(&self, names: &[&'static str]) -> Option<(&'static str, &str)> {
        names.iter().find_map(|name| self.get(name).map(|value| (*name, value)))
    }

    /// The first of these that is set.
    pub(super) fn first(&self, names: &[&'static str]) -> Option<&str> {
        self.named(names).map(|(_, value)| value)
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Whether it says yes, as the tools of AWS understand it.
    pub(super) fn is_true(&self, name: &str) -> bool {
        self.get(name).is_some_and(is_true)
    }
}

/// Whether a value says yes, as the tools of AWS understand it.
pub(in crate::store::remote) fn is_true(value: &str) -> bool {
    value.eq_ignore_ascii_case("true")
}

/// A value without space and quotes around it. A newline at its end comes from `echo` into a secret of Kubernetes,
/// quotes from a file of variables (`docker run --env-file`), which no shell has read.
pub(in crate::store::remote) fn meant(value: &str) -> &str {
    let value = value.trim();
    let inside = |quote: char| value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    inside('"').or_else(|| inside('\'')).map_or(value, str::trim)
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_value_means() {
        for (value, expected) in [
            ("us-east-1\n", "us-east-1"),
            (" \"us-east-1\"\r\n", "us-east-1"),
            ("'a b'", "a b"),
            ("\"", "\""),
            ("\"a'", "\"a'"),
            ("\"\"", ""),
            (" ", ""),
        ] {
            assert_eq!(meant(value), expected, "{value:?}");
        }
        let environment = Environment::of(&[("A", " \n"), ("B", "b"), ("C", "TRUE")]);
        assert_eq!(environment.named(&["A", "B"]), Some(("B", "b")));
        assert_eq!(
            (environment.is_true("C"), environment.is_true("A"), environment.is_true("D")),
            (true, false, false)
        );
    }
}

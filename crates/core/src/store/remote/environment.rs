//! What of the environment is meant for the tools of one provider.

use std::collections::BTreeMap;
use std::fmt;

/// Some variables, as they were when a checkpoint was opened.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct Environment(BTreeMap<String, String>);

impl Environment {
    /// These variables of this process.
    pub(super) fn of_process(names: &[&str]) -> Environment {
        let value = |name: &&str| Some(((*name).to_owned(), std::env::var(name).ok()?));
        Environment(names.iter().filter_map(value).collect())
    }

    #[cfg(test)]
    pub(super) fn of(values: &[(&str, &str)]) -> Environment {
        Environment(values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    /// The first of these that is set.
    pub(super) fn first(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.0.get(*name)).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.first(&[name])
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

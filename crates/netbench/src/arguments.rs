//! Command lines: values, and options of one value each.

use std::collections::HashMap;
use std::str::FromStr;

#[derive(Default)]
pub(crate) struct Arguments {
    pub(crate) values: Vec<String>,
    options: HashMap<String, String>,
}

impl Arguments {
    pub(crate) fn parse(given: impl Iterator<Item = String>) -> Result<Arguments, String> {
        let (mut found, mut given) = (Arguments::default(), given);
        while let Some(one) = given.next() {
            match one.strip_prefix("--") {
                Some(name) => {
                    let value = given.next().ok_or_else(|| format!("--{name} wants a value"))?;
                    found.options.insert(name.to_owned(), value);
                }
                None => found.values.push(one),
            }
        }
        Ok(found)
    }

    /// Says which option is none of these.
    pub(crate) fn known(&self, names: &[&str]) -> Result<(), String> {
        match self.options.keys().find(|name| !names.contains(&name.as_str())) {
            Some(name) => Err(format!("no such option: --{name} (there are {})", names.join(", "))),
            None => Ok(()),
        }
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.options.get(name).map(String::as_str)
    }

    /// A number, or what it is without the option.
    pub(crate) fn number<T: FromStr>(&self, name: &str, otherwise: T) -> Result<T, String> {
        let Some(text) = self.options.get(name) else { return Ok(otherwise) };
        text.parse().map_err(|_| format!("--{name}: {text:?} is no such number"))
    }
}

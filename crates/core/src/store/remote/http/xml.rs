//! As much of XML as object stores write. A key may have letters that XML forbids, so references to controls are read too.

use std::borrow::Cow;

/// The reason a text is no XML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store::remote) enum NoXml {
    /// It is something else.
    Other,
    /// It ends before its root element does.
    BreaksOff,
}

/// An element at its end.
pub(in crate::store::remote) struct Element<'a> {
    /// The names from the root to this element, without prefixes.
    pub(in crate::store::remote) path: Vec<&'a str>,
    /// Its attributes, as they are written.
    pub(in crate::store::remote) attributes: &'a str,
    /// Its text, for an element without others in it.
    pub(in crate::store::remote) text: String,
}

/// The name of the root element. `take` gets each element when it ends, the inner ones first.
pub(in crate::store::remote) fn read<'a>(text: &'a str, mut take: impl FnMut(Element<'a>)) -> Result<&'a str, NoXml> {
    let mut rest = text.trim_start_matches('\u{feff}');
    let mut open: Vec<(&str, &str)> = Vec::new();
    let mut content = String::new();
    loop {
        let Some(at) = rest.find('<') else {
            return Err(if open.is_empty() && !rest.trim().is_empty() { NoXml::Other } else { NoXml::BreaksOff });
        };
        let (before, tag) = rest.split_at(at);
        if open.is_empty() && !before.trim().is_empty() {
            return Err(NoXml::Other);
        }
        content += &unescaped(before);
        let behind = |start: usize, end: &str| {
            let found = tag[start..].find(end).map(|at| (&tag[start..start + at], &tag[start + at + end.len()..]));
            found.ok_or(NoXml::BreaksOff)
        };
        let mut ends = false;
        if tag.starts_with("<?") {
            rest = behind(2, "?>")?.1;
        } else if tag.starts_with("<!--") {
            rest = behind(4, "-->")?.1;
        } else if tag.starts_with("<![CDATA[") {
            let (raw, after) = behind(9, "]]>")?;
            content += raw;
            rest = after;
        } else if tag.starts_with("<!") {
            rest = behind(2, ">")?.1;
        } else if tag.starts_with("</") {
            let (name, after) = behind(2, ">")?;
            if open.last().is_none_or(|(opened, _)| local(name.trim()) != *opened) {
                return Err(NoXml::Other);
            }
            (rest, ends) = (after, true);
        } else {
            let end = tag_end(tag).ok_or(NoXml::BreaksOff)?;
            let inner = tag[1..end].trim_end();
            let (inner, is_empty) = inner.strip_suffix('/').map_or((inner, false), |inner| (inner, true));
            let (name, attributes) = inner.split_at(inner.find(char::is_whitespace).unwrap_or(inner.len()));
            if !name.starts_with(|c: char| c.is_alphabetic() || c == '_') {
                return Err(NoXml::Other);
            }
            content.clear();
            open.push((local(name), attributes));
            (rest, ends) = (&tag[end + 1..], is_empty);
        }
        if ends {
            let path = open.iter().map(|(name, _)| *name).collect();
            let (name, attributes) = open.pop().unwrap_or_default();
            take(Element { path, attributes, text: std::mem::take(&mut content) });
            if open.is_empty() {
                return Ok(name);
            }
        }
    }
}

/// Where the tag ends that `text` begins with.
fn tag_end(text: &str) -> Option<usize> {
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (None, '>') => return Some(at),
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if c == open => quote = None,
            _ => {}
        }
    }
    None
}

fn local(name: &str) -> &str {
    name.rsplit(':').next().unwrap_or(name)
}

/// The text that is written so.
pub(in crate::store::remote) fn unescaped(text: &str) -> Cow<'_, str> {
    if !text.contains('&') {
        return Cow::Borrowed(text);
    }
    let mut found = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        found += &rest[..at];
        rest = &rest[at..];
        let letter = rest.find(';').and_then(|end| Some((referred(&rest[1..end])?, end)));
        match letter {
            Some((letter, end)) => {
                found.push(letter);
                rest = &rest[end + 1..];
            }
            None => {
                found.push('&');
                rest = &rest[1..];
            }
        }
    }
    Cow::Owned(found + rest)
}

fn referred(name: &str) -> Option<char> {
    match name {
        "lt" => Some('<'),
        "gt" => Some('>'),
        "amp" => Some('&'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => {
            let number = name.strip_prefix('#')?;
            let (digits, radix) = match number.strip_prefix(['x', 'X']) {
                Some(digits) => (digits, 16),
                None => (number, 10),
            };
            u32::from_str_radix(digits, radix).ok().and_then(char::from_u32)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn leaves(text: &str) -> Result<(String, Vec<String>), NoXml> {
        let mut found = Vec::new();
        let root = read(text, |element| {
            found.push(format!("{}{}={}", element.path.join("/"), element.attributes, element.text));
        })?;
        Ok((root.to_owned(), found))
    }

    #[test]
    fn elements_come_when_they_end() {
        let text = "\u{feff}<?xml version='1.0'?>\n<!DOCTYPE x><!-- > --><s:A x='>'>\n<B/><C e=\"1\">a&lt;&#x9;&#65;&amp;lt;&no;\
                    <![CDATA[<&]]></C ></s:A> and more";
        let (root, found) = leaves(text).unwrap();
        assert_eq!(root, "A");
        assert_eq!(found, ["A/B=", "A/C e=\"1\"=a<\tA&lt;&no;<&", "A x='>'="]);
        assert_eq!(leaves("<A/>").unwrap().0, "A");
    }

    #[test]
    fn what_is_no_document_or_half_of_one_is_told_apart() {
        for text in ["oh", "{\"a\":1}", "<a></b>", "</a>", "< a>", "a <b/>"] {
            assert_eq!(leaves(text), Err(NoXml::Other), "{text}");
        }
        let whole = "<?xml?><A x='1'><B>b&amp;</B><!-- c --></A>";
        for cut in 0..whole.len() {
            assert_eq!(leaves(&whole[..cut]), Err(NoXml::BreaksOff), "{cut} bytes");
        }
        assert!(leaves(whole).is_ok());
    }
}

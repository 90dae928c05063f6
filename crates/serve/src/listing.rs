//! A folder's listing: links for people, JSON for programs.

use crate::name::{escaped, Name};
use crate::served::Contents;
use serde_json::json;
use std::fmt::Write;

/// The listing as JSON.
pub(crate) fn json(contents: &Contents) -> String {
    let entries: Vec<_> = contents
        .entries
        .iter()
        .map(|entry| {
            let (name, href) = (String::from_utf8_lossy(&entry.name), escaped(&entry.name));
            match &entry.file {
                Some((size, etag)) => json!({"name": name, "href": href, "size": size, "etag": etag}),
                None => json!({"name": name, "href": href + "/"}),
            }
        })
        .collect();
    json!({"entries": entries, "cut": contents.is_cut}).to_string() + "\n"
}

/// The listing as a page of links.
pub(crate) fn html(name: &Name, contents: &Contents) -> String {
    let path = name.folder_path();
    let mut page =
        format!("<!DOCTYPE html>\n<meta charset=\"utf-8\">\n<title>{path}</title>\n<h1>{path}</h1>\n<pre>\n");
    if name.parts().next().is_some() {
        page.push_str("<a href=\"../\">../</a>\n");
    }
    for entry in &contents.entries {
        let (slash, size) = match &entry.file {
            Some((size, _)) => ("", format!("  {size}")),
            None => ("/", String::new()),
        };
        let text = plain(&String::from_utf8_lossy(&entry.name));
        let _ = writeln!(page, "<a href=\"{}{slash}\">{text}{slash}</a>{size}", escaped(&entry.name));
    }
    page + if contents.is_cut { "and more\n</pre>\n" } else { "</pre>\n" }
}

/// A text that means itself in HTML.
fn plain(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::served::Entry;

    #[test]
    fn no_name_is_markup() {
        let name = b"<a href=\"x\">&\xff'".to_vec();
        let entries =
            vec![Entry { name, file: Some((7, "\"v\"".to_owned())) }, Entry { name: b"b".to_vec(), file: None }];
        let contents = Contents { entries, is_cut: true };
        let page = html(&Name::parse(b"/%3Cb%3E/").unwrap(), &contents);
        assert!(page.contains("<title>/%3Cb%3E/</title>") && page.contains("href=\"b/\">b/<"), "{page}");
        assert!(page.contains("href=\"%3Ca%20href%3D%22x%22%3E%26%FF%27\">&lt;a href=\"x\"&gt;&amp;"), "{page}");
        let read: serde_json::Value = serde_json::from_str(&json(&contents)).unwrap();
        assert_eq!((&read["entries"][0]["size"], &read["cut"]), (&7.into(), &true.into()));
        assert_eq!(read["entries"][1]["href"], "b/");
    }
}

//! The body of an error: XML, as object stores write it, or a few words.

use super::xml::unescaped;

/// A server's account of an error. A text that is no XML of an object store is a message without a code.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(in crate::store::remote) struct ServerError {
    pub(in crate::store::remote) code: String,
    pub(in crate::store::remote) message: String,
    pub(in crate::store::remote) region: Option<String>,
    /// The host that has the bucket.
    pub(in crate::store::remote) endpoint: Option<String>,
    /// Bytes of the object, if the range that was asked for lies beyond them.
    pub(in crate::store::remote) size: Option<u64>,
}

/// Codes with status 400 or 409 that other credentials could help with.
const EXPIRED: [&str; 6] = [
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    // Azure's
    "InvalidAuthenticationInfo",
    "PublicAccessNotPermitted",
];

impl ServerError {
    pub(in crate::store::remote) fn of(body: &[u8]) -> Option<ServerError> {
        let text = String::from_utf8_lossy(body);
        let of = |name: &str| {
            let (_, rest) = text.split_once(&format!("<{name}>"))?;
            let (found, _) = rest.split_once(&format!("</{name}>"))?;
            let found = found.split("\nRequestId:").next().unwrap_or_default();
            Some(shortened(&unescaped(found)))
        };
        // Google's message says no more than its code. Azure's ends with the number of the request and the time; what is
        // wrong with a signature it says elsewhere.
        let message = of("Details").or_else(|| of("Message")).unwrap_or_default();
        let more = of("AuthenticationErrorDetail").unwrap_or_default();
        let more = more.split(". String to sign").next().unwrap_or_default();
        let parts = [&message, more].map(|text| text.trim_end_matches('.'));
        let message = parts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
        match of("Code") {
            Some(code) => {
                let size = of("ActualObjectSize").and_then(|text| text.trim().parse().ok());
                let endpoint = of("Endpoint").filter(|host| !host.is_empty());
                Some(ServerError { code, message, region: of("Region"), endpoint, size })
            }
            None => Some(ServerError { message: plain(&text)?, ..ServerError::default() }),
        }
    }

    /// As a message shows it.
    pub(in crate::store::remote) fn shown(&self) -> String {
        let ServerError { code, message, .. } = self;
        [code, message].into_iter().filter(|text| !text.is_empty()).cloned().collect::<Vec<_>>().join(": ")
    }

    /// Whether other credentials could help, where the status does not say it.
    pub(super) fn is_of_access(&self) -> bool {
        EXPIRED.contains(&self.code.as_str())
    }
}

/// A server's text, for a message: its beginning, without controls.
pub(in crate::store::remote) fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(160).collect()
}

/// The words of a text: of a web page its title, or what it shows. Queries of addresses in it are left out: they may be what
/// allows access.
fn plain(text: &str) -> Option<String> {
    if text.contains(['\0', '\u{fffd}']) {
        return None;
    }
    let lower = text.to_ascii_lowercase();
    let title = lower.find("<title").and_then(|from| {
        let from = from + lower[from..].find('>')? + 1;
        Some(&text[from..from + lower[from..].find("</title")?])
    });
    let mut shown = String::new();
    if title.is_none() && text.trim_start().starts_with('<') {
        let mut is_tag = false;
        for c in text.chars() {
            match c {
                '<' => is_tag = true,
                '>' => is_tag = false,
                _ if !is_tag => shown.push(c),
                _ => {}
            }
        }
    }
    let text = unescaped(title.unwrap_or(if shown.is_empty() { text } else { &shown }));
    let bare = |word: &str| match word.split_once('?') {
        Some((place, query)) if query.contains('=') => place.to_owned(),
        _ => word.to_owned(),
    };
    let words = shortened(&text.split_whitespace().map(bare).collect::<Vec<_>>().join(" "));
    (!words.is_empty()).then_some(words)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_azure_says_of_a_signature_and_not_of_the_request() {
        let body = "<Error><Code>AuthenticationFailed</Code><Message>No.\nRequestId:7\nTime:now</Message>\
                    <AuthenticationErrorDetail>Signature did not match. String to sign used was secret\
                    </AuthenticationErrorDetail></Error>";
        assert_eq!(ServerError::of(body.as_bytes()).unwrap().message, "No; Signature did not match");
    }

    #[test]
    fn a_text_that_is_no_xml_is_the_message() {
        for (body, message) in [
            ("Bucket is\n locked ", Some("Bucket is locked")),
            ("{\"message\": \"no\"}", Some("{\"message\": \"no\"}")),
            ("<html><TITLE>\n Bad &amp; worse</TITLE><p>x", Some("Bad & worse")),
            ("<p>Sorry, <b>no</b></p>", Some("Sorry, no")),
            ("not found: http://h/o?X-Sig=secret&y=1 . Is it?", Some("not found: http://h/o . Is it?")),
            ("<Error><Message>no code</Message></Error>", Some("no code")),
            ("", None),
            (" <br/> ", None),
            ("\0\u{1}", None),
        ] {
            let found = ServerError::of(body.as_bytes());
            assert_eq!(found.as_ref().map(|said| &*said.message), message, "{body}");
            assert!(found.is_none_or(|said| said.code.is_empty() && said.shown() == said.message));
        }
        assert_eq!(ServerError::of(&[0x1f, 0x8b, 8, 0, 255]), None);
    }
}

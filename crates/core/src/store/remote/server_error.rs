//! The body of an error, as object stores write it.

/// What an object store says of an error, in XML.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct ServerError {
    pub(super) code: String,
    pub(super) message: String,
    pub(super) region: Option<String>,
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
    pub(super) fn of(body: &[u8]) -> Option<ServerError> {
        let text = String::from_utf8_lossy(body);
        let of = |name: &str| {
            let (_, rest) = text.split_once(&format!("<{name}>"))?;
            let (found, _) = rest.split_once(&format!("</{name}>"))?;
            let found = found.split("\nRequestId:").next().unwrap_or_default();
            let plain = found.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&apos;", "'");
            Some(shortened(&plain.replace("&amp;", "&")))
        };
        // Google's message says no more than its code. Azure's ends with the number of the request and the time; what is
        // wrong with a signature it says elsewhere.
        let message = of("Details").or_else(|| of("Message")).unwrap_or_default();
        let more = of("AuthenticationErrorDetail").unwrap_or_default();
        let more = more.split(". String to sign").next().unwrap_or_default();
        let parts = [&message, more].map(|text| text.trim_end_matches('.'));
        let message = parts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
        Some(ServerError { code: of("Code")?, message, region: of("Region") })
    }

    /// Whether other credentials could help, where the status does not say it.
    pub(super) fn is_of_access(&self) -> bool {
        EXPIRED.contains(&self.code.as_str())
    }
}

/// What a server says, for a message: its beginning, without controls.
pub(super) fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(160).collect()
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
}

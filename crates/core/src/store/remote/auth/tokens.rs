//! Tokens that a server gives for other credentials, or the program: asked for when they are needed, and again before they
//! expire.

use super::giver::{Giver, CALLABLE, MARGIN};
use crate::error::{Error, Result};
use crate::store::remote::http::common::Common;
use crate::store::remote::http::control::Control;
use crate::store::remote::http::escaping::escaped;
use crate::store::remote::http::jitter::Jitter;
use object_store::client::{HttpRequest, HttpRequestBody};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// For the metadata server of this machine, by its address: elsewhere nobody answers, and no name server knows it.
pub(in crate::store::remote) const QUICK: Duration = Duration::from_secs(2);
pub(in crate::store::remote) const METADATA: &str = "169.254.169.254";
pub(in crate::store::remote) const PATIENCE: Duration = Duration::from_secs(20);
/// How often a server that gives tokens is asked, and the pause before it is asked again.
pub(in crate::store::remote) const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(200);
/// For how many seconds a token is valid that does not say it.
pub(in crate::store::remote) const USUAL: u64 = 3600;
/// For no more seconds any is taken to be.
const LONGEST: u64 = 24 * 3600;

/// A source of tokens. Blocks.
pub(in crate::store::remote) trait TokenSource: Send {
    /// A token, and for how many seconds it is valid. `again`: there was one before.
    fn fetch(&self, common: &Arc<Common>, again: bool) -> Result<(String, u64), NoToken>;
}

/// A failure to get a token.
pub(in crate::store::remote) enum NoToken {
    /// Nobody answers.
    Silence(Error),
    Refused(Error),
}

/// Something that gives tokens, and its last one.
pub(in crate::store::remote) struct TokenProvider<S> {
    pub(in crate::store::remote) source: S,
    /// Where its tokens come from, in words.
    pub(in crate::store::remote) origin: String,
    token: Option<(String, Instant)>,
}

impl<S: TokenSource> TokenProvider<S> {
    pub(in crate::store::remote) fn new(source: S, origin: String) -> TokenProvider<S> {
        TokenProvider { source, origin, token: None }
    }

    pub(in crate::store::remote) fn has_given(&self) -> bool {
        self.token.is_some()
    }

    /// A token that is valid for some minutes.
    pub(in crate::store::remote) fn token(&mut self, common: &Arc<Common>) -> Result<String, NoToken> {
        if let Some((token, until)) = &self.token {
            if Instant::now() < *until {
                return Ok(token.clone());
            }
        }
        let (token, seconds) = self.source.fetch(common, self.has_given())?;
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            let text = "it is empty, or has spaces or control characters";
            return Err(NoToken::Refused(Error::invalid(text)));
        }
        let valid = Duration::from_secs(seconds.min(LONGEST)).saturating_sub(MARGIN);
        self.token = Some((token.clone(), Instant::now() + valid));
        Ok(token)
    }

    /// The error of a load that has no token.
    pub(in crate::store::remote) fn failed(&self, no: NoToken) -> Error {
        let (NoToken::Silence(e) | NoToken::Refused(e)) = no;
        e.reworded(|why| format!("no token; the credentials are from {}: {why}", self.origin))
    }
}

/// A giver of tokens: a server for other credentials, or the program.
pub(in crate::store::remote) enum TokenGiver<S> {
    Server(TokenProvider<S>),
    Program(Giver),
}

impl<S> TokenGiver<S> {
    /// The program, if it gives credentials.
    pub(in crate::store::remote) fn program(common: &Common) -> Option<TokenGiver<S>> {
        let source = common.settings.credentials.clone()?;
        Some(TokenGiver::Program(Giver::new(source, CALLABLE)))
    }
}

/// The answer of a token server (RFC 6749, section 5; metadata servers write numbers as strings).
#[derive(Deserialize, Default)]
struct TokenAnswer {
    access_token: Option<String>,
    expires_in: Option<Value>,
    /// In seconds since 1970.
    expires_on: Option<Value>,
    error: Option<String>,
    error_description: Option<String>,
}

impl TokenAnswer {
    fn seconds(&self) -> u64 {
        let number = |value: &Option<Value>| match value {
            Some(Value::String(text)) => text.parse().ok(),
            Some(value) => value.as_u64(),
            None => None,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let until = || number(&self.expires_on).map(|until: u64| until.saturating_sub(now));
        number(&self.expires_in).or_else(until).unwrap_or(USUAL)
    }
}

/// Names and values as a form or a query has them.
pub(in crate::store::remote) fn form<N: AsRef<str>, V: AsRef<str>>(fields: &[(N, V)]) -> String {
    let value = |text: &str| escaped(text).replace('/', "%2F");
    let pair = |(name, text): &(N, V)| format!("{}={}", name.as_ref(), value(text.as_ref()));
    fields.iter().map(pair).collect::<Vec<_>>().join("&")
}

/// A token that the server at this address gives for a form.
pub(in crate::store::remote) fn posted(
    common: &Arc<Common>,
    at: &str,
    fields: &[(&str, &str)],
) -> Result<(String, u64), NoToken> {
    let request = http::Request::post(at).header("content-type", "application/x-www-form-urlencoded");
    asked(&Control::new(common, PATIENCE), request, form(fields).into(), false)
}

/// Asks so many times at most, with pauses: again if the server is busy or broken, or if `again` says so of an error.
pub(in crate::store::remote) fn ask_again(
    control: &Control,
    request: &HttpRequest,
    tries: u32,
    again: impl Fn(&Error) -> bool,
) -> Result<(u16, Vec<u8>)> {
    for _ in 1..tries {
        match control.ask(request) {
            Ok((status, _)) if status >= 500 || status == 429 => {}
            Err(e) if again(&e) => {}
            answer => return answer,
        }
        std::thread::sleep(Jitter::random().between(PAUSE / 2, PAUSE * 3 / 2));
    }
    control.ask(request)
}

/// A token, and for how many seconds it is valid. Servers that do not answer are asked once or several times.
pub(in crate::store::remote) fn asked(
    control: &Control,
    request: http::request::Builder,
    body: HttpRequestBody,
    once: bool,
) -> Result<(String, u64), NoToken> {
    let no_server = |_| NoToken::Refused(Error::invalid("its settings do not make a valid request"));
    let request = request.body(body).map_err(no_server)?;
    let (status, body) = ask_again(control, &request, TRIES, |_| !once).map_err(NoToken::Silence)?;
    let answer: TokenAnswer = serde_json::from_slice(&body).unwrap_or_default();
    let seconds = answer.seconds();
    match answer {
        TokenAnswer { access_token: Some(token), .. } if status == 200 => Ok((token, seconds)),
        TokenAnswer { error, error_description, .. } => {
            let said = [error, error_description].into_iter().flatten().collect::<Vec<_>>().join(": ");
            let said: String = said.chars().filter(|c| !c.is_control()).take(160).collect();
            let text = format!("the token server answers {status} {said}");
            Err(NoToken::Refused(Error::permission(text.trim_end())))
        }
    }
}

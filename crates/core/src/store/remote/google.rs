//! Where the tools of Google Cloud look for credentials: a file, and the metadata server of a machine there.

use super::address::{Address, Server};
use super::control::{block_on, Control};
use super::credentials::{Finder, FoundKey, USABLE};
use super::environment::Environment;
use super::given::{CredentialSource, Giver, CALLABLE};
use super::net::Common;
use super::settings::GcsSettings;
use crate::error::{Error, ErrorKind, Result};
use object_store::client::HttpRequestBody;
use object_store::gcp::GoogleCloudStorageBuilder;
use serde::Deserialize;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For the metadata server of this machine, by its address: elsewhere nobody answers, and no name server knows it.
const QUICK: Duration = Duration::from_secs(2);
const METADATA: &str = "169.254.169.254";
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a server that gives tokens is asked, and the pause before it is asked again.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(200);
const TOKENS: &str = "https://oauth2.googleapis.com/token";
/// A token is replaced so long before it expires: longer than it may be used without being asked for again (`credentials`).
const MARGIN: Duration = Duration::from_secs(300);
/// How long a token that a service account signs is valid.
const SIGNED: u64 = 3600;

pub(super) const VARIABLES: [&str; 7] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "CLOUDSDK_CONFIG",
    "HOME",
    "STORAGE_EMULATOR_HOST",
    "GCE_METADATA_HOST",
    "GCE_METADATA_IP",
    "NO_GCE_CHECK",
];

/// What requests carry, and where they go.
#[derive(PartialEq)]
pub(super) struct GoogleKey {
    /// `None`: nothing.
    pub(super) token: Option<String>,
}

/// The settings of one store, and the environment that completes them.
#[derive(Debug)]
pub(super) struct Google {
    pub(super) settings: GcsSettings,
    pub(super) environment: Environment,
}

/// Something that gives tokens, and its last one.
pub(super) struct TokenProvider {
    source: TokenSource,
    origin: String,
    token: Option<(String, Instant)>,
}

enum TokenSource {
    /// The text of its file.
    ServiceAccount(String),
    User(User),
    /// The address of the metadata server.
    Machine(String),
    /// The program.
    Giver(Giver),
}

/// A file with credentials.
#[derive(Deserialize)]
struct FileType {
    #[serde(rename = "type")]
    name: String,
}

/// What `gcloud auth application-default login` leaves.
#[derive(Deserialize)]
struct User {
    client_id: String,
    client_secret: String,
    refresh_token: String,
    token_uri: Option<String>,
}

/// What servers answer who give tokens.
#[derive(Deserialize, Default)]
struct TokenAnswer {
    access_token: Option<String>,
    expires_in: Option<u64>,
    error: Option<String>,
    error_description: Option<String>,
}

/// Why there is no token.
enum NoToken {
    /// Nobody answers.
    Silence(Error),
    Refused(Error),
}

impl Finder for Google {
    type Key = GoogleKey;
    type Provider = TokenProvider;

    fn find(&self, common: &Arc<Common>, provider: &mut Option<TokenProvider>) -> Result<FoundKey<GoogleKey>> {
        let without = |why: &str, renewable| {
            Ok(FoundKey { key: GoogleKey { token: None }, origin: why.to_owned(), fades: false, renewable })
        };
        if self.settings.anonymous {
            return without("anonymous=True", false);
        }
        if self.settings.endpoint.is_none() && self.emulator().is_some() {
            return without("STORAGE_EMULATOR_HOST is set", false);
        }
        if provider.is_none() {
            *provider = match &common.settings.credentials {
                Some(source) => Some(TokenProvider::of(source)),
                None => self.provider()?,
            };
        }
        let Some(given) = provider else { return without(NOTHING, true) };
        match given.token(common) {
            Ok(token) => {
                let origin = given.origin.clone();
                let fades = !matches!(&given.source, TokenSource::Giver(giver) if giver.left().is_none());
                Ok(FoundKey { key: GoogleKey { token: Some(token) }, origin, fades, renewable: true })
            }
            Err(NoToken::Silence(_)) if matches!(given.source, TokenSource::Machine(_)) && given.token.is_none() => {
                *provider = None;
                without(NOTHING, true)
            }
            Err(NoToken::Refused(e)) if matches!(given.source, TokenSource::Giver(_)) => Err(e),
            Err(NoToken::Silence(e) | NoToken::Refused(e)) => {
                Err(e.reworded(|why| format!("no token; the credentials are from {}: {why}", given.origin)))
            }
        }
    }

    fn left(&self, provider: &Option<TokenProvider>) -> Duration {
        match provider {
            Some(TokenProvider { source: TokenSource::Giver(giver), .. }) => giver.left().unwrap_or(USABLE),
            _ => USABLE,
        }
    }
}

const NOTHING: &str = "no credentials were found: GOOGLE_APPLICATION_CREDENTIALS is not set, `gcloud auth \
                       application-default login` has left none, and no metadata server answers";

impl Google {
    /// Where requests go.
    pub(super) fn endpoint(&self) -> Result<Address> {
        let emulator =
            self.emulator().map(|host| if host.contains("://") { host.to_owned() } else { format!("http://{host}") });
        let endpoint = self.settings.endpoint.clone().or(emulator);
        Address::parse(endpoint.as_deref().unwrap_or("https://storage.googleapis.com"))
            .map_err(|e| e.reworded(|why| format!("the endpoint for Google Cloud Storage: {why}")))
    }

    fn emulator(&self) -> Option<&str> {
        self.environment.get("STORAGE_EMULATOR_HOST")
    }

    fn provider(&self) -> Result<Option<TokenProvider>> {
        let of = |name| self.environment.get(name);
        if let Some(file) = of("GOOGLE_APPLICATION_CREDENTIALS") {
            let origin = format!("{file} (GOOGLE_APPLICATION_CREDENTIALS)");
            let text = std::fs::read_to_string(file).map_err(|e| Error::io(&format!("read {origin}"), &e))?;
            return from_file(text, origin).map(Some);
        }
        let usual = || of("HOME").map(|home| Path::new(home).join(".config/gcloud"));
        if let Some(folder) = of("CLOUDSDK_CONFIG").map(PathBuf::from).or_else(usual) {
            let file = folder.join("application_default_credentials.json");
            // What cannot be read is not there, as for the tools of Google.
            if let Ok(text) = std::fs::read_to_string(&file) {
                return from_file(text, file.display().to_string()).map(Some);
            }
        }
        if of("NO_GCE_CHECK").is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1") {
            return Ok(None);
        }
        let host = self.environment.first(&["GCE_METADATA_HOST", "GCE_METADATA_IP"]).unwrap_or(METADATA);
        let origin = "the service account of this machine".to_owned();
        Ok(Some(TokenProvider { source: TokenSource::Machine(host.to_owned()), origin, token: None }))
    }
}

fn from_file(text: String, origin: String) -> Result<TokenProvider> {
    // What is wrong with it is not shown: it would quote the file.
    let wrong = || invalid(format!("{origin} is no file with credentials of Google"));
    let FileType { name } = serde_json::from_str(&text).map_err(|_| wrong())?;
    let source = match name.as_str() {
        "service_account" => TokenSource::ServiceAccount(text),
        "authorized_user" => TokenSource::User(serde_json::from_str(&text).map_err(|_| wrong())?),
        other => {
            let other: String = other.chars().filter(|c| !c.is_control()).take(60).collect();
            let text = format!(
                "{origin} has credentials of type {other}, which is not supported: give the key of a service account, or use \
                 `gcloud auth application-default login`"
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
    };
    Ok(TokenProvider { source, origin, token: None })
}

impl TokenProvider {
    fn of(source: &CredentialSource) -> TokenProvider {
        let giver = Giver::new(source.clone(), CALLABLE);
        TokenProvider { source: TokenSource::Giver(giver), origin: CALLABLE.to_owned(), token: None }
    }

    /// A token that is valid for some minutes.
    fn token(&mut self, common: &Arc<Common>) -> Result<String, NoToken> {
        if let Some((token, until)) = &self.token {
            if Instant::now() < *until {
                return Ok(token.clone());
            }
        }
        let (token, seconds) = match &mut self.source {
            TokenSource::ServiceAccount(text) => (signed(common, text).map_err(NoToken::Refused)?, SIGNED),
            TokenSource::User(user) => user.token(common)?,
            TokenSource::Giver(giver) => return giver.token().map_err(NoToken::Refused),
            TokenSource::Machine(host) => {
                let path = "computeMetadata/v1/instance/service-accounts/default/token";
                let request = http::Request::get(format!("http://{host}/{path}")).header("Metadata-Flavor", "Google");
                // Where there was a token before, there is a server.
                let once = self.token.is_none();
                asked(&Control::new(common, QUICK).direct(), request, HttpRequestBody::empty(), once)?
            }
        };
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(NoToken::Refused(invalid("it is empty, or has spaces or controls in it".into())));
        }
        let valid = Duration::from_secs(seconds).saturating_sub(MARGIN);
        self.token = Some((token.clone(), Instant::now() + valid));
        Ok(token)
    }
}

impl User {
    fn token(&self, common: &Arc<Common>) -> Result<(String, u64), NoToken> {
        let User { client_id, client_secret, refresh_token, token_uri } = self;
        let at = token_uri.as_deref().unwrap_or(TOKENS);
        let safe = Address::parse(at).is_ok_and(|address| keeps_secrets(&address.server));
        if !safe {
            return Err(NoToken::Refused(invalid("its token_uri is no https:// address".into())));
        }
        let mut body = String::from("grant_type=refresh_token");
        for (name, value) in
            [("client_id", client_id), ("client_secret", client_secret), ("refresh_token", refresh_token)]
        {
            body += &format!("&{name}={}", super::listing::escaped(value).replace('/', "%2F"));
        }
        let request = http::Request::post(at).header("content-type", "application/x-www-form-urlencoded");
        asked(&Control::new(common, PATIENCE), request, body.into(), false)
    }
}

/// A token, and for how many seconds it is valid. Servers that do not answer are asked once or several times.
fn asked(
    control: &Control,
    request: http::request::Builder,
    body: HttpRequestBody,
    once: bool,
) -> Result<(String, u64), NoToken> {
    let request = request.body(body).map_err(|_| NoToken::Refused(invalid("it names no server".into())))?;
    let mut tries = TRIES;
    let (status, body) = loop {
        tries -= 1;
        match control.ask(&request) {
            Ok((status, _)) if tries > 0 && (status >= 500 || status == 429) => std::thread::sleep(PAUSE),
            Err(_) if tries > 0 && !once => std::thread::sleep(PAUSE),
            answer => break answer.map_err(NoToken::Silence)?,
        }
    };
    let answer: TokenAnswer = serde_json::from_slice(&body).unwrap_or_default();
    match answer {
        TokenAnswer { access_token: Some(token), expires_in, .. } if status == 200 => {
            Ok((token, expires_in.unwrap_or(SIGNED)))
        }
        TokenAnswer { error, error_description, .. } => {
            let said = [error, error_description].into_iter().flatten().collect::<Vec<_>>().join(": ");
            let said: String = said.chars().filter(|c| !c.is_control()).take(160).collect();
            let text = format!("the server that gives tokens answers {status} {said}");
            Err(NoToken::Refused(Error::new(ErrorKind::Permission, text.trim_end())))
        }
    }
}

/// A token that the key of a service account signs.
fn signed(common: &Arc<Common>, text: &str) -> Result<String> {
    let wrong = |_| invalid("it is no key of a service account".into());
    let builder = GoogleCloudStorageBuilder::new()
        .with_bucket_name("none")
        .with_service_account_key(text)
        .with_http_connector(Control::new(common, PATIENCE));
    let credentials = builder.build().map_err(wrong)?.credentials().clone();
    Ok(block_on(credentials.get_credential())?.map_err(wrong)?.bearer.clone())
}

/// Whether what is sent there stays secret: by TLS, or because it is this machine.
pub(super) fn keeps_secrets(server: &Server) -> bool {
    server.tls || server.host == "localhost" || server.ip().is_some_and(|ip: IpAddr| ip.is_loopback())
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

impl fmt::Debug for TokenProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenProvider").field("origin", &self.origin).finish_non_exhaustive()
    }
}

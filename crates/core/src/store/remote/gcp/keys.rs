//! Where the tools of Google Cloud look for credentials: a file, and the metadata server of a machine there.

use super::settings::GcsSettings;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::auth::credentials::{Finder, FoundKey, USABLE};
use crate::store::remote::auth::tokens::{
    asked, posted, NoToken, TokenGiver, TokenProvider, TokenSource, METADATA, PATIENCE, QUICK, USUAL,
};
use crate::store::remote::environment::{meant, Environment};
use crate::store::remote::http::address::Address;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::control::{block_on, Control};
use object_store::client::HttpRequestBody;
use object_store::gcp::GoogleCloudStorageBuilder;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TOKENS: &str = "https://oauth2.googleapis.com/token";

pub(in crate::store::remote) const VARIABLES: [&str; 7] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "CLOUDSDK_CONFIG",
    "HOME",
    "STORAGE_EMULATOR_HOST",
    "GCE_METADATA_HOST",
    "GCE_METADATA_IP",
    "NO_GCE_CHECK",
];

/// The settings of one store, and the environment that completes them.
#[derive(Debug)]
pub(in crate::store::remote) struct Google {
    pub(in crate::store::remote) settings: GcsSettings,
    pub(in crate::store::remote) environment: Environment,
}

/// A source of Google's tokens.
pub(in crate::store::remote) enum GoogleSource {
    /// The text of its file.
    ServiceAccount(String),
    User(User),
    /// The address of the metadata server.
    Machine(String),
}

/// A file with credentials.
#[derive(Deserialize)]
struct FileType {
    #[serde(rename = "type")]
    name: String,
}

/// The file of `gcloud auth application-default login`.
#[derive(Deserialize)]
pub(in crate::store::remote) struct User {
    client_id: String,
    client_secret: String,
    refresh_token: String,
    token_uri: Option<String>,
}

impl Finder for Google {
    /// The token that requests carry, if they carry one.
    type Key = Option<String>;
    type Provider = TokenGiver<GoogleSource>;

    fn find(
        &self,
        common: &Arc<Common>,
        provider: &mut Option<TokenGiver<GoogleSource>>,
    ) -> Result<FoundKey<Option<String>>> {
        let without =
            |why: &str, renewable| Ok(FoundKey { key: None, origin: why.to_owned(), usable: None, renewable });
        if self.settings.anonymous {
            return without("anonymous=True", false);
        }
        if self.settings.endpoint.is_none() && self.emulator().is_some() {
            return without("STORAGE_EMULATOR_HOST is set", false);
        }
        if provider.is_none() {
            *provider = match TokenGiver::program(common) {
                None => self.provider()?.map(TokenGiver::Server),
                program => program,
            };
        }
        let found = |token: String, origin: &str, usable| {
            Ok(FoundKey { key: Some(token), origin: origin.to_owned(), usable, renewable: true })
        };
        let given = match provider {
            None => return without(NOTHING, true),
            Some(TokenGiver::Program(giver)) => {
                let token = giver.token()?;
                return found(token, &giver.origin, giver.left());
            }
            Some(TokenGiver::Server(given)) => given,
        };
        match given.token(common) {
            Ok(token) => found(token, &given.origin, Some(USABLE)),
            Err(NoToken::Silence(_)) if matches!(given.source, GoogleSource::Machine(_)) && !given.has_given() => {
                *provider = None;
                without(NOTHING, true)
            }
            Err(no) => Err(given.failed(no)),
        }
    }
}

const NOTHING: &str = "no credentials were found: GOOGLE_APPLICATION_CREDENTIALS is not set, `gcloud auth \
                       application-default login` has left none, and no metadata server answers";

impl Google {
    /// Where requests go.
    pub(in crate::store::remote) fn endpoint(&self) -> Result<Address> {
        let (text, origin) = match (&self.settings.endpoint, self.emulator()) {
            (Some(endpoint), _) => (meant(endpoint).to_owned(), "endpoint in storage="),
            (None, Some(host)) => {
                let scheme = if host.contains("://") { "" } else { "http://" };
                (format!("{scheme}{host}"), "STORAGE_EMULATOR_HOST")
            }
            (None, None) => ("https://storage.googleapis.com".to_owned(), "the usual one"),
        };
        let wrong = |why: &str| format!("the endpoint for Google Cloud Storage ({origin}): {why}");
        Address::parse(&text).map_err(|e| e.reworded(|why| wrong(why)))
    }

    fn emulator(&self) -> Option<&str> {
        self.environment.get("STORAGE_EMULATOR_HOST")
    }

    fn provider(&self) -> Result<Option<TokenProvider<GoogleSource>>> {
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
        let named = self.environment.named(&["GCE_METADATA_HOST", "GCE_METADATA_IP"]);
        let (variable, host) = named.unwrap_or(("the metadata server", METADATA));
        let host = host.strip_prefix("http://").unwrap_or(host).trim_end_matches('/');
        let parsed = Address::parse(&format!("http://{host}"));
        if !parsed.as_ref().is_ok_and(|address| address.target == "/") {
            return Err(Error::invalid(format!("{variable}: this is not a host: give host or host:port")));
        }
        let origin = "the service account of this machine".to_owned();
        Ok(Some(TokenProvider::new(GoogleSource::Machine(host.to_owned()), origin)))
    }
}

fn from_file(text: String, origin: String) -> Result<TokenProvider<GoogleSource>> {
    // What is wrong with it is not shown: it would quote the file.
    let wrong = || Error::invalid(format!("{origin} is not a credentials file of Google"));
    let FileType { name } = serde_json::from_str(&text).map_err(|_| wrong())?;
    let source = match name.as_str() {
        "service_account" => GoogleSource::ServiceAccount(text),
        "authorized_user" => GoogleSource::User(serde_json::from_str(&text).map_err(|_| wrong())?),
        other => {
            let other: String = other.chars().filter(|c| !c.is_control()).take(60).collect();
            let text = format!(
                "{origin} has credentials of type {other}, which is not supported: give the key of a service account, or use \
                 `gcloud auth application-default login`"
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
    };
    Ok(TokenProvider::new(source, origin))
}

impl TokenSource for GoogleSource {
    fn fetch(&self, common: &Arc<Common>, again: bool) -> Result<(String, u64), NoToken> {
        match self {
            GoogleSource::ServiceAccount(text) => Ok((signed(common, text).map_err(NoToken::Refused)?, USUAL)),
            GoogleSource::User(user) => user.token(common),
            GoogleSource::Machine(host) => {
                let path = "computeMetadata/v1/instance/service-accounts/default/token";
                let request = http::Request::get(format!("http://{host}/{path}")).header("Metadata-Flavor", "Google");
                // Where there was a token before, there is a server.
                asked(&Control::new(common, QUICK).direct(), request, HttpRequestBody::empty(), !again)
            }
        }
    }
}

impl User {
    fn token(&self, common: &Arc<Common>) -> Result<(String, u64), NoToken> {
        let User { client_id, client_secret, refresh_token, token_uri } = self;
        let at = token_uri.as_deref().unwrap_or(TOKENS);
        if !Address::parse(at).is_ok_and(|address| common.keeps_secrets(&address.server)) {
            return Err(NoToken::Refused(Error::invalid("its token_uri is no https:// address")));
        }
        let fields = [
            ("grant_type", "refresh_token"),
            ("client_id", client_id),
            ("client_secret", client_secret),
            ("refresh_token", refresh_token),
        ];
        posted(common, at, &fields)
    }
}

/// A token that the key of a service account signs.
fn signed(common: &Arc<Common>, text: &str) -> Result<String> {
    let wrong = |_| Error::invalid("it is no key of a service account");
    let builder = GoogleCloudStorageBuilder::new()
        .with_bucket_name("none")
        .with_service_account_key(text)
        .with_http_connector(Control::new(common, PATIENCE));
    let credentials = builder.build().map_err(wrong)?.credentials().clone();
    Ok(block_on(credentials.get_credential())?.map_err(wrong)?.bearer.clone())
}

//! Where the tools of Azure look for an account and for what opens it: keys, signatures, and identities.

use super::account::Account;
use super::settings::AzureSettings;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::auth::credentials::{Finder, FoundKey, USABLE};
use crate::store::remote::auth::tokens::{
    asked, form, posted, NoToken, TokenGiver, TokenProvider, TokenSource, METADATA, PATIENCE, QUICK,
};
use crate::store::remote::environment::Environment;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::control::Control;
use object_store::azure::split_sas;
use object_store::client::HttpRequestBody;
use std::sync::Arc;
use std::time::Duration;

pub(in crate::store::remote) const VARIABLES: [&str; 16] = [
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ACCOUNT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_TENANT_ID",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_CLIENT_CERTIFICATE_PATH",
    "AZURE_AUTHORITY_HOST",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_POD_IDENTITY_AUTHORITY_HOST",
    "IDENTITY_ENDPOINT",
    "IDENTITY_HEADER",
];
/// The resource of tokens, in every cloud of Azure.
const RESOURCE: &str = "https://storage.azure.com";

/// The credential of requests, and their endpoint.
#[derive(PartialEq)]
pub(in crate::store::remote) struct AzureKey {
    pub(in crate::store::remote) credential: Credential,
    /// Where the containers of the account are.
    pub(in crate::store::remote) endpoint: Address,
}

/// The credential of requests.
#[derive(PartialEq)]
pub(in crate::store::remote) enum Credential {
    None,
    /// Requests are signed with the key of this account.
    Key(String, Vec<u8>),
    /// A shared access signature that somebody has made.
    Signature(Vec<(String, String)>),
    Token(String),
}

/// The settings of one store, and the environment that completes them.
#[derive(Debug)]
pub(in crate::store::remote) struct Azure {
    pub(in crate::store::remote) settings: AzureSettings,
    pub(in crate::store::remote) environment: Environment,
}

/// A source of tokens. A client is a tenant and the identity of a program in it.
pub(in crate::store::remote) enum AzureIdentity {
    /// The address, the program, its secret.
    Secret(String, String, String),
    /// The same with a file, which somebody else keeps up to date.
    Workload(String, String, String),
    /// The address of App Service, and its secret; the program if there are several.
    Service(String, String, Option<String>),
    /// The metadata server, and the program.
    Machine(String, Option<String>),
}

impl Finder for Azure {
    type Key = AzureKey;
    type Provider = TokenGiver<AzureIdentity>;

    fn find(
        &self,
        common: &Arc<Common>,
        provider: &mut Option<TokenGiver<AzureIdentity>>,
    ) -> Result<FoundKey<AzureKey>> {
        let account = Account::of(&self.settings, &self.environment)?;
        let endpoint = account.address()?;
        let found = |endpoint, credential, origin: &str, usable: Option<Duration>| {
            let (key, renewable) = (AzureKey { credential, endpoint }, usable.is_some());
            Ok(FoundKey { key, origin: origin.to_owned(), usable, renewable })
        };
        if self.settings.anonymous {
            return found(endpoint, Credential::None, "anonymous=True", None);
        }
        if !common.keeps_secrets(&endpoint.server) {
            return Err(Error::invalid(
                "the endpoint for Azure is http://, and the credential would be readable on the way: give an https:// \
                 address, or storage={\"anonymous\": True}",
            ));
        }
        if provider.is_none() {
            *provider = TokenGiver::program(common);
        }
        if let Some(TokenGiver::Program(giver)) = provider {
            let token = giver.token()?;
            let key = AzureKey { credential: Credential::Token(token), endpoint };
            return Ok(FoundKey { key, origin: giver.origin.clone(), usable: giver.left(), renewable: true });
        }
        if let Some((key, origin)) = &account.key {
            let name = account.name.clone().ok_or_else(|| {
                Error::invalid(
                    "an account key signs with the name of its account, and none is given: account_name in storage=, \
                     AZURE_STORAGE_ACCOUNT, or AccountName in AZURE_STORAGE_CONNECTION_STRING",
                )
            })?;
            return found(endpoint, Credential::Key(name, key_of(key, origin)?), origin, None);
        }
        if let Some((text, origin)) = &account.signature {
            return found(endpoint, Credential::Signature(pairs_of(text, origin)?), origin, None);
        }
        if provider.is_none() {
            *provider = Some(TokenGiver::Server(self.identity(common)?));
        }
        let Some(TokenGiver::Server(given)) = provider else {
            return Err(Error::new(ErrorKind::Internal, "nothing gives tokens; please report this"));
        };
        match given.token(common) {
            Ok(token) => found(endpoint, Credential::Token(token), &given.origin, Some(USABLE)),
            Err(no) if matches!(given.source, AzureIdentity::Machine(..)) && !given.has_given() => {
                let (NoToken::Silence(e) | NoToken::Refused(e)) = no;
                let why = e.full_message();
                let text = format!("{NOTHING} ({}: {why}). {PUBLIC}", given.origin);
                Err(Error::permission(text))
            }
            Err(no) => Err(given.failed(no)),
        }
    }
}

const NOTHING: &str =
    "no credentials for Azure were found: neither account_key or sas_token in storage=, nor AZURE_STORAGE_KEY, \
                       AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, nor an identity";
const PUBLIC: &str = "For a public container give storage={\"anonymous\": True}";

impl Azure {
    /// The identity that Azure's DefaultAzureCredential would take, without logins of people.
    fn identity(&self, common: &Common) -> Result<TokenProvider<AzureIdentity>> {
        let of = |name: &str| self.environment.get(name).map(str::to_owned);
        let program = of("AZURE_CLIENT_ID");
        if let (Some(tenant), Some(program)) = (of("AZURE_TENANT_ID"), program.clone()) {
            let at = || {
                let host = of("AZURE_AUTHORITY_HOST").unwrap_or_else(|| "login.microsoftonline.com".into());
                let scheme = if host.contains("://") { "" } else { "https://" };
                if !tenant.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
                    return Err(Error::invalid(
                        "AZURE_TENANT_ID has characters other than a-z, digits, '-', '.' and '_'",
                    ));
                }
                let at = format!("{scheme}{}/{tenant}/oauth2/v2.0/token", host.trim_end_matches('/'));
                match Address::parse(&at) {
                    Ok(address) if common.keeps_secrets(&address.server) => {
                        Ok(format!("{}{}", address.server.origin(), address.target))
                    }
                    _ => Err(Error::invalid("AZURE_AUTHORITY_HOST is no https:// address")),
                }
            };
            if let Some(secret) = of("AZURE_CLIENT_SECRET") {
                let origin = "the variable AZURE_CLIENT_SECRET".to_owned();
                return Ok(TokenProvider::new(AzureIdentity::Secret(at()?, program, secret), origin));
            }
            if of("AZURE_CLIENT_CERTIFICATE_PATH").is_some() {
                let text =
                    "AZURE_CLIENT_CERTIFICATE_PATH: certificates are not supported; give AZURE_CLIENT_SECRET instead";
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            if let Some(file) = of("AZURE_FEDERATED_TOKEN_FILE") {
                let origin = format!("{file} (AZURE_FEDERATED_TOKEN_FILE)");
                return Ok(TokenProvider::new(AzureIdentity::Workload(at()?, program, file), origin));
            }
        }
        if let (Some(at), Some(secret)) = (of("IDENTITY_ENDPOINT"), of("IDENTITY_HEADER")) {
            let (at, origin) = (asked_at("IDENTITY_ENDPOINT", &at)?, "the managed identity of this service".to_owned());
            if !secret.bytes().all(|b| (b' '..=b'~').contains(&b)) {
                return Err(Error::invalid("IDENTITY_HEADER has characters that are not visible ASCII"));
            }
            return Ok(TokenProvider::new(AzureIdentity::Service(at, secret, program), origin));
        }
        const HOST: &str = "AZURE_POD_IDENTITY_AUTHORITY_HOST";
        let host = asked_at(HOST, &of(HOST).unwrap_or_else(|| format!("http://{METADATA}")))?;
        let origin = "the managed identity of this machine".to_owned();
        Ok(TokenProvider::new(AzureIdentity::Machine(host, program), origin))
    }
}

impl TokenSource for AzureIdentity {
    fn fetch(&self, common: &Arc<Common>, again: bool) -> Result<(String, u64), NoToken> {
        let scope = format!("{RESOURCE}/.default");
        let client = |at: &str, program: &str, proof: &[(&str, &str)]| {
            let fields = [("grant_type", "client_credentials"), ("client_id", program), ("scope", &*scope)];
            posted(common, at, &[&fields, proof].concat())
        };
        let managed = |at: &str, version: &str, program: &Option<String>| {
            let mut fields = vec![("api-version", version), ("resource", RESOURCE)];
            fields.extend(program.iter().map(|program| ("client_id", &**program)));
            http::Request::get(format!("{at}?{}", form(&fields)))
        };
        match self {
            AzureIdentity::Secret(at, program, secret) => client(at, program, &[("client_secret", secret)]),
            AzureIdentity::Workload(at, program, file) => {
                let read = std::fs::read_to_string(file).map_err(|e| NoToken::Refused(Error::io("read it", &e)))?;
                let kind = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
                client(at, program, &[("client_assertion_type", kind), ("client_assertion", read.trim())])
            }
            AzureIdentity::Service(at, secret, program) => {
                let request = managed(at, "2019-08-01", program).header("X-IDENTITY-HEADER", secret);
                asked(&Control::new(common, PATIENCE).direct(), request, HttpRequestBody::empty(), false)
            }
            AzureIdentity::Machine(host, program) => {
                let at = format!("{}/metadata/identity/oauth2/token", host.trim_end_matches('/'));
                let request = managed(&at, "2018-02-01", program).header("Metadata", "true");
                // Where there was a token before, there is a server.
                asked(&Control::new(common, QUICK).direct(), request, HttpRequestBody::empty(), !again)
            }
        }
    }
}

/// The address in a variable, without what stands around it.
fn asked_at(variable: &str, text: &str) -> Result<String> {
    let Address { server, target } =
        Address::parse(text).map_err(|e| e.reworded(|why| format!("{variable}: {why}")))?;
    Ok(format!("{}{}", server.origin(), target.trim_end_matches('/')))
}

/// The bytes of an account key.
fn key_of(text: &str, origin: &str) -> Result<Vec<u8>> {
    use base64::Engine;
    let read = base64::prelude::BASE64_STANDARD.decode(text.trim());
    read.ok()
        .filter(|key| !key.is_empty())
        .ok_or_else(|| Error::invalid(format!("the account key from {origin} is no base64")))
}

/// The names and values of a shared access signature.
fn pairs_of(text: &str, origin: &str) -> Result<Vec<(String, String)>> {
    let pairs = split_sas(text.trim()).unwrap_or_default();
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    if !pairs.iter().any(|(name, _)| name == "sig") || !pairs.iter().all(|(k, v)| plain(k) && plain(v)) {
        let text = format!("what {origin} has is no shared access signature: it is a query, with sv=, se= and sig=");
        return Err(Error::invalid(text));
    }
    Ok(pairs)
}

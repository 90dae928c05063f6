//! Objects of Azure Blob Storage: `az://container/key`. With the key of an account each request has a signature for its
//! container in its query (a service SAS), because what Azure signs in fields has the range, too. With an identity it has a
//! token that is there already; what has to be asked for is asked for elsewhere (`credentials`).

use super::account::Account;
use super::keys::{Azure, AzureKey, Credential};
use super::settings::AzureSettings;
use super::upload::{AzureUploads, OpensContainers};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::remote::auth::credentials::{Credentials, FoundKey};
use crate::store::remote::auth::tokens::form;
use crate::store::remote::environment::Environment;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::answer::Refused;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::escaping::escaped;
use crate::store::remote::http::request::{bearer_field, Get, Listed, Requests};
use crate::store::remote::listing::{list, parts, Ask};
use crate::store::remote::pages::NextPage;
use crate::store::upload::Uploads;
use crate::wake::Wake;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The version of the service whose terms these are. Without it Azure may answer in those of 2009, with ETags that are not
/// quoted.
const VERSION: &str = "2023-11-03";
/// A signature is valid for so long. It is made for one request: this is for clocks that differ.
const SIGNED: Duration = Duration::from_secs(15 * 60);

/// Permissions to read and to list, and those to write and to remove besides.
const READS: &str = "rl";
const WRITES: &str = "rcwdl";

/// Makes requests for the objects of Azure Blob Storage.
#[derive(Debug)]
pub(in crate::store::remote) struct AzureBlob {
    credentials: Arc<Credentials<Azure>>,
}

impl AzureBlob {
    pub(in crate::store::remote) fn new(
        settings: AzureSettings,
        environment: Environment,
        common: Arc<Common>,
    ) -> AzureBlob {
        AzureBlob { credentials: Arc::new(Credentials::new(Azure { settings, environment }, common)) }
    }
}

impl OpensContainers for AzureBlob {
    fn worded(&self, at: &str, query: &str, fields: &str) -> Result<(Address, String, u64)> {
        let none = || Err(Error::new(ErrorKind::Internal, "no credentials came; please report this"));
        let worded = self.credentials.with_key(None, |key, generation| {
            let Get { address: Address { server, mut target }, fields: own, .. } = made(at, key, generation, WRITES)?;
            if !query.is_empty() {
                target += if target.contains('?') { "&" } else { "?" };
                target += query;
            }
            Ok((Address { server, target }, format!("{own}{fields}"), generation))
        });
        worded.unwrap_or_else(none)
    }

    fn requests(&self) -> &dyn Requests {
        self
    }
}

impl Requests for AzureBlob {
    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        self.credentials.with_key(wake, |key, generation| made(at, key, generation, READS))
    }

    fn identity(&self, at: &str) -> Option<String> {
        let Azure { settings, environment } = self.credentials.finder();
        let Address { server, target } =
            Account::of(settings, environment).and_then(|account| account.address()).ok()?;
        Some(format!("{}{target} {at}", server.origin()))
    }

    fn renew(&self, _at: &str, generation: u64, refusal: &Refused) -> bool {
        self.credentials.renewed(generation, refusal)
    }

    fn explained(&self, refusal: Refused) -> Error {
        let known = self.credentials.latest();
        let credential = known.as_ref().map(|session| &session.found.key.credential);
        if credential == Some(&Credential::None) && refusal.error.kind() == ErrorKind::NotFound {
            return refusal.error.reworded(|why| {
                format!("{why}; Azure also answers this for private containers if you give no credentials")
            });
        }
        let failed = match credential {
            Some(Credential::Key(..)) => "is the account key right, and the clock of this machine?",
            Some(Credential::Signature(_)) => "is the signature complete, and still valid?",
            Some(Credential::None) => "is the container public?",
            _ => "is the identity one of the account's tenant?",
        };
        // Azurite has the code of a firewall for this too, so only its message tells them apart.
        let is_by_azurite = refusal.message.contains("failed to authenticate");
        let bare = |found: &FoundKey<AzureKey>| {
            let is_bare = found.key.credential == Credential::None;
            is_bare.then(|| format!("the request had no credentials ({})", found.origin))
        };
        let hints = [
            (if is_by_azurite { "" } else { "AuthenticationFailed" }, failed),
            ("InvalidAuthenticationInfo", failed),
            (
                "AuthorizationPermissionMismatch",
                "an identity needs the role Storage Blob Data Reader, a signature the permissions r and l",
            ),
            ("AuthorizationFailure", "does the account's firewall let this machine in?"),
            ("KeyBasedAuthenticationNotPermitted", "the account takes no keys: use an identity"),
            ("PublicAccessNotPermitted", "the account has no public containers"),
        ];
        self.credentials.explained(refusal, bare, &hints)
    }

    fn uploads(self: Arc<Self>) -> Option<Result<Arc<dyn Uploads>>> {
        let common = self.credentials.common.clone();
        Some(AzureUploads::new(self, common).map(|uploads| Arc::new(uploads) as Arc<dyn Uploads>))
    }

    fn list(&self, at: &Location) -> Result<Vec<Listed>> {
        list(self, &self.credentials, at, page)
    }
}

fn made(at: &str, key: &AzureKey, generation: u64, permissions: &str) -> Result<Get> {
    let (container, name) = parts(at)?;
    if name.is_empty() {
        return Err(Error::invalid("it names a container, and no blob in it"));
    }
    let AzureKey { credential, endpoint: Address { server, target } } = key;
    let mut target = format!("{}/{container}/{}", target.trim_end_matches('/'), escaped(name));
    if let Some(pairs) = signed(container, key, permissions) {
        target += &format!("?{}", form(&pairs));
    }
    let mut fields = format!("x-ms-version: {VERSION}\r\n");
    if let Credential::Token(token) = credential {
        fields += &bearer_field(token);
    }
    Ok(Get { address: Address { server: server.clone(), target }, fields, generation, is_moved: false })
}

/// The query that opens a container, where one does.
fn signed(
    container: &str,
    AzureKey { credential, endpoint }: &AzureKey,
    permissions: &str,
) -> Option<Vec<(String, String)>> {
    match credential {
        Credential::None | Credential::Token(_) => None,
        Credential::Signature(pairs) => Some(pairs.clone()),
        Credential::Key(account, key) => {
            let until = chrono::DateTime::<chrono::Utc>::from(SystemTime::now() + SIGNED);
            Some(signature(
                account,
                key,
                container,
                permissions,
                &until.format("%Y-%m-%dT%H:%M:%SZ").to_string(),
                endpoint.server.tls,
            ))
        }
    }
}

/// A service SAS for a container (sr=c). The text that is signed, in terms of 2020-12-06 and
/// later: <https://learn.microsoft.com/rest/api/storageservices/create-service-sas>.
fn signature(
    account: &str,
    key: &[u8],
    container: &str,
    permissions: &str,
    until: &str,
    tls: bool,
) -> Vec<(String, String)> {
    use base64::Engine;
    let resource = format!("/blob/{account}/{container}");
    let protocol = if tls { "https" } else { "" };
    // Not said: when it begins, a stored policy, addresses; then: a snapshot, an encryption, five fields of the answer.
    let text =
        [permissions, "", until, &resource, "", "", protocol, VERSION, "c", "", "", "", "", "", "", ""].join("\n");
    let tag = ring::hmac::sign(&ring::hmac::Key::new(ring::hmac::HMAC_SHA256, key), text.as_bytes());
    let sig = base64::prelude::BASE64_STANDARD.encode(tag);
    let pairs = [("sv", VERSION), ("sr", "c"), ("sp", permissions), ("se", until), ("spr", protocol), ("sig", &sig)];
    let said = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    said.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The request for a page of a listing.
fn page(ask: &Ask<'_, AzureKey>) -> Result<Get> {
    let AzureKey { credential, endpoint: Address { server, target } } = ask.key;
    let address = match ask.moved {
        Some(place) => place.address.clone(),
        None => {
            let mut pairs =
                vec![("restype", "container"), ("comp", "list"), ("prefix", ask.prefix), ("delimiter", "/")];
            if let NextPage::Token(marker) = ask.page {
                pairs.push(("marker", marker));
            }
            let signed = signed(ask.bucket, ask.key, READS).unwrap_or_default();
            pairs.extend(signed.iter().map(|(name, value)| (&**name, &**value)));
            let target = format!("{}/{}?{}", target.trim_end_matches('/'), ask.bucket, form(&pairs));
            Address { server: server.clone(), target }
        }
    };
    let mut fields = format!("x-ms-version: {VERSION}\r\n");
    if let (Credential::Token(token), true) = (credential, address.server == *server) {
        fields += &bearer_field(token);
    }
    Ok(Get { address, fields, generation: 0, is_moved: ask.moved.is_some() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::remote::secret::Secret;
    use crate::store::remote::settings::StorageSettings;
    use crate::store::remote::{Provider, Web};

    fn store(azure: AzureSettings) -> AzureBlob {
        AzureBlob::new(azure, Environment::default(), Arc::new(Common::default()))
    }

    fn named(account: &str) -> AzureSettings {
        AzureSettings { account_name: Some(account.into()), ..AzureSettings::default() }
    }

    #[test]
    fn where_a_container_is() {
        for (account, endpoint, at, expected) in [
            ("a", None, "az://c/k", "https://a.blob.core.windows.net /c/k"),
            ("a", Some("http://127.0.0.1:10000/a/"), "AZ://c/a k/?", "http://127.0.0.1:10000 /a/c/a%20k/%3F"),
        ] {
            let azure = AzureSettings { endpoint: endpoint.map(str::to_owned), anonymous: true, ..named(account) };
            let get = store(azure).request(at, None).unwrap().unwrap();
            let Address { server, target } = get.address;
            assert_eq!(format!("{} {target}", server.origin()), expected);
            assert_eq!(get.fields, format!("x-ms-version: {VERSION}\r\n"));
        }
        let e = store(AzureSettings { anonymous: true, ..named("a") }).request("az://c/", None).unwrap().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid);
    }

    #[test]
    fn what_opens_an_account_is_not_shown() {
        let key = AzureSettings { account_key: Some(Secret::new("c2VzYW1l")), ..named("a") };
        let sas = AzureSettings { sas_token: Some(Secret::new("?sv=1&sig=sesame%2B")), ..named("a") };
        for (azure, query) in [(key, "&sig="), (sas, "?sv=1&sig=sesame%2B")] {
            let store = store(azure.clone());
            let get = store.request("az://c/k", None).unwrap().unwrap();
            assert!(get.address.target.contains(query), "{}", get.address.target);
            let signature = get.address.target.split("sig=").nth(1).unwrap();
            let environment = Environment::of(&[("AZURE_STORAGE_KEY", "sesame")]);
            let web = Web::of(
                Provider::of("az").unwrap(),
                StorageSettings { azure, ..StorageSettings::default() },
                environment,
            );
            let shown = format!("{web:?} {store:?} {get:?}");
            assert!(!["sesame", "c2VzYW1l", signature].iter().any(|secret| shown.contains(secret)), "{shown}");
        }
    }
}

//! The storage account of Azure, and the credentials that its owner gave.

use super::settings::AzureSettings;
use crate::error::{Error, Result};
use crate::store::remote::environment::{meant, Environment};
use crate::store::remote::http::address::Address;
use crate::store::remote::secret::Secret;
use std::collections::BTreeMap;

const STRING: &str = "AZURE_STORAGE_CONNECTION_STRING";
const SUFFIX: &str = "core.windows.net";
/// The meaning of `UseDevelopmentStorage=true`: the account in Azurite's documentation.
const EMULATOR: &str =
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1\
                        OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;\
                        BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1";

/// A text that opens something, and where it comes from, in words.
type Opener = Option<(String, &'static str)>;

/// An account: its name, and the rest as far as it is given.
#[derive(Default)]
pub(super) struct Account {
    pub(super) name: Option<String>,
    /// Where it is, and where that is said.
    endpoint: Opener,
    pub(super) key: Opener,
    /// A shared access signature.
    pub(super) signature: Opener,
}

impl Account {
    /// The account that is meant. The environment's key is for the environment's account only.
    pub(super) fn of(settings: &AzureSettings, environment: &Environment) -> Result<Account> {
        let secret = |secret: &Option<Secret>| secret.as_ref().map(|s| (s.shown().to_owned(), "storage="));
        let (key, signature) = (secret(&settings.account_key), secret(&settings.sas_token));
        if key.is_some() && signature.is_some() {
            return Err(Error::invalid("storage=: give account_key or sas_token, not both"));
        }
        let mut found = match environment.get(STRING) {
            Some(text) => Account::of_string(text)?,
            None => Account::of_variables(environment),
        };
        let of_another = |meant: &String| found.name.as_ref() != Some(meant);
        if settings.account_name.as_ref().is_some_and(of_another) && (found.name.is_some() || found.endpoint.is_some())
        {
            found = Account::default();
        }
        if key.is_some() || signature.is_some() {
            (found.key, found.signature) = (key, signature);
        }
        found.name = settings.account_name.as_deref().map(|name| meant(name).to_owned()).or(found.name);
        let given = settings.endpoint.as_deref().map(|text| (meant(text).to_owned(), "endpoint in storage="));
        found.endpoint = given.or(found.endpoint);
        let fits = |name: &String| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !found.name.as_ref().is_none_or(fits) {
            return Err(Error::invalid(
                "the name of the storage account (account_name in storage=, AZURE_STORAGE_ACCOUNT, \
                 AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING) is empty, or has characters other than \
                 a-z, digits and '-'",
            ));
        }
        Ok(found)
    }

    fn of_variables(environment: &Environment) -> Account {
        let first =
            |names: &[&'static str]| names.iter().find_map(|name| Some((environment.get(name)?.to_owned(), *name)));
        Account {
            name: first(&["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"]).map(|(name, _)| name),
            endpoint: None,
            key: first(&["AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"]),
            signature: first(&["AZURE_STORAGE_SAS_TOKEN"]),
        }
    }

    fn of_string(text: &str) -> Result<Account> {
        let mut values = BTreeMap::new();
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) =
                part.split_once('=').ok_or_else(|| Error::invalid(format!("{STRING} has a part without '='")))?;
            values.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        if values.get("usedevelopmentstorage").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Account::of_string(EMULATOR);
        }
        let mut take = |name: &str| values.remove(name).filter(|value| !value.is_empty());
        let name = take("accountname");
        let built = |name: &String, scheme: Option<String>, suffix: Option<String>| {
            format!("{}://{name}.blob.{}", scheme.as_deref().unwrap_or("https"), suffix.as_deref().unwrap_or(SUFFIX))
        };
        let (scheme, suffix) = (take("defaultendpointsprotocol"), take("endpointsuffix"));
        let endpoint = take("blobendpoint").or_else(|| name.as_ref().map(|name| built(name, scheme, suffix)));
        let endpoint = endpoint.map(|text| (text, STRING));
        if endpoint.is_none() {
            return Err(Error::invalid(format!("{STRING} has neither AccountName nor BlobEndpoint")));
        }
        let signature = take("sharedaccesssignature").map(|text| (text, STRING));
        Ok(Account { name, endpoint, key: take("accountkey").map(|text| (text, STRING)), signature })
    }

    /// Where its containers are.
    pub(super) fn address(&self) -> Result<Address> {
        let (endpoint, origin) = match (&self.endpoint, &self.name) {
            (Some((endpoint, origin)), _) => (endpoint.clone(), *origin),
            (None, Some(name)) => (format!("https://{name}.blob.{SUFFIX}"), "the account's"),
            (None, None) => return Err(Error::invalid(
                "no storage account is named: give storage={\"account_name\": ...}, or set AZURE_STORAGE_ACCOUNT or \
                     AZURE_STORAGE_CONNECTION_STRING",
            )),
        };
        let wrong = |why: &str| format!("the endpoint for Azure ({origin}): {why}");
        let address = Address::parse(&endpoint).map_err(|e| e.reworded(|why| wrong(why)))?;
        if address.target.contains('?') {
            return Err(Error::invalid(wrong(
                "it has a query; a shared access signature is given as sas_token in storage=",
            )));
        }
        Ok(address)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn account(settings: &AzureSettings, environment: &[(&str, &str)]) -> Account {
        Account::of(settings, &Environment::of(environment)).unwrap()
    }

    fn text(account: &Account) -> String {
        let Address { server, target } = account.address().unwrap();
        let said = |given: &Opener| given.as_ref().map_or("none", |(text, _)| text).to_owned();
        let name = account.name.as_deref().unwrap_or("none");
        format!("{name} {}{target} {} {}", server.origin(), said(&account.key), said(&account.signature))
    }

    #[test]
    fn what_an_account_is_called_and_where_it_is() {
        let emulator =
            "devstoreaccount1 http://127.0.0.1:10000/devstoreaccount1 Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6I\
                        FsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw== none";
        for (string, expected) in [
            ("AccountName=a;AccountKey=k==", "a https://a.blob.core.windows.net/ k== none"),
            (
                "defaultendpointsprotocol=http; accountname=a; EndpointSuffix=core.chinacloudapi.cn;",
                "a http://a.blob.core.chinacloudapi.cn/ none none",
            ),
            (
                "AccountName=a;BlobEndpoint=https://h:1/a/;QueueEndpoint=https://q;AccountKey=k",
                "a https://h:1/a/ k none",
            ),
            ("BlobEndpoint=https://h;SharedAccessSignature=sv=1&sig=s%3D", "none https://h/ none sv=1&sig=s%3D"),
            ("UseDevelopmentStorage=true", emulator),
        ] {
            assert_eq!(text(&account(&AzureSettings::default(), &[(STRING, string)])), expected, "{string}");
        }
        let variables = [("AZURE_STORAGE_ACCOUNT_NAME", "a"), ("AZURE_STORAGE_ACCESS_KEY", "k")];
        assert_eq!(text(&account(&AzureSettings::default(), &variables)), "a https://a.blob.core.windows.net/ k none");
    }

    #[test]
    fn settings_come_first_and_take_no_key_of_another_account() {
        let of = |name: Option<&str>, key: Option<&str>, endpoint: Option<&str>| AzureSettings {
            account_name: name.map(str::to_owned),
            account_key: key.map(Secret::new),
            endpoint: endpoint.map(str::to_owned),
            ..AzureSettings::default()
        };
        let string = [(STRING, "AccountName=a;AccountKey=k;BlobEndpoint=https://h")];
        let nameless = [(STRING, "BlobEndpoint=https://h;SharedAccessSignature=sig=s")];
        let variables = [("AZURE_STORAGE_KEY", "k")];
        for (settings, environment, expected) in [
            (of(Some("a"), None, None), &string[..], "a https://h/ k none"),
            (of(Some("b"), None, None), &string, "b https://b.blob.core.windows.net/ none none"),
            (of(Some("b"), None, None), &nameless, "b https://b.blob.core.windows.net/ none none"),
            (of(Some("b"), None, None), &variables, "b https://b.blob.core.windows.net/ k none"),
            (of(None, Some("l"), None), &string, "a https://h/ l none"),
            (of(None, Some("l"), None), &nameless, "none https://h/ l none"),
            (of(None, None, Some("https://e")), &string, "a https://e/ k none"),
        ] {
            assert_eq!(text(&account(&settings, environment)), expected, "{settings:?} {environment:?}");
        }
    }

    #[test]
    fn what_names_no_account_is_invalid_and_not_shown() {
        for string in ["sesame", "AccountKey=sesame", "AccountName=a/sesame", "BlobEndpoint=https://h?sig=sesame"] {
            let found = Account::of(&AzureSettings::default(), &Environment::of(&[(STRING, string)]));
            let e = found.and_then(|account| account.address()).err().unwrap();
            assert_eq!(e.kind(), ErrorKind::Invalid);
            assert!(!e.to_string().contains("sesame"), "{e}");
        }
        assert!(Account::of(&AzureSettings::default(), &Environment::of(&[])).unwrap().address().is_err());
    }
}

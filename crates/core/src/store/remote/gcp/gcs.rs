//! Objects of Google Cloud Storage: `gs://bucket/key`, in the terms of its XML API. Requests carry a token that is there
//! already; what has to be asked for is asked for elsewhere (`credentials`).

use super::keys::Google;
use super::settings::GcsSettings;
use super::upload::{GcsUploads, OpensBuckets};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::Location;
use crate::store::remote::auth::credentials::Credentials;
use crate::store::remote::auth::tokens::form;
use crate::store::remote::environment::Environment;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::answer::Refused;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::escaping::escaped;
use crate::store::remote::http::request::{bearer_field, Get, Listed, Requests};
use crate::store::remote::listing::{list, parts, s3_query, Ask};
use crate::store::upload::Uploads;
use crate::wake::Wake;
use std::sync::Arc;

/// Makes requests for the objects of Google Cloud Storage.
#[derive(Debug)]
pub(in crate::store::remote) struct Gcs {
    credentials: Arc<Credentials<Google>>,
}

impl Gcs {
    pub(in crate::store::remote) fn new(settings: GcsSettings, environment: Environment, common: Arc<Common>) -> Gcs {
        Gcs { credentials: Arc::new(Credentials::new(Google { settings, environment }, common)) }
    }

    /// Where requests go that carry this token.
    fn endpoint(&self, token: Option<&str>) -> Result<Address> {
        let endpoint = self.credentials.finder().endpoint()?;
        if token.is_some() && !self.credentials.common.keeps_secrets(&endpoint.server) {
            return Err(Error::invalid(
                "the endpoint for Google Cloud Storage is http://, and a token would be readable on the way: give an https:// \
                 address, or storage={\"anonymous\": True}",
            ));
        }
        Ok(endpoint)
    }

    fn made(&self, at: &str, token: Option<&str>, generation: u64) -> Result<Get> {
        let (bucket, key) = parts(at)?;
        if key.is_empty() {
            return Err(Error::invalid("it names a bucket, and no object in it"));
        }
        let Address { server, target } = self.endpoint(token)?;
        let target = format!("{}/{bucket}/{}", target.trim_end_matches('/'), escaped(key));
        let fields = token.map_or_else(String::new, bearer_field);
        Ok(Get { address: Address { server, target }, fields, generation, is_moved: false })
    }

    /// The request for a page of a listing.
    fn page(&self, ask: &Ask<'_, Option<String>>) -> Result<Get> {
        let token = ask.key.as_deref();
        let there = self.endpoint(token)?;
        let address = match ask.moved {
            Some(place) => place.address.clone(),
            None => {
                let query = form(&s3_query(ask));
                let target = format!("{}/{}?{query}", there.target.trim_end_matches('/'), ask.bucket);
                Address { server: there.server.clone(), target }
            }
        };
        let is_theirs = address.server == there.server;
        let fields = token.filter(|_| is_theirs).map_or_else(String::new, bearer_field);
        Ok(Get { address, fields, generation: 0, is_moved: ask.moved.is_some() })
    }
}

impl OpensBuckets for Gcs {
    fn opened(&self) -> Result<(Address, Option<String>, u64)> {
        let none = || Err(Error::new(ErrorKind::Internal, "no credentials came; please report this"));
        let opened = self
            .credentials
            .with_key(None, |token, generation| Ok((self.endpoint(token.as_deref())?, token.clone(), generation)));
        opened.unwrap_or_else(none)
    }

    fn requests(&self) -> &dyn Requests {
        self
    }
}

impl Requests for Gcs {
    fn request(&self, at: &str, wake: Option<&Arc<Wake>>) -> Option<Result<Get>> {
        self.credentials.with_key(wake, |key, generation| self.made(at, key.as_deref(), generation))
    }

    fn renew(&self, _at: &str, generation: u64, refusal: &Refused) -> bool {
        self.credentials.renewed(generation, refusal)
    }

    fn explained(&self, refusal: Refused) -> Error {
        self.credentials.explained(
            refusal,
            |found| found.key.is_none().then(|| format!("the request had no token ({})", found.origin)),
            &[("AccessDenied", "Google also answers AccessDenied for a missing object if you may not list the bucket")],
        )
    }

    fn identity(&self, at: &str) -> Option<String> {
        let Address { server, target } = self.credentials.finder().endpoint().ok()?;
        Some(format!("{}{target} {at}", server.origin()))
    }

    fn uploads(self: Arc<Self>) -> Option<Result<Arc<dyn Uploads>>> {
        let common = self.credentials.common.clone();
        Some(GcsUploads::new(self, common).map(|uploads| Arc::new(uploads) as Arc<dyn Uploads>))
    }

    fn list(&self, at: &Location) -> Result<Vec<Listed>> {
        list(self, &self.credentials, at, |ask| self.page(ask))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::remote::settings::StorageSettings;
    use crate::store::remote::{Provider, Web};

    fn store(endpoint: Option<&str>, environment: &[(&str, &str)]) -> Gcs {
        let settings = GcsSettings { endpoint: endpoint.map(str::to_owned), anonymous: true };
        Gcs::new(settings, Environment::of(environment), Arc::new(Common::default()))
    }

    #[test]
    fn where_a_bucket_is() {
        let emulator = ("STORAGE_EMULATOR_HOST", "h:4443");
        for (endpoint, environment, at, expected) in [
            (None, ("", ""), "gs://b/k", "https://storage.googleapis.com /b/k"),
            (None, emulator, "gs://b/a k", "http://h:4443 /b/a%20k"),
            (None, ("STORAGE_EMULATOR_HOST", "https://h/x/"), "gs://b/k", "https://h /x/b/k"),
            (Some("https://o"), emulator, "gs://b.c/k", "https://o /b.c/k"),
        ] {
            let Address { server, target } =
                store(endpoint, &[environment]).request(at, None).unwrap().unwrap().address;
            let scheme = if server.tls { "https" } else { "http" };
            assert_eq!(format!("{scheme}://{} {target}", server.authority()), expected);
        }
    }

    #[test]
    fn a_token_goes_where_it_stays_secret() {
        for (endpoint, fits) in [
            ("https://h", true),
            ("http://h", false),
            ("http://10.0.0.1", false),
            ("http://localhost:1", true),
            ("http://127.0.0.1:1", true),
            ("http://[::1]:1", true),
            ("http://localhost.h", false),
        ] {
            let store = store(Some(endpoint), &[]);
            let made = store.made("gs://b/k", Some("sesame"), 1);
            assert_eq!(made.is_ok(), fits, "{endpoint}");
            assert!(store.made("gs://b/k", None, 1).is_ok());
            if let Ok(get) = made {
                assert_eq!(get.fields, "Authorization: Bearer sesame\r\n");
                assert!(!format!("{get:?}").contains("sesame"));
            }
        }
        let web =
            Web::of(Provider::of("gs").unwrap(), StorageSettings::default(), Environment::of(&[("HOME", "sesame")]));
        assert!(!format!("{web:?}").contains("sesame"));
    }
}

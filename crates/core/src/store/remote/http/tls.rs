//! Certificate authorities that TLS trusts: those of this machine, or those that the settings name.

use super::settings::WebSettings;
use super::trust::{NoTrust, Trust};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::environment::meant;
use crate::sync::{lock, Mutex};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::ClientConfig;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

/// Where systems keep the certificates of the authorities that they trust: Debian, Fedora, SUSE, Alpine.
const SYSTEM: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Hosts whose certificates were not checked: all that this process has seen, and those that nobody was told of yet.
static UNCHECKED: std::sync::Mutex<(BTreeSet<String>, Vec<String>)> =
    std::sync::Mutex::new((BTreeSet::new(), Vec::new()));

/// The hosts whose certificates were not checked (`tls_verify=False`), each once in a process.
pub fn unchecked_hosts() -> Vec<String> {
    std::mem::take(&mut UNCHECKED.lock().unwrap_or_else(PoisonError::into_inner).1)
}

/// The settings of TLS, made when they are first needed: reading the authorities takes some milliseconds.
#[derive(Debug, Default, Clone)]
pub(in crate::store::remote) struct Tls(Arc<Mutex<Option<Arc<ClientConfig>>>>);

impl Tls {
    /// Trusts what `settings` say, else what `SSL_CERT_FILE` and `SSL_CERT_DIR` name, else the system's authorities. And the
    /// name that the certificate of `host` must have.
    ///
    /// # Errors
    /// `Unsupported` if there are none, `Invalid` for a host that no certificate can name.
    pub(in crate::store::remote) fn for_host(
        &self,
        settings: &WebSettings,
        host: &str,
    ) -> Result<(Arc<ClientConfig>, ServerName<'static>)> {
        let config = self.config(settings)?;
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|e| Error::invalid(format!("the host has no valid name: {e}")))?;
        if !settings.tls_verify {
            let (seen, news) = &mut *UNCHECKED.lock().unwrap_or_else(PoisonError::into_inner);
            if seen.insert(host.to_owned()) {
                news.push(host.to_owned());
            }
        }
        Ok((config, name))
    }

    fn config(&self, settings: &WebSettings) -> Result<Arc<ClientConfig>> {
        if let Some(config) = &*lock(&self.0) {
            return Ok(config.clone());
        }
        let config = Arc::new(made(settings)?);
        *lock(&self.0) = Some(config.clone());
        Ok(config)
    }
}

/// Files and folders with the certificates to trust: `given`, else those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name. Without
/// the first of these, the system's file, as for OpenSSL.
///
/// # Errors
/// `Unsupported` if there is none.
pub(in crate::store) fn authorities(given: Option<&Path>) -> Result<Vec<PathBuf>> {
    if let Some(given) = given {
        return match given.exists() {
            true => Ok(vec![given.to_path_buf()]),
            false => Err(none(&[given.to_path_buf()])),
        };
    }
    let variable = |name: &str| {
        let value = std::env::var_os(name)?.to_string_lossy().into_owned();
        Some(meant(&value).to_owned()).filter(|value| !value.is_empty())
    };
    let named = variable("SSL_CERT_FILE").map(PathBuf::from);
    if let Some(file) = named.as_ref().filter(|file| !file.exists()) {
        return Err(none(std::slice::from_ref(file)));
    }
    let file = named.or_else(|| SYSTEM.iter().map(PathBuf::from).find(|file| file.exists()));
    let folders = variable("SSL_CERT_DIR").unwrap_or_default();
    let folders = folders.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let found: Vec<_> = file.into_iter().chain(folders.filter(|folder| folder.is_dir())).collect();
    match found.is_empty() {
        true => Err(none(&SYSTEM.map(PathBuf::from))),
        false => Ok(found),
    }
}

fn none(looked: &[PathBuf]) -> Error {
    let looked: Vec<_> = looked.iter().map(|file| file.display().to_string()).collect();
    unsupported(format!(
        "https needs the certificates of the authorities to trust, and there is no {}: install ca-certificates, or \
         name a file of them in SSL_CERT_FILE, or a folder in SSL_CERT_DIR",
        looked.join(", ")
    ))
}

fn unsupported(text: String) -> Error {
    Error::new(ErrorKind::Unsupported, text)
}

/// The certificates in these files, and in those of these folders.
///
/// # Errors
/// `Unsupported` for a file that cannot be read, and if none has any.
pub(in crate::store) fn certificates(given: Option<&Path>) -> Result<Vec<CertificateDer<'static>>> {
    let places = authorities(given)?;
    let mut found = Vec::new();
    for place in &places {
        let wrong =
            |e: &dyn std::fmt::Display| unsupported(format!("{}: cannot read certificates: {e}", place.display()));
        if place.is_dir() {
            for entry in std::fs::read_dir(place).map_err(|e| wrong(&e))?.flatten() {
                // A folder has lists of revoked certificates too, and what nobody may read.
                let file = entry.path();
                let read = file.is_file().then(|| CertificateDer::pem_file_iter(&file)).and_then(Result::ok);
                found.extend(read.into_iter().flatten().filter_map(Result::ok));
            }
        } else {
            let read = CertificateDer::pem_file_iter(place).map_err(|e| wrong(&e))?;
            found.extend(read.filter_map(Result::ok));
        }
    }
    // Folders have each of them by two names.
    let mut seen = BTreeSet::new();
    found.retain(|certificate| seen.insert(certificate.to_vec()));
    match found.is_empty() {
        true => Err(no_certificate(&places)),
        false => Ok(found),
    }
}

fn no_certificate(places: &[PathBuf]) -> Error {
    let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
    unsupported(format!("{} has no certificate of an authority", places.join(", ")))
}

fn made(settings: &WebSettings) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
    let versions = versions.map_err(|e| unsupported(format!("TLS cannot be set up: {e}")))?.dangerous();
    let given = settings.authorities.as_deref();
    let config = match settings.tls_verify {
        false => versions.with_custom_certificate_verifier(Arc::new(NoTrust(provider))),
        true => {
            let trust = Trust::of(certificates(given)?, &provider);
            let trust = trust.ok_or_else(|| no_certificate(&authorities(given).unwrap_or_default()))?;
            versions.with_custom_certificate_verifier(Arc::new(trust))
        }
    };
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

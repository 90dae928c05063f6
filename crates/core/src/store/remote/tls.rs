//! What TLS trusts: the certificate authorities of this machine.

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{lock, Mutex};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where systems keep the certificates of the authorities that they trust: Debian, Fedora, SUSE, Alpine.
const SYSTEM: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The settings of TLS, made when they are first needed: reading the authorities takes some milliseconds.
#[derive(Debug, Default, Clone)]
pub(super) struct Tls(Arc<Mutex<Option<Arc<ClientConfig>>>>);

impl Tls {
    /// Trusts the authorities in the file `given`, else those in the file that `SSL_CERT_FILE` names, else the system's.
    ///
    /// # Errors
    /// `Unsupported` if there are none.
    pub(super) fn config(&self, given: Option<&Path>) -> Result<Arc<ClientConfig>> {
        if let Some(config) = &*lock(&self.0) {
            return Ok(config.clone());
        }
        let config = Arc::new(made(given)?);
        *lock(&self.0) = Some(config.clone());
        Ok(config)
    }

    /// The same, and the name that the certificate of `host` must have.
    ///
    /// # Errors
    /// Those of [`config`](Self::config), `Invalid` for a host that no certificate can name.
    pub(super) fn for_host(
        &self,
        given: Option<&Path>,
        host: &str,
    ) -> Result<(Arc<ClientConfig>, ServerName<'static>)> {
        let config = self.config(given)?;
        let name = ServerName::try_from(host.to_owned());
        Ok((config, name.map_err(|e| Error::new(ErrorKind::Invalid, format!("the host has no valid name: {e}")))?))
    }
}

/// The file with the certificates of the authorities to trust: `given`, else the one that `SSL_CERT_FILE` names, else the
/// system's.
///
/// # Errors
/// `Unsupported` if there is none.
pub(in crate::store) fn authorities(given: Option<&Path>) -> Result<PathBuf> {
    let named = given.map(Path::to_path_buf).or_else(|| std::env::var_os("SSL_CERT_FILE").map(PathBuf::from));
    let candidates = named.map_or_else(|| SYSTEM.iter().map(PathBuf::from).collect(), |file| vec![file]);
    candidates.iter().find(|file| file.exists()).cloned().ok_or_else(|| {
        let looked: Vec<_> = candidates.iter().map(|file| file.display().to_string()).collect();
        unsupported(format!(
            "https needs the certificates of the authorities to trust, and there is no {}: install ca-certificates, or \
             name a file of them in SSL_CERT_FILE",
            looked.join(", ")
        ))
    })
}

fn unsupported(text: String) -> Error {
    Error::new(ErrorKind::Unsupported, text)
}

fn made(given: Option<&Path>) -> Result<ClientConfig> {
    let file = authorities(given)?;
    let mut roots = RootCertStore::empty();
    let read = CertificateDer::pem_file_iter(&file);
    let read = read.map_err(|e| unsupported(format!("{}: cannot read certificates: {e}", file.display())))?;
    // Systems ship some that are too old to be understood. They are passed over.
    roots.add_parsable_certificates(read.filter_map(|certificate| certificate.ok()));
    if roots.is_empty() {
        return Err(unsupported(format!("{} has no certificate of an authority", file.display())));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let versions = versions.map_err(|e| unsupported(format!("TLS cannot be set up: {e}")))?;
    let mut config = versions.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

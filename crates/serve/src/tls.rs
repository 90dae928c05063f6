//! TLS of a server: rustls with ring, as for loads.

use penstock::{Error, ErrorKind, Result};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::ServerConfig;
use std::path::Path;
use std::sync::Arc;

/// The configuration for this certificate chain and key.
///
/// # Errors
/// The error of the file, or `Invalid` for files that are no certificate, no key, or do not belong together.
pub(crate) fn config(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>> {
    let of_file = |path: &Path, e: pem::Error, what: &str| match e {
        pem::Error::Io(e) => Error::io("read this file", &e).at(path),
        e => Error::new(ErrorKind::Invalid, format!("this file has no {what} in PEM: {e}")).at(path),
    };
    let chain =
        CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    let chain = chain.map_err(|e| of_file(certificate, e, "certificate"))?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| of_file(key, e, "private key"))?;
    let invalid = |e: rustls::Error| {
        Error::new(ErrorKind::Invalid, format!("the certificate and the key {} cannot be used: {e}", key.display()))
            .at(certificate)
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = versions.map_err(invalid)?.with_no_client_auth().with_single_cert(chain, secret);
    let mut config = config.map_err(invalid)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

//! TLS of both ends: rustls with ring, as in Penstock.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::Path;
use std::sync::Arc;

/// The server's, with its certificate and key.
pub(crate) fn server(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivateKeyDer::from_pem_file(key).map_err(|e| format!("{}: {e}", key.display()))?;
    let versions = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = versions.map_err(|e| e.to_string())?.with_no_client_auth();
    config.with_single_cert(certificates(certificate)?, key).map(Arc::new).map_err(|e| e.to_string())
}

/// A client's that trusts the authorities in this file.
pub(crate) fn client(authority: &Path) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates(authority)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(Arc::new(versions.map_err(|e| e.to_string())?.with_root_certificates(roots).with_no_client_auth()))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let named = |e: rustls::pki_types::pem::Error| format!("{}: {e}", file.display());
    CertificateDer::pem_file_iter(file).map_err(named)?.collect::<Result<_, _>>().map_err(named)
}

//! Connections that are refused for good.

use super::trust::Distrust;
use super::tunnel;
use crate::error::{Error, ErrorKind};
use rustls::{CertificateError, OtherError};
use std::io;

/// The error if a connection is refused for good, by TLS or by a proxy.
pub(in crate::store::remote) fn refused(e: &io::Error) -> Option<Error> {
    refused_by_tls(e).or_else(|| tunnel::refused(e))
}

/// The error if it is TLS that does not trust the server: no further attempt changes that.
pub(in crate::store::remote) fn refused_by_tls(e: &io::Error) -> Option<Error> {
    let cause = e.get_ref()?.downcast_ref::<rustls::Error>()?;
    if let rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(why))) = cause {
        if let Some(Distrust(why)) = why.downcast_ref() {
            let text = format!(
                "the server's certificate is not trusted: {why}. If your own authority has signed it, or if it is \
                 self-signed, name the file with that certificate in SSL_CERT_FILE, or as ca in storage="
            );
            return Some(Error::new(ErrorKind::Io, text));
        }
    }
    Some(Error::new(ErrorKind::Io, "TLS with the server failed").caused_by(cause.clone()))
}

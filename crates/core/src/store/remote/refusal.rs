//! Connections that are refused for good.

use super::tunnel;
use crate::error::{Error, ErrorKind};
use std::io;

/// The error if a connection is refused for good, by TLS or by a proxy.
pub(super) fn refused(e: &io::Error) -> Option<Error> {
    refused_by_tls(e).or_else(|| tunnel::refused(e))
}

/// The error if it is TLS that does not trust the server: no further attempt changes that.
pub(super) fn refused_by_tls(e: &io::Error) -> Option<Error> {
    let cause = e.get_ref()?.downcast_ref::<rustls::Error>()?;
    let text = match cause {
        rustls::Error::InvalidCertificate(_) => {
            "the server's certificate is not trusted; if an authority of your own has signed it, name the file with its \
             certificate in SSL_CERT_FILE"
        }
        _ => "TLS with the server failed",
    };
    Some(Error::new(ErrorKind::Io, text).caused_by(cause.clone()))
}

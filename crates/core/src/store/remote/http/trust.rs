//! Trust in servers' certificates, and the rules that one may break.
//!
//! The rules are those of rustls and webpki: a trusted authority has signed the certificate, its dates and its name
//! hold. One more is trusted: a certificate that is itself in the list of trusted ones, byte for byte, as
//! `openssl req -x509` makes it for a server of one's own. Its dates and its name are checked as well; if it has no
//! list of names, its common name counts.

use super::certificate::Certificate;
use chrono::{DateTime, Utc};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_name, WebPkiServerVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature, CryptoProvider};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// Asked for by servers whose key is on P-521. Their certificate is refused then, by a name that a reader can do something with.
const P521: SignatureScheme = SignatureScheme::ECDSA_NISTP521_SHA512;

/// A reason to distrust a certificate.
#[derive(Debug)]
pub(super) struct Distrust(pub(super) String);

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Distrust {}

/// Checks certificates.
#[derive(Debug)]
pub(super) struct Trust {
    /// `None`: there are no authorities.
    authorities: Option<Arc<WebPkiServerVerifier>>,
    /// All that is trusted, byte for byte.
    trusted: HashSet<Vec<u8>>,
    provider: Arc<CryptoProvider>,
}

impl Trust {
    /// Trusts these certificates; `None` if there are none that could be.
    pub(super) fn of(certificates: Vec<CertificateDer<'static>>, provider: &Arc<CryptoProvider>) -> Option<Trust> {
        let trusted: HashSet<_> = certificates.iter().map(|certificate| certificate.to_vec()).collect();
        let mut roots = RootCertStore::empty();
        // Systems ship some that are too old to be understood. They are passed over.
        roots.add_parsable_certificates(certificates);
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
        let is_any = verifier.is_ok() || trusted.iter().any(|der| Certificate::parse(der).is_some());
        is_any.then(|| Trust { authorities: verifier.ok(), trusted, provider: provider.clone() })
    }
}

fn distrusted(why: impl Into<String>) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(Distrust(why.into())))))
}

impl ServerCertVerifier for Trust {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let known = Certificate::parse(certificate);
        if let Some(why) = known.as_ref().and_then(unsupported) {
            return Err(distrusted(why));
        }
        let by_authorities = self
            .authorities
            .as_ref()
            .map(|authorities| authorities.verify_server_cert(certificate, others, name, ocsp, now));
        let e = match by_authorities {
            Some(Ok(verified)) => return Ok(verified),
            Some(Err(e)) => e,
            None => Error::InvalidCertificate(CertificateError::UnknownIssuer),
        };
        let Some(known) = known else { return Err(distrusted(explained(&e, None, name))) };
        if !self.trusted.contains(&**certificate) {
            return Err(distrusted(explained(&e, Some(&known), name)));
        }
        match itself(certificate, &known, name, now) {
            Ok(()) => Ok(ServerCertVerified::assertion()),
            Err(why) => Err(distrusted(why)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let mut schemes = self.provider.signature_verification_algorithms.supported_schemes();
        schemes.push(P521);
        schemes
    }
}

/// A flaw that no setting permits.
fn unsupported(certificate: &Certificate) -> Option<String> {
    if certificate.version != 3 {
        let version = certificate.version;
        return Some(format!(
            "it is an X.509 version {version} certificate, and only version 3 is supported: make another one"
        ));
    }
    certificate
        .has_p521
        .then(|| "its key is on the curve P-521, which is not supported: make one on P-256 or P-384".to_owned())
}

/// The rules for a certificate that itself is trusted.
fn itself(der: &CertificateDer<'_>, known: &Certificate, name: &ServerName<'_>, now: UnixTime) -> Result<(), String> {
    let parsed = ParsedCertificate::try_from(der).map_err(|e| explained(&e, Some(known), name))?;
    if let Some(why) = untimely(known, now) {
        return Err(why);
    }
    if known.is_for_servers == Some(false) {
        return Err(NOT_FOR_SERVERS.to_owned());
    }
    if known.names.is_some() {
        return verify_server_name(&parsed, name).map_err(|e| explained(&e, Some(known), name));
    }
    let host = name.to_str().to_ascii_lowercase();
    if known.subject.iter().any(|common| is_named(&common.to_ascii_lowercase(), &host)) {
        return Ok(());
    }
    let names = known.subject.join(", ");
    Err(format!("its common name (CN) is {names:?}, it has no subjectAltName, and it is not for {host}"))
}

/// Whether a name, perhaps with `*` for its first part, is that of a host.
fn is_named(name: &str, host: &str) -> bool {
    match name.strip_prefix("*.") {
        Some(domain) => {
            domain.contains('.')
                && host.split_once('.').is_some_and(|(first, rest)| !first.is_empty() && rest == domain)
        }
        None => name == host,
    }
}

const NOT_FOR_SERVERS: &str = "it is not for servers (extendedKeyUsage has no serverAuth)";

fn untimely(known: &Certificate, now: UnixTime) -> Option<String> {
    let now = DateTime::<Utc>::from_timestamp(i64::try_from(now.as_secs()).ok()?, 0)?;
    let day = |when: DateTime<Utc>| when.format("%Y-%m-%d %H:%M UTC");
    if now > known.not_after {
        return Some(format!("it has expired: it was valid until {}", day(known.not_after)));
    }
    let early =
        format!("it is not valid yet, only from {} on: is the clock of this machine right?", day(known.not_before));
    (now < known.not_before).then_some(early)
}

/// The rule that a certificate breaks, in words.
fn explained(e: &Error, known: Option<&Certificate>, name: &ServerName<'_>) -> String {
    let (Error::InvalidCertificate(e), Some(known)) = (e, known) else { return format!("it is not understood ({e})") };
    let now = UnixTime::now();
    match e {
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => {
            untimely(known, now).unwrap_or_else(|| "another certificate of its chain has expired, or is not valid yet".to_owned())
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            let host = name.to_str();
            match &known.names {
                Some(names) => format!("it is for {}, and not for {host}", listed(names)),
                None => format!(
                    "it has no subjectAltName, so it names no host; its common name (CN {}) counts only if the trusted \
                     certificates contain this certificate",
                    listed(&known.subject)
                ),
            }
        }
        CertificateError::UnknownIssuer => format!("no trusted authority signed it (issuer: {})", listed(&known.issuer)),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => NOT_FOR_SERVERS.to_owned(),
        CertificateError::UnhandledCriticalExtension => "it has a critical extension that is not understood".to_owned(),
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "it, or an authority of its chain, is signed in a way that is not supported (such as SHA-1, or a key on P-521)".to_owned()
        }
        CertificateError::BadSignature => "a signature in its chain is wrong".to_owned(),
        CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
            format!("it is an authority's own certificate ({}), and not a trusted one", listed(&known.subject))
        }
        other => other.to_string(),
    }
}

/// Names, a few of them.
fn listed(names: &[String]) -> String {
    let plain = |name: &String| name.chars().filter(|c| !c.is_control()).take(80).collect::<String>();
    match names {
        [] => "an authority without a name".to_owned(),
        names => names.iter().take(4).map(plain).collect::<Vec<_>>().join(", "),
    }
}

/// Takes every certificate: `tls_verify=False`.
#[derive(Debug)]
pub(super) struct NoTrust(pub(super) Arc<CryptoProvider>);

impl ServerCertVerifier for NoTrust {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    /// A signature says nothing: a sender of another certificate could sign with its key.
    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let mut schemes = self.0.signature_verification_algorithms.supported_schemes();
        schemes.push(P521);
        schemes
    }
}

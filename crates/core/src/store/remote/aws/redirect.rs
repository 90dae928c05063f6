//! Places that a redirect of S3 names: whose they are, in which region, and whether they are signed already.

use super::settings::is_region;
use std::net::IpAddr;

/// Whether a query signs the request that has it: a redirect may lead to what such an address opens.
pub(super) fn is_signed(target: &str) -> bool {
    const SIGNING: [&str; 6] =
        ["x-amz-signature=", "x-amz-credential=", "x-amz-security-token=", "signature=", "sig=", "x-goog-signature="];
    let query = target.split_once('?').map_or("", |(_, query)| query).to_ascii_lowercase();
    query.split('&').any(|pair| SIGNING.iter().any(|name| pair.starts_with(name)))
}

/// Whether a host is one of Amazon's.
pub(super) fn is_of_amazon(host: &str) -> bool {
    host.ends_with(".amazonaws.com") || host.ends_with(".amazonaws.com.cn")
}

/// Whether a host is one of this machine or of a private network: by its address, or because its name has no domain.
fn is_private(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_private(),
        Ok(IpAddr::V6(ip)) => ip.is_loopback() || ip.is_unique_local(),
        Err(_) => !host.is_empty() && !host.contains('.'),
    }
}

/// Whether `other` is the host `own`, is below it, or has the same registered domain; or both are private: nodes of a cluster
/// are named so.
pub(super) fn is_same_service(own: &str, other: &str) -> bool {
    let is_ip = |host: &str| host.parse::<IpAddr>().is_ok();
    if own == other || (is_private(own) && is_private(other)) {
        return true;
    }
    if is_ip(own) || is_ip(other) {
        return false;
    }
    let is_below = |domain: &str| other.strip_suffix(domain).is_some_and(|head| head.ends_with('.'));
    is_below(own) || registered(own).is_some_and(|domain| domain == other || is_below(domain))
}

/// The last two labels of a host's name, or three where the last two stand above many owners (`co.uk`).
fn registered(host: &str) -> Option<&str> {
    const SHARED: [&str; 8] = ["ac", "co", "com", "edu", "gov", "ne", "net", "org"];
    let labels: Vec<&str> = host.split('.').collect();
    let [.., owner, top] = labels[..] else { return None };
    let count = if top.len() == 2 && SHARED.contains(&owner) { 3 } else { 2 };
    let before = labels.len().checked_sub(count)?;
    Some(&host[labels[..before].iter().map(|label| label.len() + 1).sum()..])
}

/// The region that the name of one of Amazon's hosts says.
pub(super) fn region_of(host: &str) -> Option<String> {
    let labels = host.strip_suffix(".cn").unwrap_or(host).strip_suffix(".amazonaws.com")?;
    let labels: Vec<&str> = labels.split('.').collect();
    let at = labels.iter().rposition(|label| *label == "s3" || label.starts_with("s3-"))?;
    let old = labels[at].strip_prefix("s3-").filter(|rest| *rest != "fips");
    let region = old.or_else(|| labels[at + 1..].iter().find(|label| **label != "dualstack").copied())?;
    is_region(region).then(|| region.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_domains() {
        for (host, expected) in [
            ("s3.example.com", Some("example.com")),
            ("a.b.shop.co.uk", Some("shop.co.uk")),
            ("shop.co.uk", Some("shop.co.uk")),
            ("co.uk", None),
            ("example.com", Some("example.com")),
            ("minio", None),
        ] {
            assert_eq!(registered(host), expected, "{host}");
        }
        assert!(is_same_service("127.0.0.1", "127.0.0.1") && !is_same_service("10.0.0.1", "20.0.0.1"));
        for (own, other) in
            [("127.0.0.1", "localhost"), ("10.0.0.1", "192.168.7.2"), ("minio1", "minio2"), ("::1", "fd00::2")]
        {
            assert!(is_same_service(own, other) && is_same_service(other, own), "{own} {other}");
        }
        for (own, other) in
            [("10.0.0.1", "169.254.169.254"), ("minio1", "cdn.example.com"), ("s3.example.com", "10.0.0.1")]
        {
            assert!(!is_same_service(own, other), "{own} {other}");
        }
        assert!(!is_same_service("::1", "::2") && !is_same_service("co.uk", "evil.com"));
    }
}

//! Where S3 and STS are: regions, partitions of AWS, variants of endpoints, and endpoints that somebody names.

use super::files::{nested, AwsFiles, ProfileValues};
use super::settings::{is_region, Addressing, S3Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::environment::{is_true, meant, Environment};
use crate::store::remote::http::address::Address;

const REGION: &str = "us-east-1";
/// The domains of AWS's partitions, by what their regions begin with.
const DOMAINS: [(&str, &str); 6] = [
    ("cn-", "amazonaws.com.cn"),
    ("us-iso-", "c2s.ic.gov"),
    ("us-isob-", "sc2s.sgov.gov"),
    ("us-isof-", "csp.hci.ic.gov"),
    ("eu-isoe-", "cloud.adc-e.uk"),
    ("eusc-", "amazonaws.eu"),
];

/// Where requests for S3 go.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct S3Place {
    pub(super) region: String,
    /// A server that somebody names, instead of AWS.
    pub(super) endpoint: Option<Address>,
    pub(super) variant: Variant,
    /// The addressing from settings or profile.
    pub(super) addressing: Option<Addressing>,
}

/// The variant of AWS's endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Variant {
    pub(super) fips: bool,
    pub(super) dualstack: bool,
}

impl S3Place {
    /// The place from settings, environment and profile, in this order.
    pub(super) fn of(settings: &S3Settings, environment: &Environment, files: &Profiles) -> Result<S3Place> {
        if settings.region.is_none() || settings.endpoint.is_none() {
            files.profile()?;
        }
        let (region, is_fips) = region_of(settings, environment, files)?;
        let endpoint = endpoint_of("s3", settings.endpoint.as_deref(), environment, files)?.map(|named| named.address);
        let says = |variable: &str, key: &str| environment.get(variable).or(files.found.get(key)).is_some_and(is_true);
        let variant = Variant {
            fips: is_fips || says("AWS_USE_FIPS_ENDPOINT", "use_fips_endpoint"),
            dualstack: says("AWS_USE_DUALSTACK_ENDPOINT", "use_dualstack_endpoint")
                || files.found.nested("s3", "use_dualstack_endpoint").is_some_and(is_true),
        };
        let addressing = settings.addressing.or_else(|| match files.found.nested("s3", "addressing_style") {
            Some("path") => Some(Addressing::Path),
            Some("virtual") => Some(Addressing::Virtual),
            _ => None,
        });
        if endpoint.is_none() && variant.fips && region.starts_with("cn-") {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "AWS has no FIPS endpoints in China: unset AWS_USE_FIPS_ENDPOINT, or use_fips_endpoint of the profile",
            ));
        }
        Ok(S3Place { region, endpoint, variant, addressing })
    }

    /// The server of S3 in a region.
    pub(super) fn host(&self, region: &str) -> String {
        let Variant { fips, dualstack } = self.variant;
        let name = if fips { "s3-fips" } else { "s3" };
        let stack = if dualstack { ".dualstack" } else { "" };
        if region == "aws-global" {
            // An alias, of the first region.
            return match fips || dualstack {
                true => format!("{name}{stack}.{REGION}.{}", domain(REGION)),
                false => format!("s3.{}", domain(REGION)),
            };
        }
        format!("{name}{stack}.{region}.{}", domain(region))
    }

    /// The region that signatures name.
    pub(super) fn signing(region: &str) -> &str {
        if region == "aws-global" {
            REGION
        } else {
            region
        }
    }

    /// Where STS is, and what names it, if something does.
    pub(super) fn sts(&self, environment: &Environment, files: &Profiles) -> Result<NamedEndpoint> {
        if let Some(named) = endpoint_of("sts", None, environment, files)? {
            return Ok(named);
        }
        let Variant { fips, dualstack } = self.variant;
        let region = S3Place::signing(&self.region);
        let name = if fips && !region.starts_with("us-gov-") { "sts-fips" } else { "sts" };
        let domain = match (dualstack, domain(region)) {
            (true, "amazonaws.com") => "api.aws",
            (true, "amazonaws.com.cn") => "api.amazonwebservices.com.cn",
            (_, domain) => domain,
        };
        let address = Address::parse(&format!("https://{name}.{region}.{domain}"))?;
        Ok(NamedEndpoint { address, origin: String::new() })
    }
}

/// Where S3 or STS is, and what names it, in words.
pub(in crate::store::remote) struct NamedEndpoint {
    pub(super) address: Address,
    pub(super) origin: String,
}

/// The configuration files, and the profile that is meant.
pub(super) struct Profiles {
    files: AwsFiles,
    pub(super) name: String,
    pub(super) found: ProfileValues,
    /// The source of the profile's name, if any.
    origin: Option<&'static str>,
}

impl Profiles {
    pub(super) fn read(settings: &S3Settings, environment: &Environment) -> Profiles {
        // In the order of botocore.
        let named = environment.named(&["AWS_DEFAULT_PROFILE", "AWS_PROFILE"]);
        let (name, origin) = match (&settings.profile, named) {
            (Some(name), _) => (name.as_str(), Some("profile in storage=")),
            (None, Some((variable, name))) => (name, Some(variable)),
            (None, None) => ("default", None),
        };
        let files = AwsFiles::read(environment);
        let found = files.profile(name);
        Profiles { files, name: name.to_owned(), found, origin }
    }

    /// The profile.
    ///
    /// # Errors
    /// `Invalid` if one is named that is in none of the files.
    pub(super) fn profile(&self) -> Result<&ProfileValues> {
        match self.origin {
            Some(origin) if !self.found.is_there => {
                let (name, looked) = (&self.name, self.files.paths.join(" or "));
                Err(Error::invalid(format!("there is no AWS profile {name:?} in {looked} ({origin} names it)")))
            }
            _ => Ok(&self.found),
        }
    }
}

pub(super) fn domain(region: &str) -> &'static str {
    DOMAINS.iter().find(|(start, _)| region.starts_with(start)).map_or("amazonaws.com", |(_, domain)| domain)
}

/// The region, and whether its name asks for the FIPS endpoint, as older programs write it.
fn region_of(settings: &S3Settings, environment: &Environment, files: &Profiles) -> Result<(String, bool)> {
    let named = environment.named(&["AWS_REGION", "AWS_DEFAULT_REGION"]);
    let (text, origin) = match (&settings.region, named) {
        (Some(text), _) => (meant(text), "region in storage=".to_owned()),
        (None, Some((variable, text))) => (text, variable.to_owned()),
        (None, None) => match files.profile()?.get("region") {
            Some(text) => (meant(text), format!("region of the AWS profile {:?}", files.name)),
            None => return Ok((REGION.to_owned(), false)),
        },
    };
    let region = text.strip_prefix("fips-").or(text.strip_suffix("-fips"));
    let (region, is_fips) = (region.unwrap_or(text), region.is_some());
    if !is_region(region) {
        let text =
            format!("{origin}: the region is empty, or has characters other than a-z, digits, '-': such as us-east-1");
        return Err(Error::invalid(text));
    }
    Ok((region.to_owned(), is_fips))
}

/// The endpoint that somebody names for a service: S3, or STS, which has no setting; and where it is named, in words.
fn endpoint_of(
    service: &str,
    given: Option<&str>,
    environment: &Environment,
    files: &Profiles,
) -> Result<Option<NamedEndpoint>> {
    let variables = match service {
        "s3" => ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"],
        _ => ["AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL"],
    };
    let name = &files.name;
    let ignored = environment.is_true("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
        || files.found.get("ignore_configured_endpoint_urls").is_some_and(is_true);
    let said = match (given, environment.named(&variables)) {
        (Some(text), _) => Some((text, "endpoint in storage=".to_owned())),
        _ if ignored => None,
        (None, Some((variable, text))) => Some((text, variable.to_owned())),
        (None, None) => None,
    };
    if let Some((text, origin)) = said {
        return parsed(service, text, &origin).map(Some);
    }
    if ignored {
        return Ok(None);
    }
    let profile = files.profile()?;
    if let Some(section) = profile.get("services") {
        let none = || {
            Error::invalid(format!(
                "the AWS profile {name:?} names the section [services {section}], which there is not"
            ))
        };
        let values = files.files.services(section).ok_or_else(none)?;
        if let Some(text) = values.get(service).and_then(|text| nested(text, "endpoint_url")) {
            return parsed(service, text, &format!("endpoint_url in [services {section}]")).map(Some);
        }
    }
    let origin = format!("endpoint_url of the AWS profile {name:?}");
    profile.get("endpoint_url").map(|text| parsed(service, text, &origin)).transpose()
}

fn parsed(service: &str, text: &str, origin: &str) -> Result<NamedEndpoint> {
    let service = if service == "s3" { "S3" } else { "STS" };
    let address = Address::parse(meant(text)).map_err(|e| {
        e.reworded(|why| format!("the endpoint for {service} ({origin}): {why}; give https://host or http://host:port"))
    })?;
    Ok(NamedEndpoint { address, origin: origin.to_owned() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn place(environment: &[(&str, &str)]) -> Result<(S3Place, Address)> {
        let environment = Environment::of(environment);
        let files = Profiles::read(&S3Settings::default(), &environment);
        let place = S3Place::of(&S3Settings::default(), &environment, &files)?;
        let sts = place.sts(&environment, &files)?;
        Ok((place, sts.address))
    }

    #[test]
    fn partitions_and_variants() {
        for (region, fips, dualstack, s3, sts) in [
            ("eu-west-1", "", "", "s3.eu-west-1.amazonaws.com", "sts.eu-west-1.amazonaws.com"),
            ("us-east-1", "true", "", "s3-fips.us-east-1.amazonaws.com", "sts-fips.us-east-1.amazonaws.com"),
            ("us-east-2", "", "true", "s3.dualstack.us-east-2.amazonaws.com", "sts.us-east-2.api.aws"),
            ("us-west-2", "True", "true", "s3-fips.dualstack.us-west-2.amazonaws.com", "sts-fips.us-west-2.api.aws"),
            ("fips-us-east-1", "", "", "s3-fips.us-east-1.amazonaws.com", "sts-fips.us-east-1.amazonaws.com"),
            ("us-gov-west-1", "true", "", "s3-fips.us-gov-west-1.amazonaws.com", "sts.us-gov-west-1.amazonaws.com"),
            ("cn-north-1", "", "", "s3.cn-north-1.amazonaws.com.cn", "sts.cn-north-1.amazonaws.com.cn"),
            (
                "cn-north-1",
                "",
                "true",
                "s3.dualstack.cn-north-1.amazonaws.com.cn",
                "sts.cn-north-1.api.amazonwebservices.com.cn",
            ),
            ("us-iso-east-1", "", "", "s3.us-iso-east-1.c2s.ic.gov", "sts.us-iso-east-1.c2s.ic.gov"),
            ("us-isob-east-1", "", "", "s3.us-isob-east-1.sc2s.sgov.gov", "sts.us-isob-east-1.sc2s.sgov.gov"),
            ("eusc-de-east-1", "", "", "s3.eusc-de-east-1.amazonaws.eu", "sts.eusc-de-east-1.amazonaws.eu"),
            ("aws-global", "", "", "s3.amazonaws.com", "sts.us-east-1.amazonaws.com"),
        ] {
            let environment =
                [("AWS_REGION", region), ("AWS_USE_FIPS_ENDPOINT", fips), ("AWS_USE_DUALSTACK_ENDPOINT", dualstack)];
            let (place, address) = place(&environment).unwrap();
            assert_eq!((&*place.host(&place.region), &*address.server.host), (s3, sts), "{environment:?}");
        }
        let e = place(&[("AWS_REGION", "cn-north-1"), ("AWS_USE_FIPS_ENDPOINT", "true")]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn errors_name_the_variable() {
        for (name, value) in [
            ("AWS_REGION", "us east"),
            ("AWS_DEFAULT_REGION", "us-east-1\" x"),
            ("AWS_REGION", "-"),
            ("AWS_ENDPOINT_URL", "h:1"),
            ("AWS_ENDPOINT_URL_S3", "http://1.2.3.999"),
            ("AWS_ENDPOINT_URL_STS", "http://1.2.3.4.5"),
            ("AWS_ENDPOINT_URL_STS", "ftp://h"),
            ("AWS_PROFILE", "nobody"),
        ] {
            let e = place(&[(name, value)]).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
            assert!(e.to_string().contains(name), "{e}");
        }
    }
}

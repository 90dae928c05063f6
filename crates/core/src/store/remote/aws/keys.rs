//! Where the tools of AWS look for credentials: environment, configuration files, and the services that a machine or a container
//! has.

use super::files::{value, Values};
use super::place::{domain, Profiles, S3Place};
use super::services::{full, relative, AwsService, Service, TOKEN_FILE};
use super::settings::S3Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::auth::credentials::{Finder, FoundKey, USABLE};
use crate::store::remote::auth::giver::{Giver, CALLABLE};
use crate::store::remote::environment::Environment;
use crate::store::remote::given::CredentialSource;
use crate::store::remote::http::address::Address;
use crate::store::remote::http::common::Common;
use crate::store::remote::secret::Secret;
use object_store::aws::AwsCredential;
use std::path::PathBuf;
use std::sync::Arc;

pub(in crate::store::remote) const VARIABLES: [&str; 30] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_STS",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "HOME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    TOKEN_FILE,
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_EC2_METADATA_DISABLED",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_IMDS_USE_IPV6",
];

/// The credential of requests, and their endpoint.
#[derive(PartialEq)]
pub(super) struct AwsKey {
    /// `None`: they are not signed.
    pub(in crate::store::remote) credential: Option<Arc<AwsCredential>>,
    pub(in crate::store::remote) place: S3Place,
}

type FoundCredential = FoundKey<Arc<AwsCredential>>;

/// Something that gives credentials.
pub(in crate::store::remote) enum Provider {
    /// A service of this machine, or STS.
    Service(Service),
    /// The program, or a library.
    Giver(Giver),
}

/// The settings of one store, and the environment that completes them.
#[derive(Debug)]
pub(super) struct Aws {
    pub(in crate::store::remote) settings: S3Settings,
    pub(in crate::store::remote) environment: Environment,
}

impl Finder for Aws {
    type Key = AwsKey;
    type Provider = Provider;

    fn find(&self, common: &Arc<Common>, provider: &mut Option<Provider>) -> Result<FoundKey<AwsKey>> {
        let files = Profiles::read(&self.settings, &self.environment);
        let place = S3Place::of(&self.settings, &self.environment, &files)?;
        if self.settings.anonymous {
            let key = AwsKey { credential: None, place };
            return Ok(FoundKey { key, origin: String::new(), usable: None, renewable: false });
        }
        let FoundKey { key, origin, usable, renewable } = self.credential(common, &files, &place, provider)?;
        Ok(FoundKey { key: AwsKey { credential: Some(key), place }, origin, usable, renewable })
    }
}

impl Aws {
    /// The servers among which a bucket's name is one bucket: an endpoint that somebody names, or a partition of AWS.
    pub(super) fn realm(&self) -> Option<String> {
        let place =
            S3Place::of(&self.settings, &self.environment, &Profiles::read(&self.settings, &self.environment)).ok()?;
        Some(match &place.endpoint {
            Some(Address { server, target }) => format!("{}{target}", server.origin()),
            None => domain(&place.region).to_owned(),
        })
    }

    fn credential(
        &self,
        common: &Arc<Common>,
        files: &Profiles,
        place: &S3Place,
        provider: &mut Option<Provider>,
    ) -> Result<FoundCredential> {
        if let Some(source) = &common.settings.credentials {
            let giver = || Provider::Giver(Giver::new(source.clone(), CALLABLE));
            provider.get_or_insert_with(giver);
        } else if let Some(found) = self.given()? {
            return Ok(found);
        }
        if provider.is_none() {
            match self.looked_for(files, place)? {
                Looked::Key(found) => return Ok(found),
                Looked::Provider(found) => *provider = Some(found),
                Looked::Nothing => return Err(self.none()),
            }
        }
        let service = match provider {
            Some(Provider::Service(service)) => service,
            Some(Provider::Giver(giver)) => return from_giver(giver, common.settings.credentials.is_none()),
            None => return Err(self.none()),
        };
        let origin = service.origin.clone();
        match service.credential(common) {
            Ok(credential) => {
                let key = checked(credential, &origin)?;
                Ok(FoundKey { key, origin, usable: Some(USABLE), renewable: true })
            }
            Err(e) => {
                let why = e.full_message();
                let e = match (service.is_machine(), e.kind()) {
                    (true, _) => self.none(),
                    (false, ErrorKind::Invalid) => Error::invalid("no credentials"),
                    (false, _) => Error::permission("no credentials"),
                };
                Err(e.reworded(|what| format!("{what}; {origin}: {why}")))
            }
        }
    }

    fn none(&self) -> Error {
        Error::permission(
            "no credentials for S3 were found: neither in storage=, nor in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor \
             in AWS's configuration files, nor from a service of this machine. For a public bucket give \
             storage={\"anonymous\": True}"
                .to_owned(),
        )
    }

    /// Credentials that need no request.
    fn given(&self) -> Result<Option<FoundCredential>> {
        let S3Settings { access_key_id, secret_access_key, session_token, profile, .. } = &self.settings;
        let (key_id, secret_key, token, origin) = match (access_key_id, secret_access_key) {
            (Some(id), Some(secret)) => {
                (id.as_str(), secret.shown(), session_token.as_ref().map(Secret::shown), "storage=")
            }
            (None, None) if profile.is_some() => return Ok(None),
            (None, None) => {
                // As for the tools of AWS, a secret alone is none.
                let Some(id) = self.environment.get("AWS_ACCESS_KEY_ID") else { return Ok(None) };
                let text = "AWS_ACCESS_KEY_ID is set, and AWS_SECRET_ACCESS_KEY is not: they belong together";
                let secret = self.environment.get("AWS_SECRET_ACCESS_KEY").ok_or_else(|| Error::invalid(text))?;
                let token = self.environment.first(&["AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN"]);
                (id, secret, token, "the variable AWS_ACCESS_KEY_ID")
            }
            _ => {
                return Err(Error::invalid(
                    "storage=: access_key_id and secret_access_key belong together, and one of them is missing",
                ))
            }
        };
        let (key_id, secret_key, token) = (key_id.to_owned(), secret_key.to_owned(), token.map(str::to_owned));
        let key = checked(Arc::new(AwsCredential { key_id, secret_key, token }), origin)?;
        Ok(Some(FoundKey { key, origin: origin.to_owned(), usable: None, renewable: false }))
    }

    /// Credentials from profile and environment, in the order of the tools of AWS.
    fn looked_for(&self, files: &Profiles, place: &S3Place) -> Result<Looked> {
        let (profile, name) = (files.profile()?, &files.name);
        let has = |keys: &[&'static str]| keys.iter().find(|key| profile.get(key).is_some()).copied();
        let giver = |key| Ok(Looked::Provider(Provider::Giver(self.giver(name, key)?)));
        let origin = format!("the AWS profile {name:?}");
        if let (Some(key), None) = (has(&["role_arn"]), profile.get("web_identity_token_file")) {
            return giver(key);
        }
        if let Some(found) = self.web_identity(files, place)? {
            return Ok(found);
        }
        if let Some(key) = has(&["sso_session", "sso_start_url"]) {
            return giver(key);
        }
        if let Some(found) = of_profile(&profile.credentials, &origin)? {
            return Ok(Looked::Key(found));
        }
        if let Some(key) = has(&["login_session", "credential_process"]) {
            return giver(key);
        }
        if let Some(found) = of_profile(&profile.config, &origin)? {
            return Ok(Looked::Key(found));
        }
        if let Some(found) = self.container()? {
            return Ok(found);
        }
        self.instance()
    }

    /// A role for the token in a file: of the environment, except where a profile is given in code, or of the profile.
    fn web_identity(&self, files: &Profiles, place: &S3Place) -> Result<Option<Looked>> {
        let of = |variable: &'static str, key: &str| {
            let found = self.environment.get(variable).filter(|_| self.settings.profile.is_none());
            found.or(files.found.get(key)).map(str::to_owned)
        };
        let Some(file) = of("AWS_WEB_IDENTITY_TOKEN_FILE", "web_identity_token_file") else { return Ok(None) };
        let Some(role) = of("AWS_ROLE_ARN", "role_arn") else {
            let text =
                "AWS_WEB_IDENTITY_TOKEN_FILE is set, or web_identity_token_file of the profile, and no role: set \
                        AWS_ROLE_ARN, or role_arn of the profile";
            return Err(Error::invalid(text));
        };
        let session = of("AWS_ROLE_SESSION_NAME", "role_session_name").unwrap_or_else(|| "penstock".to_owned());
        let sts = place.sts(&self.environment, files)?;
        let of_environment = self.environment.get("AWS_ROLE_ARN").is_some() && self.settings.profile.is_none();
        let origin = match of_environment {
            true => "the role of AWS_ROLE_ARN".to_owned(),
            false => format!("the role of the AWS profile {:?}", files.name),
        };
        let service = Service::new(AwsService::WebIdentity { file, role, session, sts }, &origin);
        Ok(Some(Looked::Provider(Provider::Service(service))))
    }

    fn container(&self) -> Result<Option<Looked>> {
        let of = |name| self.environment.get(name).map(str::to_owned);
        let (at, origin) = if let Some(path) = of("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") {
            (relative(&path)?, "the task role of this container (AWS_CONTAINER_CREDENTIALS_RELATIVE_URI)")
        } else if let Some(uri) = of("AWS_CONTAINER_CREDENTIALS_FULL_URI") {
            (full(&uri)?, "the identity of this pod (AWS_CONTAINER_CREDENTIALS_FULL_URI)")
        } else {
            return Ok(None);
        };
        let token = self.environment.named(&[TOKEN_FILE, "AWS_CONTAINER_AUTHORIZATION_TOKEN"]);
        let token = token.map(|(variable, value)| (variable, value.to_owned()));
        Ok(Some(Looked::Provider(Provider::Service(Service::new(AwsService::Container(at, token), origin)))))
    }

    fn instance(&self) -> Result<Looked> {
        if self.environment.is_true("AWS_EC2_METADATA_DISABLED") {
            return Ok(Looked::Nothing);
        }
        const VARIABLE: &str = "AWS_EC2_METADATA_SERVICE_ENDPOINT";
        let mode = self.environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE").unwrap_or_default();
        let usual = match mode.eq_ignore_ascii_case("ipv6") || self.environment.is_true("AWS_IMDS_USE_IPV6") {
            true => "http://[fd00:ec2::254]",
            false => "http://169.254.169.254",
        };
        let at = Address::parse(self.environment.get(VARIABLE).unwrap_or(usual))
            .map_err(|e| e.reworded(|why| format!("{VARIABLE}: {why}")))?;
        Ok(Looked::Provider(Provider::Service(Service::new(AwsService::Machine(at), INSTANCE))))
    }

    /// The giver for a profile that takes its credentials from `key`.
    fn giver(&self, profile: &str, key: &str) -> Result<Giver> {
        let Some(profiles) = self.settings.profiles else {
            let text =
                format!("the AWS profile {profile:?} takes its credentials from {key}, which is not supported here");
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        let origin = format!("the AWS profile {profile:?} ({key}, by botocore)");
        Ok(Giver::new(CredentialSource((profiles.0)(profile)), origin))
    }
}

/// The certificates to trust that the tools of AWS would take.
pub(in crate::store::remote) fn authorities(settings: &S3Settings, environment: &Environment) -> Option<PathBuf> {
    let of_profile = || Profiles::read(settings, environment).found.get("ca_bundle").map(PathBuf::from);
    let named = environment.get("AWS_CA_BUNDLE").map(PathBuf::from).or_else(of_profile);
    named.or_else(|| environment.get("REQUESTS_CA_BUNDLE").map(PathBuf::from))
}

const INSTANCE: &str = "the role of this machine";

/// Credentials from profile and environment.
enum Looked {
    Key(FoundCredential),
    Provider(Provider),
    Nothing,
}

/// The keys in one file's section of a profile.
fn of_profile(values: &Values, origin: &str) -> Result<Option<FoundCredential>> {
    let of = |key| value(values, key).map(str::to_owned);
    let Some(key_id) = of("aws_access_key_id") else { return Ok(None) };
    let Some(secret_key) = of("aws_secret_access_key") else {
        return Err(Error::invalid(format!(
            "{origin} has aws_access_key_id, and no aws_secret_access_key: they belong together"
        )));
    };
    let token = of("aws_security_token").or_else(|| of("aws_session_token"));
    let key = checked(Arc::new(AwsCredential { key_id, secret_key, token }), origin)?;
    Ok(Some(FoundKey { key, origin: origin.to_owned(), usable: None, renewable: true }))
}

/// `fades`: it may give others before anybody knows that those are no longer valid.
fn from_giver(giver: &mut Giver, fades: bool) -> Result<FoundCredential> {
    let given = giver.credentials()?;
    let (Some(key_id), Some(secret)) = (given.access_key_id, given.secret_access_key) else {
        let text = format!("{} gave no access_key_id and secret_access_key, which S3 needs", giver.origin);
        return Err(Error::invalid(text));
    };
    let token = given.session_token.map(|token| token.shown().to_owned());
    let key = checked(Arc::new(AwsCredential { key_id, secret_key: secret.shown().to_owned(), token }), &giver.origin)?;
    Ok(FoundKey {
        key,
        origin: giver.origin.clone(),
        usable: giver.left().or(fades.then_some(USABLE)),
        renewable: true,
    })
}

/// The credential, if requests can carry it.
fn checked(credential: Arc<AwsCredential>, origin: &str) -> Result<Arc<AwsCredential>> {
    let fits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    if !fits(&credential.key_id) || !credential.token.as_deref().is_none_or(fits) || credential.secret_key.is_empty() {
        return Err(Error::invalid(format!(
            "the access key or the session token from {origin} is empty, or has spaces or control characters"
        )));
    }
    Ok(credential)
}

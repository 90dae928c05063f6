//! Where the tools of AWS look for credentials, region and endpoint: environment, configuration files, and the services that
//! a machine or a container has.

use super::control::{block_on, Control};
use super::credentials::{Finder, FoundKey, USABLE};
use super::environment::Environment;
use super::given::{CredentialSource, Giver, CALLABLE};
use super::net::Common;
use super::settings::S3Settings;
use crate::error::{Error, ErrorKind, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential, AwsCredentialProvider};
use object_store::{BackoffConfig, RetryConfig};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const REGION: &str = "us-east-1";
/// For services of this machine: away from AWS nobody answers.
const QUICK: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) const VARIABLES: [&str; 21] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_STS",
    "AWS_CA_BUNDLE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "HOME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_EC2_METADATA_DISABLED",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
];

/// What requests are signed with, and where they go.
#[derive(PartialEq)]
pub(super) struct AwsKey {
    /// `None`: they are not signed.
    pub(super) credential: Option<Arc<AwsCredential>>,
    pub(super) region: String,
    pub(super) endpoint: Option<String>,
}

type FoundCredential = FoundKey<Arc<AwsCredential>>;

/// Something that gives credentials.
pub(super) enum Provider {
    /// A service of this machine, or STS.
    Service { provider: AwsCredentialProvider, control: Control, origin: String },
    /// The program, or a library.
    Giver(Giver),
}

/// The settings of one store, and the environment that completes them.
#[derive(Debug)]
pub(super) struct Aws {
    pub(super) settings: S3Settings,
    pub(super) environment: Environment,
}

impl Finder for Aws {
    type Key = AwsKey;
    type Provider = Provider;

    fn find(&self, common: &Arc<Common>, provider: &mut Option<Provider>) -> Result<FoundKey<AwsKey>> {
        let (region, endpoint) = self.place()?;
        if self.settings.anonymous {
            let key = AwsKey { credential: None, region, endpoint };
            return Ok(FoundKey { key, origin: String::new(), fades: false, renewable: false });
        }
        let FoundKey { key, origin, fades, renewable } = self.credential(common, provider)?;
        Ok(FoundKey { key: AwsKey { credential: Some(key), region, endpoint }, origin, fades, renewable })
    }

    fn left(&self, provider: &Option<Provider>) -> Duration {
        match provider {
            Some(Provider::Giver(giver)) => giver.left().unwrap_or(USABLE),
            _ => USABLE,
        }
    }
}

impl Aws {
    fn credential(&self, common: &Arc<Common>, provider: &mut Option<Provider>) -> Result<FoundCredential> {
        if let Some(source) = &common.settings.credentials {
            let giver = || Provider::Giver(Giver::new(source.clone(), CALLABLE));
            provider.get_or_insert_with(giver);
        } else if let Some(found) = self.given()? {
            return Ok(found);
        }
        if provider.is_none() {
            *provider = self.web_identity(common)?;
        }
        if provider.is_none() {
            let Profile { name, credential, needs, .. } = self.profile()?;
            if let Some(found) = credential {
                return Ok(found);
            }
            *provider = match needs {
                Some(key) => Some(Provider::Giver(self.giver(&name, key)?)),
                None => match self.container(common)? {
                    Some(found) => Some(found),
                    None => self.instance(common)?,
                },
            };
        }
        let (gives, control, origin) = match provider {
            Some(Provider::Service { provider, control, origin }) => (provider, control, origin),
            Some(Provider::Giver(giver)) => return from_giver(giver, common.settings.credentials.is_none()),
            None => return Err(self.none()),
        };
        match block_on(gives.get_credential())? {
            Ok(credential) => {
                Ok(FoundKey { key: checked(credential, origin)?, origin: origin.clone(), fades: true, renewable: true })
            }
            Err(_) => {
                let why = match control.last() {
                    Some(Ok(answer)) => format!("it answered {}", answer.shown()),
                    Some(Err(e)) => e.full_message(),
                    None => "its answer is not understood, or a token file cannot be read".to_owned(),
                };
                let e = if origin.as_str() == INSTANCE { self.none() } else { denied(String::from("no credentials")) };
                Err(e.reworded(|what| format!("{what}; {origin}: {why}")))
            }
        }
    }

    fn none(&self) -> Error {
        denied(
            "no credentials for S3 were found: neither in storage=, nor in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor \
             in AWS's configuration files, nor from a service of this machine. For a public bucket give \
             storage={\"anonymous\": True}"
                .to_owned(),
        )
    }

    /// What needs no question.
    fn given(&self) -> Result<Option<FoundCredential>> {
        let S3Settings { access_key_id, secret_access_key, session_token, profile, .. } = &self.settings;
        let (id, secret, token, origin) =
            match (access_key_id, secret_access_key) {
                (Some(id), Some(secret)) => {
                    let token = session_token.as_ref().map(|token| token.shown().to_owned());
                    (id.clone(), secret.shown().to_owned(), token, "storage=")
                }
                (None, None) if profile.is_some() => return Ok(None),
                (None, None) => {
                    match (self.environment.get("AWS_ACCESS_KEY_ID"), self.environment.get("AWS_SECRET_ACCESS_KEY")) {
                        (Some(id), Some(secret)) => {
                            let token = self.environment.get("AWS_SESSION_TOKEN").map(str::to_owned);
                            (id.to_owned(), secret.to_owned(), token, "the variable AWS_ACCESS_KEY_ID")
                        }
                        (None, None) => return Ok(None),
                        _ => return Err(invalid(
                            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY belong together, and one of them is not set",
                        )),
                    }
                }
                _ => {
                    return Err(invalid(
                        "storage=: access_key_id and secret_access_key belong together, and one of them is missing",
                    ))
                }
            };
        let key = checked(Arc::new(AwsCredential { key_id: id, secret_key: secret, token }), origin)?;
        Ok(Some(FoundKey { key, origin: origin.to_owned(), fades: false, renewable: false }))
    }

    fn provider(
        &self,
        common: &Arc<Common>,
        patience: Duration,
        origin: &str,
        settings: &[(AmazonS3ConfigKey, &str)],
    ) -> Result<Option<Provider>> {
        let control = Control::new(common, patience);
        let control = if patience == QUICK { control.direct() } else { control };
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name("none")
            .with_region(self.settings.region.as_deref().or(self.region_of_environment()).unwrap_or(REGION))
            .with_retry(retries(if patience == QUICK { 1 } else { 3 }))
            .with_http_connector(control.clone());
        for (key, value) in settings {
            builder = builder.with_config(*key, *value);
        }
        let store =
            builder.build().map_err(|_| invalid("the settings of AWS for credentials contradict each other"))?;
        let provider = store.credentials().clone();
        Ok(Some(Provider::Service { provider, control, origin: origin.to_owned() }))
    }

    fn web_identity(&self, common: &Arc<Common>) -> Result<Option<Provider>> {
        let of = |name| self.environment.get(name);
        let (Some(file), Some(role), None) =
            (of("AWS_WEB_IDENTITY_TOKEN_FILE"), of("AWS_ROLE_ARN"), &self.settings.profile)
        else {
            return Ok(None);
        };
        let mut settings = vec![(AmazonS3ConfigKey::WebIdentityTokenFile, file), (AmazonS3ConfigKey::RoleArn, role)];
        settings.extend(of("AWS_ENDPOINT_URL_STS").map(|url| (AmazonS3ConfigKey::StsEndpoint, url)));
        self.provider(common, PATIENCE, "the role of AWS_ROLE_ARN", &settings)
    }

    fn container(&self, common: &Arc<Common>) -> Result<Option<Provider>> {
        let of = |name| self.environment.get(name);
        if let Some(path) = of("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") {
            let settings = [(AmazonS3ConfigKey::ContainerCredentialsRelativeUri, path)];
            return self.provider(common, QUICK, "the task role of this container", &settings);
        }
        let uri = of("AWS_CONTAINER_CREDENTIALS_FULL_URI");
        let (Some(uri), Some(file)) = (uri, of("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")) else { return Ok(None) };
        let settings = [
            (AmazonS3ConfigKey::ContainerCredentialsFullUri, uri),
            (AmazonS3ConfigKey::ContainerAuthorizationTokenFile, file),
        ];
        self.provider(common, QUICK, "the identity of this pod", &settings)
    }

    fn instance(&self, common: &Arc<Common>) -> Result<Option<Provider>> {
        if self.environment.get("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let endpoint = self.environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT").map(|url| url.trim_end_matches('/'));
        let settings: Vec<_> = endpoint.map(|url| (AmazonS3ConfigKey::MetadataEndpoint, url)).into_iter().collect();
        self.provider(common, QUICK, INSTANCE, &settings)
    }

    /// What gives the credentials of a profile that takes them from `key`.
    fn giver(&self, profile: &str, key: &str) -> Result<Giver> {
        let Some(profiles) = self.settings.profiles else {
            let text =
                format!("the AWS profile {profile:?} takes its credentials from {key}, which is not supported here");
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        let origin = format!("the AWS profile {profile:?} ({key}, by botocore)");
        Ok(Giver::new(CredentialSource((profiles.0)(profile)), origin))
    }

    fn region_of_environment(&self) -> Option<&str> {
        self.environment.first(&["AWS_REGION", "AWS_DEFAULT_REGION"])
    }

    /// Region and endpoint. Reads the configuration files where something is missing.
    fn place(&self) -> Result<(String, Option<String>)> {
        let region = self.settings.region.as_deref().or(self.region_of_environment());
        let variables = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
        let endpoint = self.settings.endpoint.as_deref().or(self.environment.first(&variables));
        if let (Some(region), Some(endpoint)) = (region, endpoint) {
            return Ok((region.to_owned(), Some(endpoint.to_owned())));
        }
        let profile = self.profile()?;
        let region = region.map(str::to_owned).or(profile.region).unwrap_or_else(|| REGION.to_owned());
        Ok((region, endpoint.map(str::to_owned).or(profile.endpoint)))
    }

    /// What the profile says.
    fn profile(&self) -> Result<Profile> {
        let named =
            self.settings.profile.as_deref().or(self.environment.first(&["AWS_PROFILE", "AWS_DEFAULT_PROFILE"]));
        let name = named.unwrap_or("default");
        let file = |variable: &str, usual: &str| {
            let home = || self.environment.get("HOME").map(|home| Path::new(home).join(".aws").join(usual));
            self.environment.get(variable).map(PathBuf::from).or_else(home)
        };
        let files = [file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), file("AWS_CONFIG_FILE", "config")];
        let mut values = BTreeMap::new();
        let mut there = false;
        for file in files.iter().flatten() {
            // What cannot be read is not there, as for the tools of AWS.
            let text = std::fs::read_to_string(file).unwrap_or_default();
            if let Some(found) = section(&text, name) {
                there = true;
                for (key, value) in found {
                    values.entry(key).or_insert(value);
                }
            }
        }
        if !there && named.is_some() {
            let looked: Vec<_> = files.iter().flatten().map(|file| file.display().to_string()).collect();
            return Err(invalid(&format!("there is no AWS profile {name:?} in {}", looked.join(" or "))));
        }
        let origin = format!("the AWS profile {name:?}");
        let of = |key: &str| values.get(key).filter(|value| !value.is_empty()).cloned();
        let credential = match (of("aws_access_key_id"), of("aws_secret_access_key")) {
            (Some(key_id), Some(secret_key)) => {
                let token = of("aws_session_token");
                let key = checked(Arc::new(AwsCredential { key_id, secret_key, token }), &origin)?;
                Some(FoundKey { key, origin, fades: false, renewable: true })
            }
            _ => None,
        };
        // The tools of AWS take a role or SSO rather than keys of the same profile, and keys rather than a process.
        let has = |keys: &[&'static str]| keys.iter().find(|key| of(key).is_some()).copied();
        let first = has(&["role_arn", "sso_session", "sso_start_url"]);
        let credential = credential.filter(|_| first.is_none());
        let needs = first.or(has(&["credential_process"])).filter(|_| credential.is_none());
        Ok(Profile { name: name.to_owned(), credential, region: of("region"), endpoint: of("endpoint_url"), needs })
    }
}

const INSTANCE: &str = "the role of this machine";

struct Profile {
    name: String,
    credential: Option<FoundCredential>,
    region: Option<String>,
    endpoint: Option<String>,
    /// The key in it that says where others give its credentials.
    needs: Option<&'static str>,
}

/// `fades`: it may give others before anybody knows that those are no longer valid.
fn from_giver(giver: &mut Giver, fades: bool) -> Result<FoundCredential> {
    let given = giver.credentials()?;
    let (Some(key_id), Some(secret)) = (given.access_key_id, given.secret_access_key) else {
        let text = format!("{} gave no access_key_id and secret_access_key, which S3 needs", giver.origin);
        return Err(invalid(&text));
    };
    let token = given.session_token.map(|token| token.shown().to_owned());
    let key = checked(Arc::new(AwsCredential { key_id, secret_key: secret.shown().to_owned(), token }), &giver.origin)?;
    Ok(FoundKey { key, origin: giver.origin.clone(), fades: fades || giver.left().is_some(), renewable: true })
}

/// The keys of a profile in a configuration file; `None` if the file does not have it.
fn section(text: &str, name: &str) -> Option<BTreeMap<String, String>> {
    let mut found = None;
    let mut inside = false;
    for line in text.lines() {
        if let Some(header) = line.trim().strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            let header = header.trim();
            inside = header == name
                || header.strip_prefix("profile").is_some_and(|rest| rest.trim_matches([' ', '\t', '"']) == name);
            if inside {
                found.get_or_insert_with(BTreeMap::new);
            }
        } else if let (true, false, Some((key, value))) =
            (inside, line.starts_with([' ', '\t', '#', ';']), line.split_once('='))
        {
            if let Some(found) = &mut found {
                found.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
            }
        }
    }
    found
}

/// The credential, if requests can carry it.
fn checked(credential: Arc<AwsCredential>, origin: &str) -> Result<Arc<AwsCredential>> {
    let fits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    if !fits(&credential.key_id) || !credential.token.as_deref().is_none_or(fits) || credential.secret_key.is_empty() {
        return Err(invalid(&format!(
            "the access key or the session token from {origin} is empty, or has spaces or controls in it"
        )));
    }
    Ok(credential)
}

pub(super) fn retries(most: usize) -> RetryConfig {
    let (init_backoff, max_backoff) = (Duration::from_millis(100), Duration::from_secs(2));
    let backoff = BackoffConfig { init_backoff, max_backoff, base: 2.0 };
    RetryConfig { backoff, max_retries: most, retry_timeout: 2 * PATIENCE }
}

fn denied(text: String) -> Error {
    Error::new(ErrorKind::Permission, text)
}

fn invalid(text: &str) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

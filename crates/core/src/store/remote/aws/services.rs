//! Services that give credentials of AWS: STS for a web identity, that of a container or a pod, and that of a machine.

use super::place::NamedEndpoint;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::auth::giver::MARGIN;
use crate::store::remote::auth::tokens::{ask_again, form, PATIENCE, QUICK, TRIES};
use crate::store::remote::http::address::Address;
use crate::store::remote::http::answer::Answer;
use crate::store::remote::http::common::Common;
use crate::store::remote::http::control::Control;
use crate::store::remote::http::xml::unescaped;
use chrono::DateTime;
use http::request::Builder;
use http::Request;
use object_store::aws::AwsCredential;
use object_store::client::HttpRequestBody;
use serde::Deserialize;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Credentials that do not say how long they are valid are asked for again after so long.
const UNSAID: Duration = Duration::from_secs(900);
/// The credential server of Amazon's containers.
const CONTAINERS: &str = "http://169.254.170.2";
/// The hosts that get a container's token without TLS, besides this machine.
const NEAR: [&str; 3] = ["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// A service that gives credentials.
pub(in crate::store::remote) enum AwsService {
    /// A role that a web identity takes: the file with its token, the role, the name of the session, and where STS is.
    WebIdentity { file: String, role: String, session: String, sts: NamedEndpoint },
    /// The service of a container.
    Container(Address, Option<ContainerToken>),
    /// The metadata service of a machine.
    Machine(Address),
}

/// The token for the service of a container, or its file: the variable that says it, and the value of that.
pub(super) type ContainerToken = (&'static str, String);
/// The variable that names a file.
pub(super) const TOKEN_FILE: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";

/// A service, and what it gave last.
pub(in crate::store::remote) struct Service {
    source: AwsService,
    /// Its name, in words.
    pub(super) origin: String,
    last: Option<(Arc<AwsCredential>, Instant)>,
}

impl Service {
    pub(super) fn new(source: AwsService, origin: &str) -> Service {
        Service { source, origin: origin.to_owned(), last: None }
    }

    pub(super) fn is_machine(&self) -> bool {
        matches!(self.source, AwsService::Machine(_))
    }

    /// Credentials that are valid for some minutes. Blocks.
    ///
    /// # Errors
    /// The reason for which there are none. No message shows the service's answer.
    pub(super) fn credential(&mut self, common: &Arc<Common>) -> Result<Arc<AwsCredential>> {
        if let Some((credential, until)) = &self.last {
            if Instant::now() < *until {
                return Ok(credential.clone());
            }
        }
        let (credential, expires) = match &self.source {
            AwsService::WebIdentity { file, role, session, sts } => web_identity(common, file, role, session, sts)?,
            AwsService::Container(at, token) => container(common, at, token.as_ref())?,
            AwsService::Machine(at) => machine(common, at)?,
        };
        let left = expires.map_or(UNSAID, |when| when.duration_since(SystemTime::now()).unwrap_or_default());
        let left = left.min(Duration::from_secs(1 << 30));
        let credential = Arc::new(credential);
        self.last = Some((credential.clone(), Instant::now() + left - MARGIN.min(left / 2)));
        Ok(credential)
    }
}

/// A credential, and when it expires.
type Issued = (AwsCredential, Option<SystemTime>);

/// The answer of a container's or a machine's service.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answered {
    access_key_id: Option<String>,
    secret_access_key: Option<String>,
    token: Option<String>,
    expiration: Option<String>,
}

/// Where the service of a container is that `AWS_CONTAINER_CREDENTIALS_RELATIVE_URI` names.
pub(super) fn relative(path: &str) -> Result<Address> {
    if path.contains("://") {
        let text =
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI is a whole address: set AWS_CONTAINER_CREDENTIALS_FULL_URI instead";
        return Err(Error::invalid(text));
    }
    Address::parse(&format!("{CONTAINERS}/{}", path.trim_start_matches('/')))
}

/// Where the service of a container is that `AWS_CONTAINER_CREDENTIALS_FULL_URI` names.
pub(super) fn full(uri: &str) -> Result<Address> {
    let wrong = |why: &str| format!("AWS_CONTAINER_CREDENTIALS_FULL_URI: {why}");
    let address = Address::parse(uri).map_err(|e| e.reworded(|why| wrong(why)))?;
    let is_near = |ip: IpAddr| NEAR.iter().any(|near| near.parse() == Ok(ip));
    if address.server.keeps_secrets() || address.server.ip().is_some_and(is_near) {
        return Ok(address);
    }
    let text = "without TLS it may only name this machine, or 169.254.170.2, 169.254.170.23 or [fd00:ec2::23], because a token \
                would be readable on the way: give an https:// address";
    Err(Error::invalid(wrong(text)))
}

/// Asks, several times if there is no answer, or one that may be another the next time. Other answers than 200 are errors.
fn asked(control: &Control, tries: u32, request: Builder, body: String) -> Result<Vec<u8>> {
    let no_request = |_| Error::invalid("its settings do not make a valid request");
    let request: Request<HttpRequestBody> = request.body(body.into()).map_err(no_request)?;
    match ask_again(control, &request, tries, |e| e.kind() == ErrorKind::Io)? {
        (200, body) => Ok(body),
        (status, body) => {
            let answer = Answer::of(status, &[], &body);
            Err(Error::permission(format!("it answered {}", answer.shown())).answered(status, None))
        }
    }
}

fn uri(at: &Address, path: &str) -> String {
    format!("{}{}{path}", at.server.origin(), at.target.trim_end_matches('/'))
}

fn web_identity(common: &Arc<Common>, file: &str, role: &str, session: &str, sts: &NamedEndpoint) -> Result<Issued> {
    let NamedEndpoint { address: sts, origin } = sts;
    if !common.keeps_secrets(&sts.server) {
        return Err(Error::invalid(format!(
            "the endpoint for STS ({origin}) is http://, and the token of the web identity would be readable on the way: give an \
             https:// address; AWS_ENDPOINT_URL_STS names that of STS alone"
        )));
    }
    let read = std::fs::read_to_string(file);
    let token = read.map_err(|e| Error::io(&format!("read the token file {file}"), &e))?;
    let fields = [
        ("Action", "AssumeRoleWithWebIdentity"),
        ("Version", "2011-06-15"),
        ("RoleArn", role),
        ("RoleSessionName", session),
        ("WebIdentityToken", token.trim()),
    ];
    let request = Request::post(format!("{}{}?{}", sts.server.origin(), sts.target, form(&fields)));
    let body = asked(&Control::new(common, PATIENCE), TRIES, request, String::new())?;
    let text = String::from_utf8_lossy(&body);
    let of = |name: &str| {
        let (_, rest) = text.split_once("<Credentials>")?.1.split_once(&format!("<{name}>"))?;
        let (found, _) = rest.split_once(&format!("</{name}>"))?;
        Some(unescaped(found.trim()).into_owned())
    };
    made(of("AccessKeyId"), of("SecretAccessKey"), of("SessionToken"), of("Expiration"))
}

fn container(common: &Arc<Common>, at: &Address, token: Option<&ContainerToken>) -> Result<Issued> {
    let mut request = Request::get(uri(at, "")).header("accept", "application/json");
    if let Some(token) = token {
        let (variable, value) = token;
        let token = match *variable {
            TOKEN_FILE => std::fs::read_to_string(value)
                .map_err(|e| Error::io(&format!("read the token file {value} ({variable})"), &e))?,
            _ => value.clone(),
        };
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|b| (b' '..=b'~').contains(&b)) {
            let text = format!("the token of {variable} is empty, or has characters that are not visible ASCII");
            return Err(Error::invalid(text));
        }
        request = request.header("authorization", token);
    }
    answered(&asked(&Control::new(common, QUICK).direct(), 2, request, String::new())?)
}

fn machine(common: &Arc<Common>, at: &Address) -> Result<Issued> {
    const FIELD: &str = "x-aws-ec2-metadata-token";
    let control = Control::new(common, QUICK).direct();
    let request = Request::put(uri(at, "/latest/api/token")).header("x-aws-ec2-metadata-token-ttl-seconds", "600");
    let token = match asked(&control, 2, request, String::new()) {
        Ok(token) => Some(String::from_utf8_lossy(&token).trim().to_owned()),
        // An older service has none.
        Err(e) if e.status().is_some_and(|status| [403, 404, 405].contains(&status)) => None,
        Err(e) => return Err(e),
    };
    let get = |path: &str| {
        let request = Request::get(uri(at, &format!("/latest/meta-data/iam/security-credentials/{path}")));
        let request = token.iter().fold(request, |request, token| request.header(FIELD, token));
        asked(&control, 2, request, String::new())
    };
    let roles = get("")?;
    let roles = String::from_utf8_lossy(&roles);
    let role = roles.lines().next().unwrap_or_default().trim();
    if role.is_empty() {
        return Err(Error::permission("this machine has no role"));
    }
    answered(&get(&crate::store::remote::http::escaping::escaped(role))?)
}

fn answered(body: &[u8]) -> Result<Issued> {
    let Ok(Answered { access_key_id, secret_access_key, token, expiration }) = serde_json::from_slice(body) else {
        return Err(Error::permission("its answer is not understood"));
    };
    made(access_key_id, secret_access_key, token, expiration)
}

fn made(id: Option<String>, secret: Option<String>, token: Option<String>, expires: Option<String>) -> Result<Issued> {
    let (Some(key_id), Some(secret_key)) = (id, secret) else {
        return Err(Error::permission("its answer has no AccessKeyId and SecretAccessKey"));
    };
    let expires = expires.as_deref().and_then(|text| DateTime::parse_from_rfc3339(text).ok());
    let token = token.filter(|token| !token.is_empty());
    Ok((AwsCredential { key_id, secret_key, token }, expires.map(SystemTime::from)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_web_identity_goes_where_it_stays_secret() {
        let file = std::env::temp_dir().join(format!("penstock-web-identity-{}", std::process::id()));
        std::fs::write(&file, "token").unwrap();
        let file_name = file.to_str().unwrap();
        let asked = |at: &str| {
            let place = NamedEndpoint { address: Address::parse(at).unwrap(), origin: "AWS_ENDPOINT_URL".into() };
            web_identity(&Arc::new(Common::default()), file_name, "role", "session", &place).err().unwrap()
        };
        let e = asked("http://192.0.2.1:9000/");
        assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
        assert!(e.to_string().contains("(AWS_ENDPOINT_URL) is http://"), "{e}");
        // Nobody listens there: it was asked.
        let e = asked("http://127.0.0.1:1/");
        assert_eq!(e.kind(), ErrorKind::Io, "{e}");
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_container_token_goes_where_it_stays_secret() {
        for (uri, expected) in [
            ("http://169.254.170.23/v1/credentials", true),
            ("http://[fd00:ec2::23]/v1/credentials", true),
            ("http://[fd00:ec2:0::23]/", true),
            ("http://localhost:1338/latest?x=1", true),
            ("http://127.8.0.1/", true),
            ("https://anywhere/", true),
            ("http://169.254.170.3/", false),
            ("http://example.com/", false),
            ("localhost:80/", false),
            ("", false),
        ] {
            let found = full(uri);
            assert_eq!(found.is_ok(), expected, "{uri}");
            if let Err(e) = found {
                assert!(e.to_string().contains("AWS_CONTAINER_CREDENTIALS_FULL_URI"), "{e}");
            }
        }
        for path in ["/v2/x", "v2/x"] {
            assert_eq!(uri(&relative(path).unwrap(), ""), "http://169.254.170.2/v2/x");
        }
        assert!(relative("http://h/").unwrap_err().to_string().contains("FULL_URI instead"));
    }
}

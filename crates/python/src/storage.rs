//! `storage=`: how one open asks servers. Strictly validated, with environment overrides.

use crate::credentials::{of_callable, of_profile};
use crate::errors::{detached, invalid, raise};
use crate::guard::{answer, Answer, Listed};
use crate::options::{repr, value_of};
use penstock::options::size;
use penstock::store::{
    check_endpoint, check_interfaces, check_region, meant, Addressing, Bearer, NodeSettings, ProfileSource, Proxies,
    Secret, StorageSettings, Stores, WebSettings,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyMapping};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// What kind of value a setting has.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Number,
    /// Bytes, or a size such as "500MB".
    Size,
    /// A time, whole or not.
    Seconds,
    Path,
    Flag,
    Text,
    /// A list of strings, or a string with commas.
    Names,
    /// It has no text: neither a variable nor a command can give it.
    Callable,
}

/// All settings, in the order in which errors list them.
const SETTINGS: [(&str, Kind); 23] = [
    ("connections", Kind::Number),
    ("request_bytes", Kind::Number),
    ("ca", Kind::Path),
    ("tls_verify", Kind::Flag),
    ("endpoint", Kind::Text),
    ("region", Kind::Text),
    ("addressing", Kind::Text),
    ("anonymous", Kind::Flag),
    ("requester_pays", Kind::Flag),
    ("access_key_id", Kind::Text),
    ("secret_access_key", Kind::Text),
    ("session_token", Kind::Text),
    ("profile", Kind::Text),
    ("account_name", Kind::Text),
    ("account_key", Kind::Text),
    ("sas_token", Kind::Text),
    ("credentials", Kind::Callable),
    ("proxy", Kind::Text),
    ("bandwidth", Kind::Size),
    ("interfaces", Kind::Names),
    ("patience", Kind::Seconds),
    ("connections_per_node", Kind::Number),
    ("node_folder", Kind::Path),
];

/// Most connections of one load.
const MOST_CONNECTIONS: usize = 1024;

/// Most connections of all processes of a node.
const MOST_OF_NODE: usize = 65_536;

/// The longest patience, in seconds: a week.
const MOST_PATIENCE: f64 = 604_800.0;

/// Bytes that one request may ask for at most.
const REQUEST_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 30;

/// Bytes per second. With less, a load would seem to have stalled.
const LEAST_BANDWIDTH: u64 = 64 << 10;

/// Names of the settings of `storage=`.
#[pyfunction]
pub(crate) fn storage_settings(py: Python<'_>) -> Answer<'_, Vec<&'static str>> {
    answer(py, || Ok(names()))
}

/// What the settings are that have a default of their own, where nobody sets them.
#[pyfunction]
pub(crate) fn storage_defaults(py: Python<'_>) -> Answer<'_, BTreeMap<&'static str, u64>> {
    answer(py, || {
        let WebSettings { connections, request_bytes, .. } = WebSettings::default();
        Ok(BTreeMap::from([("connections", connections as u64), ("request_bytes", request_bytes)]))
    })
}

fn names() -> Vec<&'static str> {
    SETTINGS.iter().map(|(name, _)| *name).collect()
}

/// The files and folders with the certificates that https trusts with these settings.
#[pyfunction]
#[pyo3(signature = (storage = None))]
pub(crate) fn authorities<'py>(py: Python<'py>, storage: Option<&Bound<'py, PyAny>>) -> Answer<'py, Vec<PathBuf>> {
    answer(py, || {
        let stores = stores_of(py, storage, None)?;
        detached(py, || stores.authorities())
    })
}

/// The certificates that https trusts with these settings (DER, one after the other); None: all.
#[pyfunction]
#[pyo3(signature = (storage = None))]
pub(crate) fn certificates<'py>(
    py: Python<'py>,
    storage: Option<&Bound<'py, PyAny>>,
) -> Answer<'py, Option<Bound<'py, PyBytes>>> {
    answer(py, || {
        let stores = stores_of(py, storage, None)?;
        let found = detached(py, || stores.certificates())?;
        Ok(found.map(|found| PyBytes::new(py, &found.concat())))
    })
}

/// Hosts whose certificates were not checked, each once in a process.
#[pyfunction]
pub(crate) fn unchecked_hosts(py: Python<'_>) -> Answer<'_, Vec<String>> {
    answer(py, || Ok(penstock::store::unchecked_hosts()))
}

/// Host and port of the proxy for an address, and the value of `Proxy-Authorization`; None: it is reached without one.
#[pyfunction]
#[pyo3(signature = (address, storage = None))]
pub(crate) fn proxy<'py>(
    py: Python<'py>,
    address: &str,
    storage: Option<&Bound<'py, PyAny>>,
) -> Answer<'py, Option<(String, Option<String>)>> {
    answer(py, || {
        let stores = stores_of(py, storage, None)?;
        stores.proxy(address).map_err(|e| raise(py, &e))
    })
}

/// The stores of an open with these settings. `bearer` is a server and the token for it.
pub(crate) fn stores_of(
    py: Python<'_>,
    given: Option<&Bound<'_, PyAny>>,
    bearer: Option<(String, String)>,
) -> PyResult<Stores> {
    let mut settings = StorageSettings::default();
    settings.s3.profiles = Some(ProfileSource(of_profile));
    for (name, _) in SETTINGS {
        let variable = format!("PENSTOCK_STORAGE_{}", name.to_uppercase());
        if let Some(text) = value_of(&variable)? {
            let text = meant(&text);
            let checked = match name {
                "endpoint" if !text.is_empty() => check_endpoint(text),
                "region" if !text.is_empty() => check_region(text),
                _ => Ok(()),
            };
            let checked = checked.map_err(|e| e.message().to_owned());
            let is_set = checked.and_then(|()| set(&mut settings, name, text.to_owned()));
            is_set.map_err(|why| invalid(format!("{variable}: {why}")))?;
        }
    }
    let items = match given {
        None => Vec::new(),
        Some(given) => {
            let kind = given.get_type();
            let refuse =
                |_| invalid(format!("storage= is a {kind}: give a dict of settings, such as {{\"connections\": 32}}"));
            given
                .cast::<PyMapping>()
                .map_err(refuse)?
                .items()?
                .extract::<Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)>>()?
        }
    };
    for (name, value) in items {
        let Some((name, kind)) = SETTINGS.iter().find(|(known, _)| name.extract::<&str>().is_ok_and(|n| n == *known))
        else {
            let known = names().join(", ");
            return Err(invalid(format!("there is no storage setting {}; there are: {known}", repr(&name))));
        };
        if *kind == Kind::Callable && value.is_callable() {
            settings.web.credentials = Some(of_callable(&value));
        } else if !value.is_none() {
            let text = text_of(name, *kind, &value)?;
            set(&mut settings, name, text).map_err(|why| invalid(format!("storage {name}: {why}")))?;
        }
    }
    settings.web.node = settings.web.node.filter(|node| node.connections > 0);
    if let Some((server, token)) = bearer {
        settings.bearer = Some(Bearer::new(&server, Secret::new(token)).map_err(|e| raise(py, &e))?);
    }
    Ok(Stores::with(settings))
}

/// The value as a text, as an environment variable would have it.
fn text_of(name: &str, kind: Kind, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let wrong = |what: &str| PyTypeError::new_err(format!("storage {name}: must be {what}"));
    if let Ok(text) = value.extract::<String>() {
        return Ok(text);
    }
    match kind {
        Kind::Number | Kind::Size => {
            let what = if kind == Kind::Size { "a whole number or a size such as \"500MB\"" } else { "a whole number" };
            let number = (!value.is_instance_of::<PyBool>()).then(|| value.extract::<i128>().ok()).flatten();
            number.map(|number| number.to_string()).ok_or_else(|| wrong(what))
        }
        Kind::Seconds => {
            let seconds = (!value.is_instance_of::<PyBool>()).then(|| value.extract::<f64>().ok()).flatten();
            seconds.map(|seconds| seconds.to_string()).ok_or_else(|| wrong("a number of seconds"))
        }
        Kind::Flag => value.extract::<bool>().map(|flag| flag.to_string()).map_err(|_| wrong("True or False")),
        Kind::Text => Err(wrong("a string")),
        Kind::Names => {
            let names = value.extract::<Listed<String>>().map_err(|_| wrong("a list of strings"))?;
            Ok(names.0.join(","))
        }
        Kind::Callable => Err(wrong("a callable without arguments that gives a mapping")),
        Kind::Path => {
            let path: PathBuf = value.extract().map_err(|_| wrong("a path"))?;
            path.into_os_string().into_string().map_err(|_| wrong("a path in Unicode"))
        }
    }
}

fn set(settings: &mut StorageSettings, name: &str, text: String) -> Result<(), String> {
    let flag = |text: &str| match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" => Ok(true),
        "0" | "false" | "no" => Ok(false),
        _ => Err("must be true or false".to_owned()),
    };
    if text.is_empty() && name != "proxy" {
        return Err("must not be empty".into());
    }
    let StorageSettings { s3, gcs, azure, .. } = settings;
    match name {
        "endpoint" => {
            (gcs.endpoint, azure.endpoint) = (Some(text.clone()), Some(text.clone()));
            s3.endpoint = Some(text);
        }
        "region" => s3.region = Some(text),
        "addressing" => {
            s3.addressing = Some(match &*text {
                "path" => Addressing::Path,
                "virtual" => Addressing::Virtual,
                _ => return Err("must be \"path\" or \"virtual\"".into()),
            });
        }
        "anonymous" => {
            s3.anonymous = flag(&text)?;
            (gcs.anonymous, azure.anonymous) = (s3.anonymous, s3.anonymous);
        }
        "requester_pays" => s3.requester_pays = flag(&text)?,
        "access_key_id" => s3.access_key_id = Some(text),
        "secret_access_key" => s3.secret_access_key = Some(Secret::new(text)),
        "session_token" => s3.session_token = Some(Secret::new(text)),
        "profile" => s3.profile = Some(text),
        "account_name" => azure.account_name = Some(text),
        "account_key" => azure.account_key = Some(Secret::new(text)),
        "sas_token" => azure.sas_token = Some(Secret::new(text)),
        "connections" => {
            let number = text.trim().parse().ok().filter(|number| (1..=MOST_CONNECTIONS).contains(number));
            settings.web.connections =
                number.ok_or_else(|| format!("must be a whole number, from 1 to {MOST_CONNECTIONS}"))?;
        }
        "request_bytes" => {
            let number = text.trim().parse().ok().filter(|number| REQUEST_BYTES.contains(number));
            settings.web.request_bytes =
                number.ok_or("must be a whole number, from 65536 (64 KiB) to 1073741824 (1 GiB)")?;
        }
        "patience" => {
            let seconds = text.trim().parse().ok().filter(|seconds| (0.0..=MOST_PATIENCE).contains(seconds));
            let seconds = seconds.ok_or_else(|| format!("must be seconds, from 0 to {MOST_PATIENCE} (a week)"))?;
            settings.web.patience = Some(Duration::from_secs_f64(seconds));
        }
        "connections_per_node" => {
            let number = text.trim().parse().ok().filter(|number| (1..=MOST_OF_NODE).contains(number));
            let connections = number.ok_or_else(|| format!("must be a whole number, from 1 to {MOST_OF_NODE}"))?;
            let folder = settings.web.node.take().and_then(|node| node.folder);
            settings.web.node = Some(NodeSettings { connections, folder });
        }
        "node_folder" => {
            // Without a budget it means nothing.
            let node = settings.web.node.take().unwrap_or(NodeSettings { connections: 0, folder: None });
            settings.web.node = Some(NodeSettings { folder: Some(PathBuf::from(text)), ..node });
        }
        "interfaces" => {
            let names: Vec<_> = text.split(',').map(|name| name.trim().to_owned()).collect();
            check_interfaces(&names).map_err(|e| e.message().to_owned())?;
            settings.web.interfaces = names;
        }
        "bandwidth" => {
            let bytes = size(&text).map(|bytes| (bytes >= LEAST_BANDWIDTH).then_some(bytes));
            settings.web.bandwidth = Some(bytes?.ok_or("must be bytes per second, 65536 (64 KiB) or more")?);
        }
        "proxy" => settings.web.proxies = Some(Proxies::given(&text).map_err(|e| e.message().to_owned())?),
        "credentials" => return Err("is a callable, which a text cannot give: set it in code, in storage=".into()),
        "tls_verify" => settings.web.tls_verify = flag(&text)?,
        "ca" => settings.web.authorities = Some(PathBuf::from(text)),
        _ => return Err("is not a setting".into()),
    }
    Ok(())
}

//! `storage=`: how one open asks servers. Strictly validated, with environment overrides.

use crate::credentials::{of_callable, of_profile};
use crate::errors::{detached, invalid, raise};
use crate::guard::{answer, Answer};
use crate::hub::HubLayout;
use crate::options::{entry_of, repr, text_of, value_of};
use penstock::options::Form;
use penstock::store::{Bearer, ProfileSource, Secret, StorageSetting, StorageSettings, Stores, STORAGE_SETTINGS};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMapping};
use std::path::PathBuf;

/// The schemes of all addresses that there is a store for, in small letters.
#[pyfunction]
pub(crate) fn schemes(py: Python<'_>) -> Answer<'_, Vec<String>> {
    answer(py, || Ok(penstock::store::schemes()))
}

/// Names of the settings of `storage=`.
#[pyfunction]
pub(crate) fn storage_settings(py: Python<'_>) -> Answer<'_, Vec<&'static str>> {
    answer(py, || Ok(names()))
}

/// The entries of all settings, in their order: for `tools/option_docs.py` and other modules.
#[pyfunction]
pub(crate) fn storage_table(py: Python<'_>) -> Answer<'_, Vec<Bound<'_, PyDict>>> {
    answer(py, || {
        let entry = |row: &StorageSetting| {
            let entry = entry_of(py, row.form, row.doc, &[("name", row.name), ("group", row.group)])?;
            entry.set_item("default", row.default.map(|default| default(&StorageSettings::default())))?;
            Ok(entry)
        };
        STORAGE_SETTINGS.iter().map(entry).collect::<PyResult<Vec<_>>>()
    })
}

fn names() -> Vec<&'static str> {
    STORAGE_SETTINGS.iter().map(|setting| setting.name).collect()
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

/// Whether the disk cache of these settings asks servers for versions; None: there is no disk cache.
#[pyfunction]
#[pyo3(signature = (storage = None))]
pub(crate) fn asks_for_versions<'py>(
    py: Python<'py>,
    storage: Option<&Bound<'py, PyAny>>,
) -> Answer<'py, Option<bool>> {
    answer(py, || {
        let cache = settings_of(py, storage, None)?.cache;
        Ok(cache.folder.map(|_| !cache.offline))
    })
}

/// The stores of an open with these settings. `bearer` is a server and the token for it.
pub(crate) fn stores_of(
    py: Python<'_>,
    given: Option<&Bound<'_, PyAny>>,
    bearer: Option<(String, String)>,
) -> PyResult<Stores> {
    settings_of(py, given, bearer).map(Stores::with)
}

/// The same for files of the Hub. What the disk cache has whole goes to this place too.
pub(crate) fn stores_of_hub(
    py: Python<'_>,
    given: Option<&Bound<'_, PyAny>>,
    bearer: Option<(String, String)>,
    hub: Option<&HubLayout>,
) -> PyResult<Stores> {
    let mut settings = settings_of(py, given, bearer)?;
    settings.cache.hub = hub.map(HubLayout::core).filter(|_| settings.cache.folder.is_some());
    Ok(Stores::with(settings))
}

fn settings_of(
    py: Python<'_>,
    given: Option<&Bound<'_, PyAny>>,
    bearer: Option<(String, String)>,
) -> PyResult<StorageSettings> {
    let mut settings = StorageSettings::default();
    settings.s3.profiles = Some(ProfileSource(of_profile));
    for setting in STORAGE_SETTINGS {
        let variable = setting.variable();
        if let Some(text) = value_of(&variable)? {
            setting.set_variable(&mut settings, &text).map_err(|why| invalid(format!("{variable}: {why}")))?;
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
        let known = |known: &&StorageSetting| name.extract::<&str>().is_ok_and(|name| name == known.name);
        let Some(setting) = STORAGE_SETTINGS.iter().find(known) else {
            let known = names().join(", ");
            return Err(invalid(format!("there is no storage setting {}; there are: {known}", repr(&name))));
        };
        if setting.form == Form::Callable && value.is_callable() {
            settings.web.credentials = Some(of_callable(&value));
        } else if !value.is_none() {
            let wrong = |what| PyTypeError::new_err(format!("storage {}: must be {what}", setting.name));
            let text = text_of(setting.form, &value).map_err(wrong)?;
            setting.set(&mut settings, text).map_err(|why| invalid(format!("storage {}: {why}", setting.name)))?;
        }
    }
    settings.web.node = settings.web.node.filter(|node| node.connections > 0);
    if let Some((server, token)) = bearer {
        settings.bearer = Some(Bearer::new(&server, Secret::new(token)).map_err(|e| raise(py, &e))?);
    }
    if settings.cache.offline && settings.cache.folder.is_none() {
        return Err(invalid("offline=True takes everything from the disk cache: name it by disk_cache"));
    }
    Ok(settings)
}

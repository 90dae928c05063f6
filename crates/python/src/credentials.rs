//! Credentials that Python gives: a callable of the program, or botocore.
//!
//! They are asked on a daemon thread of Python's own. The thread of the core that wants them waits without the GIL, and is
//! attached to the interpreter only for as long as starting that thread takes. So a callable that hangs keeps no interpreter
//! from ending.

use crate::guard::guarded;
use crate::raised::Raised;
use crate::waiting::{attached, time_of};
use penstock::store::{CredentialSource, GivenCredentials, GivesCredentials, Secret};
use penstock::{Error, ErrorKind, Result};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyTuple};
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

/// The callable as a setting.
pub(crate) fn of_callable(callable: &Bound<'_, PyAny>) -> CredentialSource {
    CredentialSource(Arc::new(Giver(From::Callable(callable.clone().unbind()))))
}

/// A giver that asks botocore for the credentials of an AWS profile.
pub(crate) fn of_profile(name: &str) -> Arc<dyn GivesCredentials> {
    Arc::new(Giver(From::Profile(name.to_owned(), Mutex::default())))
}

struct Giver(From);

enum From {
    Callable(Py<PyAny>),
    /// Its name, and the `penstock._credentials.Profile` that is asked.
    Profile(String, Mutex<Option<Py<PyAny>>>),
}

type Told = Result<GivenCredentials>;

impl GivesCredentials for Giver {
    fn give(&self) -> Told {
        let ended = || Error::new(ErrorKind::Cancelled, "the interpreter ends: it gives no credentials any more");
        let (tell, told) = sync_channel(1);
        attached(|py| guarded(py, || self.ask(py, tell)).map_err(|e| failed(py, &e))).ok_or_else(ended)??;
        told.recv().map_err(|_| ended())?
    }

    fn number(&self) -> usize {
        match &self.0 {
            From::Callable(callable) => callable.as_ptr() as usize,
            From::Profile(..) => std::ptr::from_ref(self) as usize,
        }
    }
}

impl Giver {
    /// Starts the thread that asks.
    fn ask(&self, py: Python<'_>, tell: SyncSender<Told>) -> PyResult<()> {
        // `penstock._credentials` is imported as `_late_imports` wants it: forks wait for that.
        let importing = py.import("penstock._late_imports")?.getattr("importing")?.call0()?;
        importing.call_method0("__enter__")?;
        let module = py.import("penstock._credentials");
        importing.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        let module = module?;
        let call = match &self.0 {
            From::Callable(callable) => callable.clone_ref(py),
            From::Profile(name, made) => {
                let known = made.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|made| made.clone_ref(py));
                let profile = match known {
                    Some(profile) => profile,
                    None => module.call_method1("Profile", (name,))?.unbind(),
                };
                *made.lock().unwrap_or_else(PoisonError::into_inner) = Some(profile.clone_ref(py));
                profile
            }
        };
        let heard = move |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, pyo3::types::PyDict>>| -> PyResult<()> {
            guarded(arguments.py(), || {
                // Nobody may wait for it any more.
                let py = arguments.py();
                let _unheard = tell.try_send(read(arguments).unwrap_or_else(|e| Err(failed(py, &e))));
                Ok(())
            })
        };
        let heard = PyCFunction::new_closure(py, None, None, heard)?;
        module.call_method1("ask", (call, heard))?;
        Ok(())
    }
}

/// The answer of `penstock._credentials`: the values, or an error and its cause.
fn read(arguments: &Bound<'_, PyTuple>) -> PyResult<Told> {
    type Values = (Option<String>, Option<String>, Option<String>, Option<String>, Option<f64>);
    type Failure = (String, String, Option<(Py<PyAny>, String)>);
    let (values, failure): (Option<Values>, Option<Failure>) = arguments.extract()?;
    if let Some((kind, message, cause)) = failure {
        let kind = match &*kind {
            "Invalid" => ErrorKind::Invalid,
            "Unsupported" => ErrorKind::Unsupported,
            _ => ErrorKind::Permission,
        };
        let e = Error::new(kind, message);
        return Ok(Err(match cause {
            Some((exception, text)) => e.caused_by(Raised { exception, text }),
            None => e,
        }));
    }
    let (access_key_id, secret, session_token, token, expires) = values.unwrap_or_default();
    let expires = expires
        .map(|seconds| UNIX_EPOCH.checked_add(time_of(seconds)).unwrap_or(UNIX_EPOCH + Duration::from_secs(1 << 40)));
    let [secret_access_key, session_token, token] = [secret, session_token, token].map(|text| text.map(Secret::new));
    Ok(Ok(GivenCredentials { access_key_id, secret_access_key, session_token, token, expires }))
}

/// No thread could be started, or the like.
fn failed(py: Python<'_>, e: &PyErr) -> Error {
    let text = e.get_type(py).to_string();
    let raised = Raised { exception: e.clone_ref(py).into_value(py).into_any(), text };
    Error::new(ErrorKind::Permission, "the credentials cannot be asked for").caused_by(raised)
}

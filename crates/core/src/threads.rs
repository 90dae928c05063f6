//! Guards for threads: a panic on a thread of the core reaches those who wait for it, with its cause.
//!
//! `tests/test_threads.py` goes over all threads of the core: each has a guard, and a test that trips it.

use crate::error::{Error, ErrorKind};
use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Does the work of the thread with this name.
///
/// # Errors
/// `Internal`, with what it says, if it panics. The caller tells it to those who wait.
pub(crate) fn guarded<T>(name: &str, work: impl FnOnce() -> T) -> Result<T, Error> {
    let body = || {
        step(name);
        work()
    };
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| of_panic(name, &*panic))
}

/// The error for a panic on the thread with this name.
pub(crate) fn of_panic(name: &str, panic: &(dyn Any + Send)) -> Error {
    let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it says nothing".to_owned());
    Error::new(ErrorKind::Internal, format!("the thread {name} panicked ({said}); please report this"))
}

/// The thread with this name does something next. It panics if a test has asked for that.
#[cfg(not(debug_assertions))]
pub(crate) fn step(_name: &str) {}

#[cfg(debug_assertions)]
pub(crate) use trap::step;
#[cfg(debug_assertions)]
pub use trap::{trip, untrip};

#[cfg(debug_assertions)]
mod trap {
    use std::sync::{Mutex, PoisonError};

    static TRIPPED: Mutex<Option<String>> = Mutex::new(None);

    /// Has threads with this name panic where they work next. For tests of what those hear who wait for them.
    #[doc(hidden)]
    pub fn trip(name: &str) {
        *TRIPPED.lock().unwrap_or_else(PoisonError::into_inner) = Some(name.to_owned());
    }

    /// Has them panic no more.
    #[doc(hidden)]
    pub fn untrip() {
        *TRIPPED.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn step(name: &str) {
        let tripped = TRIPPED.lock().unwrap_or_else(PoisonError::into_inner).as_deref() == Some(name);
        assert!(!tripped, "tripped on purpose");
    }
}

//! The locks and threads of everything that several threads share, under one name, so that loom can replace them.
//!
//! `make loom` compiles the crate with `--cfg loom`. It runs the models (`mod models`, beside the code they check)
//! through every order in which their threads can continue. A lost wake-up is then a deadlock, which loom reports with
//! its history. In any other build these are the types of `std`.

#[cfg(loom)]
pub(crate) use loom::{
    sync::{Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};

use std::sync::PoisonError;

/// The lock, poisoned or not. Every critical section leaves its data consistent, and a panic elsewhere must not become
/// a second one here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

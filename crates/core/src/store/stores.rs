//! Which store has the addresses of a scheme.

use super::object::Store;
#[cfg(feature = "remote")]
use super::remote::{Web, WebSettings};
use crate::error::{Error, ErrorKind, Result};
#[cfg(feature = "remote")]
use std::sync::OnceLock;
use std::sync::{Arc, PoisonError, RwLock};

/// The registered stores. Looked at for addresses with a scheme only; a fork in the moment in which one is registered could
/// leave the child with a lock that nobody gives back.
static STORES: RwLock<Vec<(String, Arc<dyn Store>)>> = RwLock::new(Vec::new());

/// Has `store` asked about addresses that begin with `scheme://`.
///
/// # Errors
/// `Invalid` if the scheme has a store.
pub fn register(scheme: &str, store: Arc<dyn Store>) -> Result<()> {
    let mut stores = STORES.write().unwrap_or_else(PoisonError::into_inner);
    if stores.iter().any(|(known, _)| known == scheme) {
        return Err(Error::new(ErrorKind::Invalid, format!("there is a store for {scheme}:// already")));
    }
    stores.push((scheme.to_owned(), store));
    Ok(())
}

/// The store for `scheme`, if there is one: a registered one before one of this crate.
pub(crate) fn store_for(scheme: &str) -> Option<Arc<dyn Store>> {
    let stores = STORES.read().unwrap_or_else(PoisonError::into_inner);
    let found = stores.iter().find(|(known, _)| known == scheme).map(|(_, store)| store.clone());
    found.or_else(|| built_in(scheme))
}

/// A store of this crate. It is made when its scheme is first met.
#[cfg(feature = "remote")]
fn built_in(scheme: &str) -> Option<Arc<dyn Store>> {
    static WEB: OnceLock<Arc<dyn Store>> = OnceLock::new();
    let is_web = scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https");
    is_web.then(|| WEB.get_or_init(|| Arc::new(Web::new(WebSettings::default()))).clone())
}

#[cfg(not(feature = "remote"))]
fn built_in(_scheme: &str) -> Option<Arc<dyn Store>> {
    None
}

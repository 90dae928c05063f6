//! The stores of the schemes of addresses.

#[cfg(feature = "remote")]
use super::disk_cache::{CachedStore, DiskCacheSettings};
use super::local::Local;
use super::location::{is_scheme, Location};
use super::look::Look;
#[cfg(feature = "remote")]
use super::mirrors::MirroredStore;
use super::object::Store;
#[cfg(feature = "remote")]
use super::remote::{
    authorities, certificates, CacheSettings, Environment, Provider, StorageSettings, Web, WebSettings,
};
use crate::error::{Error, ErrorKind, Result};
use std::path::Path;
#[cfg(feature = "remote")]
use std::path::PathBuf;
#[cfg(feature = "remote")]
use std::sync::Mutex;
use std::sync::{Arc, PoisonError, RwLock};

/// The registered stores. Looked at for addresses with a scheme only; a fork in the moment in which one is registered could
/// leave the child with a lock that nobody gives back.
static STORES: RwLock<Vec<(String, Arc<dyn Store>)>> = RwLock::new(Vec::new());

/// Has `store` asked about addresses that begin with `scheme://`, in small or capital letters.
///
/// # Errors
/// `Invalid` if the scheme has a store, or is none: a letter, then letters, digits, `+`, `-` and `.`.
pub fn register(scheme: &str, store: Arc<dyn Store>) -> Result<()> {
    if !is_scheme(scheme) {
        let text = format!("{scheme:?} is no scheme: a letter, then letters, digits, '+', '-' and '.'");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let mut stores = STORES.write().unwrap_or_else(PoisonError::into_inner);
    if stores.iter().any(|(known, _)| known.eq_ignore_ascii_case(scheme)) {
        return Err(Error::new(ErrorKind::Invalid, format!("there is a store for {scheme}:// already")));
    }
    stores.push((scheme.to_owned(), store));
    Ok(())
}

/// The stores that one open uses: registered ones, and those of this crate with the settings of the open.
#[derive(Debug, Clone, Default)]
pub struct Stores {
    /// The store of paths.
    pub(super) local: Arc<Local>,
    #[cfg(feature = "remote")]
    settings: StorageSettings,
}

impl Stores {
    /// Stores with these settings. A registered store has its own.
    #[cfg(feature = "remote")]
    pub fn with(settings: StorageSettings) -> Stores {
        Stores { local: Arc::default(), settings }
    }

    /// The same stores for copies of whole objects: their disk cache drops nothing, and compares what it gives.
    #[cfg(feature = "remote")]
    #[must_use]
    pub(crate) fn for_copies(&self) -> Stores {
        let mut stores = self.clone();
        (stores.settings.cache.waits, stores.settings.cache.verify) = (true, true);
        stores
    }

    /// The same stores.
    #[cfg(not(feature = "remote"))]
    #[must_use]
    pub(crate) fn for_copies(&self) -> Stores {
        self.clone()
    }

    /// Whether a disk cache of these settings takes a folder that its group may write to.
    #[cfg(feature = "remote")]
    pub fn shares_disk_cache(&self) -> bool {
        self.settings.cache.shared
    }

    /// The settings of the disk cache in front of these stores, if there is one.
    #[cfg(feature = "remote")]
    pub fn disk_cache(&self) -> Option<DiskCacheSettings> {
        disk_cache(&self.settings.cache)
    }

    /// The files and folders with the certificates that https trusts with these settings.
    ///
    /// # Errors
    /// `Unsupported` if there is none.
    #[cfg(feature = "remote")]
    pub fn authorities(&self) -> Result<Vec<PathBuf>> {
        authorities(self.settings.web.authorities.as_deref())
    }

    /// The certificates that https trusts with these settings (DER); `None`: all, because none is checked.
    ///
    /// # Errors
    /// `Unsupported` if there are none.
    #[cfg(feature = "remote")]
    pub fn certificates(&self) -> Result<Option<Vec<Vec<u8>>>> {
        let WebSettings { authorities, tls_verify, .. } = &self.settings.web;
        let found = tls_verify.then(|| certificates(authorities.as_deref())).transpose()?;
        Ok(found.map(|found| found.iter().map(|certificate| certificate.to_vec()).collect()))
    }

    /// Measures requests for the object at an address; `None` if no store has such addresses.
    ///
    /// # Errors
    /// The errors of [`Store::look`].
    pub fn look(&self, address: &str, times: usize) -> Result<Option<Look>> {
        let found = Location::address(Path::new(address), |scheme| self.of(scheme));
        found.map(|(location, store)| store.look(&location, times)).transpose()
    }

    /// The store for `scheme`, if there is one: a registered one before one of this crate.
    pub(crate) fn of(&self, scheme: &str) -> Option<Arc<dyn Store>> {
        let stores = STORES.read().unwrap_or_else(PoisonError::into_inner);
        let found = stores.iter().find(|(known, _)| known.eq_ignore_ascii_case(scheme)).map(|(_, store)| store.clone());
        found.or_else(|| self.built_in(scheme))
    }

    /// The settings, with what the environment says where they say nothing.
    #[cfg(feature = "remote")]
    fn completed(&self) -> StorageSettings {
        let mut settings = self.settings.clone();
        settings.web.proxies.get_or_insert_with(Web::proxies);
        settings
    }

    /// How a server is reached: host and port of the proxy for an address, and the value of `Proxy-Authorization`.
    ///
    /// # Errors
    /// `Invalid` for what is no address, `Unsupported` for a proxy that cannot be used.
    #[cfg(feature = "remote")]
    pub fn proxy(&self, address: &str) -> Result<Option<(String, Option<String>)>> {
        self.completed().web.proxies.unwrap_or_default().named(address)
    }

    #[cfg(feature = "remote")]
    fn built_in(&self, scheme: &str) -> Option<Arc<dyn Store>> {
        Provider::of(scheme).map(|provider| made(provider, &self.completed()))
    }

    #[cfg(not(feature = "remote"))]
    fn built_in(&self, _scheme: &str) -> Option<Arc<dyn Store>> {
        None
    }
}

/// The schemes of all addresses that there is a store for.
pub fn schemes() -> Vec<String> {
    let stores = STORES.read().unwrap_or_else(PoisonError::into_inner);
    let registered = stores.iter().map(|(scheme, _)| scheme.to_ascii_lowercase());
    #[cfg(feature = "remote")]
    let registered = registered.chain(Provider::schemes().map(str::to_owned));
    registered.collect()
}

/// The last stores that were made: a program may open the shards of a checkpoint one by one, and what is known of servers
/// then need not be found out each time.
#[cfg(feature = "remote")]
static MADE: Mutex<Vec<MadeStore>> = Mutex::new(Vec::new());
#[cfg(feature = "remote")]
struct MadeStore {
    /// The first scheme of its provider.
    scheme: &'static str,
    environment: Environment,
    settings: StorageSettings,
    store: Arc<dyn Store>,
}

/// Keeps no store, and so no credential and no address of a server, for the next open. Checkpoints keep theirs.
pub fn forget_stores() {
    #[cfg(feature = "remote")]
    {
        // Another thread may have held the lock when this process was forked. What somebody uses now is not idle.
        let forgotten = MADE.try_lock().map(|mut made| std::mem::take(&mut *made));
        drop(forgotten);
    }
}

/// The settings of the disk cache, if there is one.
#[cfg(feature = "remote")]
fn disk_cache(settings: &CacheSettings) -> Option<DiskCacheSettings> {
    let CacheSettings { folder, size, free, shared, verify, forgets, .. } = settings.clone();
    Some(DiskCacheSettings { folder: folder?, size, free, shared, verify, refetch: !forgets })
}

/// The store of a provider with these settings: a known one, or a new one.
#[cfg(feature = "remote")]
fn made(provider: &'static Provider, settings: &StorageSettings) -> Arc<dyn Store> {
    const MOST: usize = 4;
    let (scheme, environment) = (provider.schemes[0], provider.environment());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |one: &&MadeStore| one.scheme == scheme && one.environment == environment && one.settings == *settings;
    if let Some(known) = made.iter().find(is_it) {
        return known.store.clone();
    }
    if made.len() == MOST {
        made.remove(0);
    }
    let mut store: Arc<dyn Store> = Arc::new(Web::of(provider, settings.clone(), environment.clone()));
    let CacheSettings { offline, mirrors, mirror_token, waits, hub, .. } = settings.cache.clone();
    if !mirrors.is_empty() && !offline {
        let mirrors = mirrors.into_iter().map(|address| Web::of_mirror(settings, address, mirror_token.clone()));
        store = Arc::new(MirroredStore::new(
            store,
            mirrors.collect(),
            settings.cache.folder.clone(),
            settings.web.bandwidth,
        ));
    }
    if let Some(cache) = disk_cache(&settings.cache) {
        store = Arc::new(CachedStore::new(store, cache, offline, waits, hub));
    }
    made.push(MadeStore { scheme, environment, settings: settings.clone(), store: store.clone() });
    store
}

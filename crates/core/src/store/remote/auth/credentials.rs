//! The credential that requests carry, or are signed with: fetched on threads that may block, used on those that may not.

use crate::error::{Error, ErrorKind, Result};
use crate::machine::block_signals;
use crate::store::remote::http::answer::Refused;
use crate::store::remote::http::common::Common;
use crate::sync::{lock, Mutex};
use crate::threads::guarded;
use crate::wake::Wake;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A credential that may expire is asked for again after so long. Its provider gives a new one five minutes before it does.
const FRESH: Duration = Duration::from_secs(60);
/// So long it is used meanwhile.
pub(in crate::store::remote) const USABLE: Duration = Duration::from_secs(240);
/// How long an error stands for all who wait.
const NEWS: Duration = Duration::from_secs(1);
/// A thread that has fetched for so long is lost: a forked child does not have it.
const LOST: Duration = Duration::from_secs(120);

/// Looks for credentials where the tools of one provider do.
pub(in crate::store::remote) trait Finder: Send + Sync + fmt::Debug + 'static {
    /// The credential of requests, and their endpoint.
    type Key: PartialEq + Send + Sync;
    /// Something that gives credentials, and knows how long they are valid.
    type Provider: Send;

    /// The key to use now. `provider` is kept between calls. Blocks.
    fn find(&self, common: &Arc<Common>, provider: &mut Option<Self::Provider>) -> Result<FoundKey<Self::Key>>;
}

/// A key that was found.
pub(in crate::store::remote) struct FoundKey<K> {
    pub(in crate::store::remote) key: K,
    /// Where it comes from, in words.
    pub(in crate::store::remote) origin: String,
    /// How long it may be used without being fetched again, [`USABLE`] at most; `None`: it does not become invalid.
    pub(in crate::store::remote) usable: Option<Duration>,
    /// Whether there may be another one later.
    pub(in crate::store::remote) renewable: bool,
}

/// A key in use, and since when.
pub(in crate::store::remote) struct Session<K> {
    pub(in crate::store::remote) found: FoundKey<K>,
    since: Instant,
    generation: u64,
}

/// The session of one store.
pub(in crate::store::remote) struct Credentials<F: Finder> {
    finder: F,
    pub(in crate::store::remote) common: Arc<Common>,
    /// The thread that fetches has it locked.
    provider: Mutex<Option<F::Provider>>,
    state: Mutex<KeyState<F::Key>>,
    /// Requests that were made before the last change have a lower number.
    pub(in crate::store::remote) generation: AtomicU64,
}

struct KeyState<K> {
    session: Option<Arc<Session<K>>>,
    /// The last one, which was refused, until there is another.
    refused_session: Option<Arc<Session<K>>>,
    /// Since when a thread fetches, and who is notified.
    asked: Option<(Instant, Vec<Arc<Wake>>)>,
    failed: Option<(Instant, Error)>,
    /// How often something was fetched.
    count: u64,
    /// The provider's last credential was refused.
    refused: bool,
}

impl<K> KeyState<K> {
    /// Notifies all that wait: the fetch has ended.
    fn notify(&mut self) {
        let (_, waiting) = self.asked.take().unzip();
        waiting.into_iter().flatten().for_each(|wake| wake.notify());
    }
}

impl<F: Finder> Credentials<F> {
    pub(in crate::store::remote) fn new(finder: F, common: Arc<Common>) -> Credentials<F> {
        let state =
            KeyState { session: None, refused_session: None, asked: None, failed: None, count: 0, refused: false };
        let (provider, state, generation) = (Mutex::new(None), Mutex::new(state), AtomicU64::new(1));
        Credentials { finder, common, provider, state, generation }
    }

    pub(in crate::store::remote) fn finder(&self) -> &F {
        &self.finder
    }

    /// The request that `make` makes of the session's key and the number of its generation. `wake` as in
    /// [`session`](Self::session).
    pub(in crate::store::remote) fn with_key<T>(
        self: &Arc<Self>,
        wake: Option<&Arc<Wake>>,
        make: impl FnOnce(&F::Key, u64) -> Result<T>,
    ) -> Option<Result<T>> {
        let session = self.session(wake)?;
        Some(session.and_then(|session| make(&session.found.key, self.generation.load(Ordering::Acquire))))
    }

    /// The session, if it is valid. Otherwise a new one is made, and `wake` is notified when it is there.
    /// Without a `wake` the call waits for it.
    pub(in crate::store::remote) fn session(
        self: &Arc<Self>,
        wake: Option<&Arc<Wake>>,
    ) -> Option<Result<Arc<Session<F::Key>>>> {
        let state = lock(&self.state);
        if let Some(session) = &state.session {
            let (age, session) = (session.since.elapsed(), session.clone());
            let usable = session.found.usable.map(|usable| usable.min(USABLE));
            if usable.is_none_or(|usable| age < usable) {
                if usable.is_some_and(|usable| age >= FRESH.min(usable / 4)) {
                    // Without a thread for it, the next request tries again.
                    let _ = self.ask(state, None);
                }
                return Some(Ok(session));
            }
        }
        if let Some((_, e)) = state.failed.as_ref().filter(|(when, _)| when.elapsed() < NEWS) {
            return Some(Err(e.clone()));
        }
        match wake {
            Some(wake) => self.ask(state, Some(wake)).err().map(Err),
            None => {
                let count = state.count;
                drop(state);
                Some(self.fetch(count))
            }
        }
    }

    /// The session, if there is one.
    pub(in crate::store::remote) fn known(&self) -> Option<Arc<Session<F::Key>>> {
        lock(&self.state).session.clone()
    }

    /// The session that a refused request had, for an error: another thread may fetch a new one by now.
    pub(in crate::store::remote) fn latest(&self) -> Option<Arc<Session<F::Key>>> {
        let state = lock(&self.state);
        state.session.as_ref().or(state.refused_session.as_ref()).cloned()
    }

    /// Has a thread fetch it.
    fn ask(
        self: &Arc<Self>,
        mut state: crate::sync::MutexGuard<'_, KeyState<F::Key>>,
        wake: Option<&Arc<Wake>>,
    ) -> Result<()> {
        let known = state.asked.take_if(|(since, _)| since.elapsed() < LOST);
        let runs = known.is_some();
        let (since, mut waiting) = known.unwrap_or_else(|| (Instant::now(), Vec::new()));
        if let Some(wake) = wake.filter(|wake| !waiting.iter().any(|other| Arc::ptr_eq(other, wake))) {
            waiting.push(wake.clone());
        }
        state.asked = Some((since, waiting));
        if runs {
            return Ok(());
        }
        let count = state.count;
        drop(state);
        let this = self.clone();
        let thread = std::thread::Builder::new().name("penstock-keys".into()).spawn(move || {
            block_signals();
            if let Err(e) = guarded("penstock-keys", || drop(this.fetch(count))) {
                this.failed(e);
            }
        });
        if let Err(e) = thread {
            lock(&self.state).asked = None;
            return Err(Error::io("start a thread", &e));
        }
        Ok(())
    }

    /// The thread that fetches has panicked: those who wait hear that.
    fn failed(&self, e: Error) {
        let mut state = lock(&self.state);
        (state.count, state.failed) = (state.count + 1, Some((Instant::now(), e)));
        state.notify();
    }

    /// Fetches it, unless somebody else has since `count` was counted.
    fn fetch(&self, count: u64) -> Result<Arc<Session<F::Key>>> {
        let mut provider = lock(&self.provider);
        {
            let state = lock(&self.state);
            if state.count != count {
                if let Some(session) = &state.session {
                    return Ok(session.clone());
                }
                if let Some((_, e)) = &state.failed {
                    return Err(e.clone());
                }
            }
            if state.refused {
                *provider = None;
            }
        }
        let made = self.made(&mut provider);
        let mut state = lock(&self.state);
        state.count += 1;
        state.refused = false;
        match &made {
            Ok(session) => {
                (state.session, state.failed) = (Some(session.clone()), None);
                state.refused_session = None;
            }
            Err(e) => state.failed = Some((Instant::now(), e.clone())),
        }
        state.notify();
        made
    }

    fn made(&self, provider: &mut Option<F::Provider>) -> Result<Arc<Session<F::Key>>> {
        let found = self.finder.find(&self.common, provider)?;
        let same =
            lock(&self.state).session.as_ref().filter(|known| known.found.key == found.key).map(|s| s.generation);
        let generation = same.unwrap_or_else(|| self.generation.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(Arc::new(Session { found, since: Instant::now(), generation }))
    }

    /// The error of a refusal, with where the request's credentials are from, and what its reader can do: the first of these
    /// hints whose code the server says. `bare` says that a request had none.
    pub(in crate::store::remote) fn explained(
        &self,
        refusal: Refused,
        bare: impl Fn(&FoundKey<F::Key>) -> Option<String>,
        hints: &[(&str, &str)],
    ) -> Error {
        if refusal.error.kind() != ErrorKind::Permission {
            return refusal.error;
        }
        let with = match self.latest() {
            Some(session) => {
                bare(&session.found).unwrap_or_else(|| format!("the credentials are from {}", session.found.origin))
            }
            None => "there are no credentials yet".to_owned(),
        };
        let hint = refusal.hint(hints).map_or_else(String::new, |hint| format!("; {hint}"));
        refusal.error.reworded(|why| format!("{why}; {with}{hint}"))
    }

    /// A request that was made with this generation was refused. Whether the next one will have another credential.
    pub(in crate::store::remote) fn renewed(&self, generation: u64, refusal: &Refused) -> bool {
        generation < self.generation.load(Ordering::Acquire) || (refusal.access && self.renew(generation))
    }

    /// Whether there is, or may be, another credential than that of this generation.
    fn renew(&self, generation: u64) -> bool {
        let mut state = lock(&self.state);
        match &state.session {
            None => true,
            Some(session) if session.generation > generation => true,
            Some(session) if !session.found.renewable => false,
            Some(_) => {
                state.refused_session = state.session.take();
                state.refused = true;
                true
            }
        }
    }
}

impl<F: Finder> fmt::Debug for Credentials<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("finder", &self.finder).finish_non_exhaustive()
    }
}

//! Leases on the files that a load has mapped, while its consumer copies out of them.
//!
//! A mapping shows its file. If another program overwrites the file, a tensor becomes a mixture, and if one truncates it,
//! the next access is SIGBUS. With leases ([`store::lease`](crate::store)) such a program waits, and a thread hears of it at
//! once. It puts private memory in place of the pages of all views that are alive, gives the leases back, and nothing more
//! of the mappings is handed out. So the other program waits for that copy, and not for the consumer.
//!
//! The leases end when nothing more is handed out and no view is alive, or at [`Leased::settle`].

use super::handle::Load;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Alive, Mapping};
use crate::plan::layout::{BlockKind, Layout};
use crate::store::{Breaks, Inherited, Leases};
use crate::sync::{lock, Builder, Condvar, Mutex};
use crate::threads::{guarded, step};
use std::ffi::OsString;
use std::ops::Range;
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Milliseconds from one look at the leases to the next, where no signal comes.
const LOOK: i32 = 250;
/// [`Leased::settle`] gives up when no page has become private for so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// The leases of this process, for its forked children. Not loom's lock: no model has leases.
static LENDING: std::sync::Mutex<Vec<Weak<Lending>>> = std::sync::Mutex::new(Vec::new());

/// The leases of one load.
pub struct Leased(Arc<Lending>);

struct Lending {
    layout: Arc<Layout>,
    /// With the paths of their files.
    mappings: Vec<(OsString, Weak<Mapping>)>,
    alive: Arc<Alive>,
    /// While views of so many bytes are alive, no further view is handed out.
    most_alive: u64,
    process: u32,
    inherited: Mutex<Inherited>,
    state: Mutex<Standing>,
    changed: Condvar,
}

#[derive(Default)]
struct Standing {
    leases: Option<Leases>,
    /// Consumers that are being given a view.
    handing: u32,
    /// Nothing more is handed out.
    over: bool,
    /// A view was refused because views of `most_alive` bytes were alive.
    full: bool,
    /// The views that are alive are to become private memory.
    settling: bool,
    /// When the last page became private.
    moved: Option<Instant>,
    /// The error that kept a page shared.
    short: Option<Error>,
    /// The file that another program waits for, or has waited for.
    asked: Option<u32>,
    /// The leases have been given back; or why what was handed out cannot be trusted.
    ended: Option<Result<()>>,
}

impl Load {
    /// Leases the files that this load has mapped; or says why there are no leases. Once, before anything is handed out.
    /// While views of `most_alive` bytes are alive, no further view is handed out: to copy them takes time, and the kernel
    /// ends a lease 45 s after another program has asked.
    ///
    /// # Errors
    /// `Changed`: a file is no longer what it was. `Invalid`: this load was leased before, or something is handed out.
    pub fn lease(&self, most_alive: u64) -> Result<std::result::Result<Leased, String>> {
        let files = self.checkpoint().local_files()?;
        let alive = match Alive::new() {
            Ok(alive) => Arc::new(alive),
            Err(shortage) => return Ok(Err(format!("no leases: {shortage}"))),
        };
        let mut mapped: Vec<Option<Weak<Mapping>>> = vec![None; files.len()];
        {
            let state = self.shared.lock();
            if state.viewed.contains(&true) {
                return Err(Error::new(ErrorKind::Invalid, "leases are taken before the first tensor is handed out"));
            }
            for (block, spec) in state.blocks.iter().zip(&self.layout.blocks) {
                if let (Some(mapping), BlockKind::Mirror { file, .. }) =
                    (block.as_ref().and_then(|block| block.mapped()), spec.kind)
                {
                    if !mapping.count_views(&alive) {
                        return Err(Error::new(ErrorKind::Invalid, "the files of this load were leased before"));
                    }
                    mapped[file as usize] = Some(Arc::downgrade(mapping));
                }
            }
        }
        let which: Vec<u32> =
            (0..).zip(&mapped).filter(|(_, mapping)| mapping.is_some()).map(|(file, _)| file).collect();
        let shared = Arc::new(Lending {
            layout: self.layout.clone(),
            mappings: (0..)
                .zip(mapped)
                .filter_map(|(file, mapping)| Some((files.path(file).as_os_str().to_owned(), mapping?)))
                .collect(),
            alive,
            most_alive,
            process: std::process::id(),
            inherited: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        Leased::start(shared, move |breaks| Leases::take(files, &which, breaks))
    }
}

/// Takes leases, or says why there are none.
type Take = dyn FnOnce(&Breaks) -> Result<std::result::Result<Leases, String>> + Send;

impl Leased {
    fn start(
        shared: Arc<Lending>,
        take: impl FnOnce(&Breaks) -> Result<std::result::Result<Leases, String>> + Send + 'static,
    ) -> Result<std::result::Result<Leased, String>> {
        {
            let mut lending = LENDING.lock().unwrap_or_else(PoisonError::into_inner);
            lending.retain(|one| one.strong_count() > 0);
            lending.push(Arc::downgrade(&shared));
        }
        let (tell, told) = sync_channel(1);
        let watched = shared.clone();
        let thread = Builder::new().name("penstock-lease".into()).spawn(move || {
            let ended = guarded("penstock-lease", || watch(&watched, Box::new(take), &tell));
            // After a panic the leases are gone: nothing that was handed out can be trusted.
            watched.end(ended.unwrap_or_else(Err));
        });
        // It ends by itself, with the leases.
        if let Err(e) = thread {
            return Ok(Err(format!("no leases: cannot start their thread: {e}")));
        }
        match told.recv() {
            Ok(Ok(Ok(()))) => Ok(Ok(Leased(shared))),
            Ok(Ok(Err(refused))) => Ok(Err(refused)),
            Ok(Err(e)) => Err(e),
            // It has panicked, and says so next.
            Err(_) => {
                let mut state = lock(&shared.state);
                while state.ended.is_none() {
                    state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                let silent = || Error::new(ErrorKind::Internal, "the thread of the file leases ended without an error");
                Err(state.ended.clone().and_then(Result::err).unwrap_or_else(silent))
            }
        }
    }

    /// Asks to make the view of this want. With `Some`, make it, then drop the guard. With `None`, make none: another
    /// program waits for a file, `most_alive` bytes are alive, or the leases have ended. Later calls give `None` too.
    ///
    /// # Errors
    /// `Changed`: a file was changed although it was leased (this process was stopped for longer than the kernel waits).
    pub fn enter(&self, want: u32) -> Result<Option<Handing>> {
        let shared = &self.0;
        if shared.process != std::process::id() {
            return Ok(None);
        }
        let mut state = lock(&shared.state);
        if let Some(Err(e)) = &state.ended {
            return Err(e.clone());
        }
        if state.over || state.settling || state.asked.is_some() || state.ended.is_some() {
            return Ok(None);
        }
        if shared.alive.nbytes() >= shared.most_alive {
            (state.over, state.full) = (true, true);
            return Ok(None);
        }
        let place = shared.layout.places.get(want as usize);
        if let Some(BlockKind::Mirror { file, .. }) = place.map(|place| shared.layout.blocks[place.block as usize].kind)
        {
            if state.leases.as_ref().is_some_and(|leases| leases.is_asked(file)) {
                // The thread finds out which one it is.
                drop(state);
                shared.alive.none().notify();
                return Ok(None);
            }
        }
        state.handing += 1;
        Ok(Some(Handing(shared.clone())))
    }

    /// True after [`enter`](Self::enter) refused a view because views of `most_alive` bytes were alive.
    pub fn is_full(&self) -> bool {
        self.0.process == std::process::id() && lock(&self.0.state).full
    }

    /// The number of the file that another program waits for, or has waited for.
    pub fn asked(&self) -> Option<u32> {
        match self.0.process == std::process::id() {
            true => lock(&self.0.state).asked,
            false => None,
        }
    }

    /// How many views are alive.
    pub fn alive(&self) -> usize {
        match self.0.process == std::process::id() {
            true => self.0.alive.count(),
            false => 0,
        }
    }

    /// True if this process holds no lease any more. A forked child holds none.
    pub fn is_over(&self) -> bool {
        self.0.process != std::process::id() || lock(&self.0.state).ended.is_some()
    }

    /// Nothing more is handed out. The leases last as long as a view is alive. Returns at once.
    pub fn end(&self) {
        if self.0.process == std::process::id() {
            lock(&self.0.state).over = true;
            self.0.alive.none().notify();
        }
    }

    /// Ends the handing out, makes private memory of the views that are alive, and gives the leases back. Waits for `turn`
    /// at most. Returns true once the leases are given back. Returns false where that takes longer: the thread of leases
    /// continues, and the caller calls again.
    ///
    /// # Errors
    /// `Changed`: a file was changed although it was leased. `Invalid`: a view was written to while it became private.
    /// `Timeout`: no page has become private for a minute. Others: why a page cannot become private. The leases then last
    /// until the views are gone; the next call tries again.
    pub fn settle(&self, turn: Duration) -> Result<bool> {
        if self.0.process != std::process::id() {
            return Ok(true);
        }
        let deadline = Instant::now() + turn;
        let mut state = lock(&self.0.state);
        if !state.settling {
            (state.over, state.settling, state.short) = (true, true, None);
            state.moved = Some(Instant::now());
            self.0.alive.none().notify();
        }
        loop {
            if let Some(ended) = &state.ended {
                return ended.clone().map(|()| true);
            }
            if let Some(short) = &state.short {
                return Err(short.clone());
            }
            if state.moved.is_some_and(|moved| moved.elapsed() > PATIENCE) {
                state.moved = Some(Instant::now());
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("for {} s no mapped page has become private memory", PATIENCE.as_secs()),
                ));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            state = wait_for(&self.0.changed, state, left);
        }
    }

    /// How many loads of this process hand out of leased files now.
    pub fn under_way() -> usize {
        let is_under_way = |one: &&Arc<Lending>| {
            let state = lock(&one.state);
            !state.over && state.ended.is_none()
        };
        own().iter().filter(is_under_way).count()
    }

    /// [Settles](Self::settle) all leases that hand out nothing more. Waits for `patience` at most.
    ///
    /// # Errors
    /// The first error of `settle`.
    pub fn settle_all(patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        for one in own() {
            let is_left = {
                let state = lock(&one.state);
                state.over && state.ended.is_none()
            };
            if is_left {
                Leased(one).settle(until.saturating_duration_since(Instant::now()))?;
            }
        }
        Ok(())
    }

    /// In a forked child: closes the descriptors of all leases, which would keep these when the parent has ended.
    pub fn abandon_all() {
        // Another thread of the parent may have held a lock.
        let Ok(mut lending) = LENDING.try_lock() else { return };
        lending.retain(|one| {
            let Some(one) = one.upgrade() else { return false };
            let is_own = one.process == std::process::id();
            if !is_own {
                if let Ok(inherited) = one.inherited.try_lock() {
                    inherited.close();
                }
                // What it owns is the parent's: it must not be dropped here.
                std::mem::forget(one);
            }
            is_own
        });
    }
}

/// A view is being made.
#[must_use]
pub struct Handing(Arc<Lending>);

impl Drop for Handing {
    fn drop(&mut self) {
        if self.0.process == std::process::id() {
            let mut state = lock(&self.0.state);
            state.handing = state.handing.saturating_sub(1);
            self.0.changed.notify_all();
            if state.settling || state.asked.is_some() {
                self.0.alive.none().notify(); // the thread may sleep again
            }
        }
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.end();
    }
}

impl Lending {
    fn end(&self, ended: Result<()>) {
        let mut state = lock(&self.state);
        state.leases = None; // after a panic
        state.ended.get_or_insert(ended);
        self.changed.notify_all();
    }
}

/// The leases that this process has taken.
fn own() -> Vec<Arc<Lending>> {
    // Another thread of a parent may have held the lock when this process was forked. One of this process holds it for a moment.
    let held = (0..100).find_map(|_| {
        LENDING.try_lock().ok().or_else(|| {
            std::thread::sleep(Duration::from_millis(1));
            None
        })
    });
    let Some(lending) = held else { return Vec::new() };
    let mut found = Vec::new();
    for one in lending.iter().filter_map(Weak::upgrade) {
        if one.process == std::process::id() {
            found.push(one);
        } else {
            // What it owns is the parent's: it must not be dropped here.
            std::mem::forget(one);
        }
    }
    found
}

fn wait_for<'s, T>(
    changed: &Condvar,
    state: crate::sync::MutexGuard<'s, T>,
    most: Duration,
) -> crate::sync::MutexGuard<'s, T> {
    changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
}

/// Takes the leases, and gives them back in time. All of it on one thread, which the kernel sends its signals to.
fn watch(shared: &Lending, take: Box<Take>, tell: &SyncSender<Result<std::result::Result<(), String>>>) -> Result<()> {
    let breaks = match Breaks::of_this_thread() {
        Ok(breaks) => breaks,
        Err(shortage) => {
            let _unheard = tell.send(Ok(Err(format!("no leases: {shortage}"))));
            return Ok(());
        }
    };
    let taken = take(&breaks).map(|leases| (leases, breaks));
    let (heard, breaks) = match taken {
        Ok((Ok(leases), breaks)) => {
            *lock(&shared.inherited) = leases.inherited();
            lock(&shared.state).leases = Some(leases);
            (Ok(Ok(())), Some(breaks))
        }
        Ok((Err(refused), _)) => (Ok(Err(refused)), None),
        Err(e) => (Err(e), None),
    };
    let _unheard = tell.send(heard);
    let Some(breaks) = breaks else { return Ok(()) };
    let mut done = Private::default();
    loop {
        let mut polled =
            [breaks.fd(), shared.alive.none().fd()].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        // SAFETY: as many pollfds as the count says.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, LOOK) };
        breaks.clear();
        shared.alive.none().clear();
        step("penstock-lease");
        let mut state = lock(&shared.state);
        let asked = state.leases.as_ref().and_then(Leases::asked);
        state.asked = state.asked.or(asked);
        if asked.is_none() && !state.settling && !(state.over && shared.alive.count() == 0) {
            continue;
        }
        // No further view is made. Those that are being made come first.
        if state.handing > 0 {
            state = wait_for(&shared.changed, state, Duration::from_millis(LOOK as u64));
            if state.handing > 0 {
                continue;
            }
        }
        drop(state);
        let private = make_private(shared, &mut done);
        let mut state = lock(&shared.state);
        // Where the kernel waited no longer, the files may have been changed before their bytes were private.
        let unchanged = state.leases.as_ref().map_or(Ok(()), Leases::unchanged);
        if let (Err(short), Ok(())) = (private, &unchanged) {
            // No memory. The other program waits until the views are gone, or the kernel waits no longer.
            (state.settling, state.short) = (false, Some(short));
            shared.changed.notify_all();
            continue;
        }
        let leases = state.leases.take();
        drop(state);
        drop(leases);
        return unchanged.and(done.disturbed.map_or(Ok(()), Err));
    }
}

/// The addresses at which private memory has replaced pages of files.
#[derive(Default)]
struct Private {
    /// Sorted, disjoint.
    spans: Vec<Range<u64>>,
    /// The error for a program that wrote there meanwhile: a part of what it wrote may be lost.
    disturbed: Option<Error>,
}

impl Private {
    /// The parts of a span in which pages of files are left.
    fn left(&self, span: Range<u64>) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        let mut at = span.start;
        for done in self.spans.iter().filter(|done| done.end > span.start && done.start < span.end) {
            if done.start > at {
                found.push(at..done.start);
            }
            at = done.end;
        }
        if at < span.end {
            found.push(at..span.end);
        }
        found
    }

    /// Adds a span.
    fn add(&mut self, span: Range<u64>) {
        let at = self.spans.partition_point(|done| done.end < span.start);
        let end = at + self.spans[at..].partition_point(|done| done.start <= span.end);
        let joined = self.spans[at..end].iter().fold(span, |all, one| all.start.min(one.start)..all.end.max(one.end));
        self.spans.splice(at..end, [joined]);
    }
}

/// Puts private memory in place of all pages of the mappings in which a view is alive.
fn make_private(shared: &Lending, done: &mut Private) -> Result<()> {
    let spans = merged(shared.alive.spans(), crate::machine::page_size());
    for (path, mapping) in &shared.mappings {
        let Some(mapping) = mapping.upgrade() else { continue };
        let of = mapping.span();
        for span in spans.iter().filter(|span| of.start <= span.start && span.start < of.end) {
            for left in done.left(span.clone()) {
                let undisturbed = mapping.make_private(left, |step| {
                    done.add(step);
                    lock(&shared.state).moved = Some(Instant::now());
                });
                if !undisturbed.map_err(|e| e.at(path))? {
                    let text =
                        "a program wrote to a mapped tensor while it became private memory, and a part of that may be \
                         lost: only read such tensors, or load them with copy=True";
                    done.disturbed.get_or_insert_with(|| Error::new(ErrorKind::Invalid, text).at(path));
                }
            }
        }
    }
    Ok(())
}

/// Whole pages of these spans, in ascending order; those that meet are one.
fn merged(spans: Vec<Range<u64>>, page: u64) -> Vec<Range<u64>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    for span in spans {
        let span = span.start / page * page..span.end.next_multiple_of(page);
        match found.last_mut() {
            // Another mapping may begin where this one ends: no span reaches into it, except by this.
            Some(last) if span.start < last.end => last.end = last.end.max(span.end),
            _ => found.push(span),
        }
    }
    found
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_private_is_not_copied_again() {
        let pairs = |spans: &[Range<u64>]| spans.iter().map(|span| (span.start, span.end)).collect::<Vec<_>>();
        let mut done = Private::default();
        assert_eq!(pairs(&done.left(10..20)), [(10, 20)]);
        for span in [30..40, 10..12, 14..16, 12..14] {
            done.add(span);
        }
        assert_eq!(pairs(&done.spans), [(10, 16), (30, 40)]);
        assert_eq!(pairs(&done.left(5..50)), [(5, 10), (16, 30), (40, 50)]);
        assert_eq!(pairs(&done.left(12..35)), [(16, 30)]);
        assert!(done.left(30..40).is_empty());
        done.add(16..30);
        assert_eq!(pairs(&done.spans), [(10, 40)]);
    }
}

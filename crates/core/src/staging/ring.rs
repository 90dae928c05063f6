//! The ring, the places of loads in it, and the leases on its slabs.

use super::adopted::AdoptedSlabs;
use super::memory_file;
use super::slab::Slab;
use crate::error::{Error, ErrorKind, Result};
use crate::machine::page_size;
use crate::options::{pool_bytes, HUGE_PAGE, IDLE_STAGING, PAGE};
use crate::sync::{lock, Mutex, MutexGuard};
use crate::wake::Wake;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a refused load that holds nothing goes before those that hold something. It asks again when its descriptor is
/// readable, far sooner than this; one that does not has lost interest and must not hold others up. (Tests run on machines so
/// busy that 100 ms pass between two lines.)
const HUNGER: Duration = Duration::from_millis(if cfg!(test) { 2000 } else { 100 });

/// The contents of the ring, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Staging {
    /// Bytes of all slabs of this process.
    pub mapped: u64,
    /// Bytes of those that other processes can map.
    pub shared: u64,
    /// Bytes of other processes' slabs that are mapped here. They are under no limit of this process: their owner's holds.
    pub borrowed: u64,
    /// Bytes of slabs out on lease.
    pub in_use: u64,
    /// Bytes of slabs that a hanging call may still touch; see [`Lease::quarantine`] and [`Lease::set_apart`].
    pub quarantined: u64,
    /// Bytes of slabs of this process registered with a GPU's driver, in use or not.
    pub registered: u64,
    /// Most that was ever mapped at once.
    pub peak: u64,
}

/// All slabs of a process.
pub struct Ring {
    pid: u32,
    state: Mutex<RingState>,
}

#[derive(Default)]
struct RingState {
    staging: Staging,
    /// The one given back last comes last.
    idle: Vec<Arc<Slab>>,
    /// Slabs out on lease or in quarantine, by address.
    out: HashMap<usize, Out>,
    /// Active loads.
    shares: Vec<Member>,
    next_share: u64,
    /// Bytes that are being registered, by kind.
    growing: Vec<(SlabKind, u64)>,
    /// How often growth was stopped.
    stops: u64,
    /// Registered buffers beside the slabs, for loads that gather small copies.
    scratch: Vec<Slab>,
    adopted: AdoptedSlabs,
    /// The processes whose slabs may be kept here; 0: it is not known.
    owners: BTreeMap<[u8; 16], i32>,
    /// The name of this process as an owner.
    name: Option<[u8; 16]>,
}

/// Slabs of the pool that serve the same loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SlabKind {
    /// The driver that has registered them.
    driver: u64,
    shared: bool,
}

impl SlabKind {
    fn has(self, slab: &Slab) -> bool {
        slab.is_registered(self.driver) && slab.is_shared() == self.shared
    }
}

struct Out {
    slab: Weak<Slab>,
    share: u64,
    /// Counted as quarantined, no longer as in use.
    apart: bool,
    /// Even when the lease is dropped.
    forever: bool,
    /// Is not used again when the lease is dropped.
    retired: bool,
}

/// An active load, as the ring sees it.
struct Member {
    id: u64,
    wake: Arc<Wake>,
    held: u64,
    peak: u64,
    /// Refused, and not notified since.
    waiting: bool,
    refused: Option<Instant>,
    /// Slabs are being registered for it.
    growing: bool,
}

impl RingState {
    fn member(&mut self, id: u64) -> Option<&mut Member> {
        self.shares.iter_mut().find(|m| m.id == id)
    }

    /// True if the limit leaves room for one more slab of `len` bytes, or there would be none at all.
    fn has_room(&self, len: u64, limit: u64) -> bool {
        // Slabs on their way in or out count too: each notifies when it is there or gone.
        let Staging { mapped, quarantined, .. } = self.staging;
        mapped + len <= limit || (self.idle.is_empty() && mapped - quarantined <= len)
    }

    fn map(&mut self, bytes: u64, shared: bool) {
        self.staging.mapped += bytes;
        self.staging.shared += if shared { bytes } else { 0 };
        self.staging.peak = self.staging.peak.max(self.staging.mapped);
    }

    fn unmap(&mut self, bytes: u64, shared: bool) {
        self.staging.mapped -= bytes;
        self.staging.shared -= if shared { bytes } else { 0 };
    }

    /// A slab was made that was to be `shared`. It is private where the system refuses that.
    fn has_made(&mut self, slab: &Slab, shared: bool) {
        if shared && !slab.is_shared() {
            self.staging.shared -= slab.len() as u64;
        }
    }

    /// Whether load `id` may have another slab of `len` bytes under its `limit`, as far as fairness goes.
    fn is_turn_of(&self, id: u64, len: u64, limit: u64) -> bool {
        let fair = (limit / self.shares.len().max(1) as u64).max(2 * len);
        let held = self.shares.iter().find(|m| m.id == id).map_or(0, |m| m.held);
        let hungry = |m: &Member| m.held == 0 && m.refused.is_some_and(|at| at.elapsed() < HUNGER);
        held + len <= fair && (held == 0 || !self.shares.iter().any(|m| m.id != id && hungry(m)))
    }

    /// Takes the descriptors of all that wait, to be notified once the lock is free.
    fn waiters(&mut self) -> Vec<Arc<Wake>> {
        let waiting = |m: &mut Member| std::mem::take(&mut m.waiting).then(|| m.wake.clone());
        self.shares.iter_mut().filter_map(waiting).collect()
    }

    /// Takes out what is idle and plain beyond what is kept. The oldest goes first.
    fn surplus(&mut self) -> Vec<Arc<Slab>> {
        if !self.shares.is_empty() {
            return Vec::new();
        }
        // A shared slab holds a descriptor, so only one whose registration was paid for stays.
        let goes = |s: &Arc<Slab>| s.is_plain() && s.is_shared();
        let (mut surplus, kept) = std::mem::take(&mut self.idle).into_iter().partition::<Vec<_>, _>(goes);
        self.idle = kept;
        let mut idle: u64 = self.idle.iter().filter(|s| s.is_plain()).map(|s| s.len() as u64).sum();
        while let Some(oldest) = self.idle.iter().position(|s| idle > IDLE_STAGING && s.is_plain()) {
            let slab = self.idle.remove(oldest);
            idle -= slab.len() as u64;
            surplus.push(slab);
        }
        surplus
    }

    /// Bytes of slabs that serve a load of slabs of `len` bytes to a driver's device: registered, or about to be.
    fn pool(&self, kind: SlabKind, fits: impl Fn(u64) -> bool) -> u64 {
        let idle = self.idle.iter().filter(|s| kind.has(s)).map(|s| s.len() as u64);
        let out = self.out.values().filter(|o| !o.apart && !o.retired).filter_map(|o| o.slab.upgrade());
        let out = out.filter(|s| kind.has(s)).map(|s| s.len() as u64);
        let there: u64 = idle.chain(out).filter(|len| fits(*len)).sum();
        there + self.growing.iter().find(|g| g.0 == kind).map_or(0, |g| g.1)
    }

    /// Bytes that are being registered, of one kind.
    fn growing(&mut self, kind: SlabKind) -> &mut u64 {
        let at = self.growing.iter().position(|g| g.0 == kind).unwrap_or_else(|| {
            self.growing.push((kind, 0));
            self.growing.len() - 1
        });
        &mut self.growing[at].1
    }
}

/// Frees the lock, and then notifies all that wait.
fn notify(mut state: MutexGuard<'_, RingState>) {
    let waiters = state.waiters();
    drop(state);
    waiters.iter().for_each(|w| w.notify());
}

static PROCESS: AtomicPtr<Ring> = AtomicPtr::new(ptr::null_mut());

impl Ring {
    /// The ring of this process. A forked child has its own.
    pub fn process() -> &'static Ring {
        // No lock: another thread of the parent might have held it when the process forked.
        loop {
            let current = PROCESS.load(Ordering::Acquire);
            // SAFETY: null, or leaked below and never freed.
            if let Some(ring) = unsafe { current.as_ref() }.filter(|r| r.pid == std::process::id()) {
                return ring;
            }
            let fresh = Box::into_raw(Box::new(Self::new()));
            if PROCESS.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above and published to nobody.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    pub(super) fn new() -> Self {
        Self { pid: std::process::id(), state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, RingState> {
        lock(&self.state)
    }

    /// Tries whether the system gives memory that other processes can map.
    ///
    /// # Errors
    /// The errors of [`Share::share_slabs`].
    pub(crate) fn can_share() -> Result<()> {
        memory_file::allocate(&memory_file::create(page_size())?, 0, page_size())
    }

    /// The inodes of this process' shared slabs that are registered: neighbours keep their mappings of these.
    pub(crate) fn registered_inodes(&self) -> Vec<u64> {
        let state = self.lock();
        let out = state.out.values().filter_map(|o| o.slab.upgrade());
        let all = state.idle.iter().cloned().chain(out).filter(|slab| slab.is_shared() && !slab.is_plain());
        all.filter_map(|slab| Some(slab.identity()?.1)).collect()
    }

    /// A place in the ring for a load that wants slabs of `slab_bytes` under a limit of `limit` bytes. Slabs of a huge page or
    /// more are whole huge pages, smaller ones whole pages.
    pub fn join(&'static self, slab_bytes: u64, limit: u64) -> Result<Share> {
        let wake = Arc::new(Wake::new()?);
        let mut state = self.lock();
        let id = state.next_share;
        state.next_share += 1;
        let member = Member { id, wake: wake.clone(), held: 0, peak: 0, waiting: false, refused: None, growing: false };
        state.shares.push(member);
        let unit = if slab_bytes >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        Ok(Share {
            ring: self,
            id,
            slab: slab_bytes.max(1).next_multiple_of(unit),
            limit,
            wake,
            shared: false,
            pinned: None,
        })
    }

    /// The contents now.
    pub fn staging(&self) -> Staging {
        let state = self.lock();
        let out = state.out.values().filter_map(|o| o.slab.upgrade());
        let registered = state.idle.iter().cloned().chain(out).filter(|s| !s.is_plain()).map(|s| s.len() as u64).sum();
        Staging { registered, borrowed: state.adopted.nbytes(), ..state.staging }
    }

    /// The slab that begins at this address: one on lease, or an adopted one.
    pub fn slab_at(&self, address: *const u8) -> Option<Arc<Slab>> {
        let (state, address) = (self.lock(), address as usize);
        let on_lease = state.out.get(&address).and_then(|out| out.slab.upgrade());
        on_lease.or_else(|| state.adopted.at(address))
    }

    /// Another process' slab, mapped over its file: `len` bytes of it. `owner` is that process' own name. A file that is
    /// adopted again is the same slab. Nothing here writes to it.
    ///
    /// It lives as long as somebody holds it. Once it is [registered](Slab::register), it is kept until
    /// [`disown`](Self::disown), [`disown_all_but`](Self::disown_all_but) or [`trim`](Self::trim).
    ///
    /// # Errors
    /// `Peer`: the file is not one that can be mapped safely. `Permission`, `OutOfMemory`, `Io`: the kernel does not map it.
    /// `Forked`.
    pub fn adopt(&'static self, fd: OwnedFd, owner: [u8; 16], len: u64) -> Result<Arc<Slab>> {
        if self.pid != std::process::id() {
            return Err(Error::new(ErrorKind::Forked, "the staging memory belongs to the parent process"));
        }
        let (file, identity) = memory_file::checked_file(fd, len)?;
        let again = |state: &mut RingState| state.adopted.again(&owner, identity);
        let known = again(&mut self.lock());
        let slab = match known {
            Some(known) => known,
            None => {
                let keep = |slab: &Slab| self.lock().adopted.keep(slab.address() as usize);
                let slab = Arc::new(Slab::of_neighbour(&file, identity, len, Box::new(keep))?);
                let mut state = self.lock();
                // Another thread may have been faster.
                let faster = again(&mut state);
                if faster.is_none() {
                    state.adopted.add(owner, identity, &slab);
                }
                drop(state);
                faster.unwrap_or(slab)
            }
        };
        if (slab.len() as u64) < len {
            let (there, kind) = (slab.len(), ErrorKind::Peer);
            return Err(Error::new(kind, format!("a neighbour's slab has {there} bytes here, and not {len}")));
        }
        Ok(slab)
    }

    /// Keeps the kept slabs of an owner no longer, except those whose (device, inode) are `still` in use there. Gives them:
    /// a driver may be slow to unpin what the caller drops. A slab that is held goes with its last holder. `still` must not
    /// use the ring.
    pub fn disown(&self, owner: [u8; 16], still: &dyn Fn((u64, u64)) -> bool) -> Vec<Arc<Slab>> {
        self.lock().adopted.disown(|adopted| adopted.owner == owner && !still(adopted.file))
    }

    /// The same for the slabs of all owners that are not alive.
    pub fn disown_all_but(&self, is_alive: &dyn Fn(&[u8; 16]) -> bool) -> Vec<Arc<Slab>> {
        self.lock().adopted.disown(|adopted| !is_alive(&adopted.owner))
    }

    /// The process of an owner whose slabs may be kept here; 0: it is not known.
    pub(crate) fn note_owner(&self, owner: [u8; 16], process: i32) {
        self.lock().owners.insert(owner, process);
    }

    /// Keeps the slabs of processes that have ended no longer. Gives them.
    pub(crate) fn disown_dead(&self) -> Vec<Arc<Slab>> {
        let mut state = self.lock();
        // SAFETY: signal 0 is none: it only says whether there is such a process.
        let has_ended = |process: i32| process > 0 && unsafe { libc::kill(process, 0) } != 0;
        state.owners.retain(|_, process| !has_ended(*process));
        let RingState { owners, adopted, .. } = &mut *state;
        adopted.disown(|adopted| !owners.contains_key(&adopted.owner))
    }

    /// The name of this process as an owner of slabs, for its life; `None` if `make` gives none.
    pub(crate) fn name(&self, make: impl FnOnce() -> Option<[u8; 16]>) -> Option<[u8; 16]> {
        let mut state = self.lock();
        if state.name.is_none() {
            state.name = make();
        }
        state.name
    }

    /// Gives all idle slabs back to the system, and with them their registrations: also other processes' slabs that nobody
    /// holds. Tells how many bytes that were.
    pub fn trim(&self) -> u64 {
        let mut state = self.lock();
        let (idle, scratch) = (std::mem::take(&mut state.idle), std::mem::take(&mut state.scratch));
        let adopted = state.adopted.take_idle();
        drop(state);
        let slabs = idle.iter().chain(&adopted).map(|s| s.len());
        let bytes = slabs.chain(scratch.iter().map(Slab::len)).sum::<usize>();
        drop((scratch, adopted));
        self.free(idle);
        bytes as u64
    }

    /// Ends every [`Growth`] of now, at its next step.
    pub fn stop_growing(&self) {
        self.lock().stops += 1;
    }

    /// A registered buffer beside the slabs, which counts nowhere; to be [given back](Self::give_scratch).
    pub(crate) fn take_scratch(&self, driver: u64) -> Option<Slab> {
        let mut state = self.lock();
        let at = state.scratch.iter().position(|s| s.is_registered(driver))?;
        Some(state.scratch.swap_remove(at))
    }

    /// Keeps a buffer that is no longer used for the next load.
    pub(crate) fn give_scratch(&self, scratch: Slab) {
        self.lock().scratch.push(scratch);
    }

    /// Unmaps slabs, without the lock since a driver may be slow to unpin them; they count until they are gone.
    fn free(&self, slabs: Vec<Arc<Slab>>) {
        if slabs.is_empty() {
            return;
        }
        let sizes: Vec<_> = slabs.iter().map(|s| (s.len() as u64, s.is_shared())).collect();
        drop(slabs);
        let mut state = self.lock();
        sizes.into_iter().for_each(|(len, shared)| state.unmap(len, shared));
        notify(state);
    }

    /// Slabs have come back, or a load has gone: all that wait may ask again, and what is idle beyond the rest is unmapped.
    fn settle(&self, mut state: MutexGuard<'_, RingState>) {
        let surplus = state.surplus();
        notify(state);
        self.free(surplus);
    }

    /// See [`Lease::quarantine`].
    pub fn quarantine(&self, address: *const u8) {
        self.set_apart(address, true);
    }

    fn set_apart(&self, address: *const u8, forever: bool) {
        let mut state = self.lock();
        if let Some(adopted) = state.adopted.at(address as usize).filter(|_| forever) {
            // What hangs may touch it for ever.
            return std::mem::forget(adopted);
        }
        let Some(out) = state.out.get_mut(&(address as usize)).filter(|o| !o.forever) else { return };
        let (share, Some(slab)) = (out.share, out.slab.upgrade()) else { return };
        let before = std::mem::replace(&mut out.apart, true);
        out.forever = forever;
        if !before {
            let len = slab.len() as u64;
            state.staging.in_use -= len;
            state.staging.quarantined += len;
            if let Some(member) = state.member(share) {
                member.held -= len;
            }
        }
        if forever {
            // Dropped leases leave it alone from now on; this keeps it when they are gone.
            std::mem::forget(slab);
        }
        notify(state);
    }

    /// See [`Lease::retire`].
    pub(crate) fn retire(&self, address: *const u8) {
        if let Some(out) = self.lock().out.get_mut(&(address as usize)) {
            out.retired = true;
        }
    }

    fn release(&self, slab: Arc<Slab>) {
        let mut state = self.lock();
        let address = slab.address() as usize;
        if state.out.get(&address).is_some_and(|o| o.forever) {
            return;
        }
        let Some(out) = state.out.remove(&address) else { return };
        let len = slab.len() as u64;
        if out.apart {
            state.staging.quarantined -= len;
        } else {
            state.staging.in_use -= len;
            if let Some(member) = state.member(out.share) {
                member.held -= len;
            }
        }
        if out.retired {
            drop(state);
            return self.free(vec![slab]);
        }
        state.idle.push(slab);
        self.settle(state);
    }
}

/// One load's place in the ring, until it is dropped.
pub struct Share {
    ring: &'static Ring,
    id: u64,
    slab: u64,
    limit: u64,
    pub(super) wake: Arc<Wake>,
    /// Its slabs are files that other processes can map.
    shared: bool,
    pinned: Option<Pinned>,
}

/// True if a load with slabs of `slab` bytes can use a registered slab of `len` bytes: one of that size, or a larger one if two
/// of them fit the limit.
fn serves(len: u64, slab: u64, limit: u64) -> bool {
    len == slab || (len > slab && 2 * len <= limit)
}

/// The registered slabs for this share, and how many bytes of them are enough.
#[derive(Debug, Clone, Copy)]
struct Pinned {
    kind: SlabKind,
    enough: u64,
}

impl Share {
    /// A slab, or `None` where none can be had now; [`fd`](Self::fd) then becomes readable when it may.
    pub fn try_acquire(&self) -> Result<Option<Lease>> {
        if self.ring.pid != std::process::id() {
            return Err(Error::new(
                ErrorKind::Forked,
                "this load belongs to the parent process, whose staging memory a child does not have; start a new load \
                 in the child",
            ));
        }
        loop {
            let mut state = self.ring.lock();
            if !state.is_turn_of(self.id, self.slab, self.limit) {
                return Ok(self.refuse(&mut state));
            }
            if let Some(i) = self.idle(&state) {
                let slab = state.idle.remove(i);
                return Ok(Some(self.lease(&mut state, slab)));
            }
            if self.pinned.is_some_and(|pinned| self.waits_for_registered(&state, pinned)) {
                return Ok(self.refuse(&mut state));
            }
            if state.has_room(self.slab, self.limit) {
                // Counted before it is there, so that others cannot take the same room; mapped without the lock.
                state.map(self.slab, self.shared);
                drop(state);
                let mapped = Slab::map(self.slab, self.shared);
                let mut state = self.ring.lock();
                return match mapped {
                    Ok(slab) => {
                        state.has_made(&slab, self.shared);
                        Ok(Some(self.lease(&mut state, Arc::new(slab))))
                    }
                    Err(cause) => {
                        state.unmap(self.slab, self.shared);
                        // Its own refusal comes after that.
                        let waiters = state.waiters();
                        // Where others hold slabs the load goes on with what there is, and asks again when one comes back.
                        let outcome = if state.staging.in_use > 0 { Ok(self.refuse(&mut state)) } else { Err(cause) };
                        drop(state);
                        waiters.iter().for_each(|w| w.notify());
                        outcome
                    }
                };
            }
            if state.idle.is_empty() {
                return Ok(self.refuse(&mut state));
            }
            // Slabs of another size or kind, left by an earlier load, make room: registered ones last.
            let victim = state.idle.iter().position(|s| s.is_plain()).unwrap_or(0);
            let victim = state.idle.remove(victim);
            drop(state);
            self.ring.free(vec![victim]);
        }
    }

    /// The idle slab to take, if there is one.
    fn idle(&self, state: &RingState) -> Option<usize> {
        let same = |s: &Arc<Slab>| s.len() as u64 == self.slab && s.is_shared() == self.shared;
        let Some(pinned) = self.pinned else {
            // Registered ones are left to loads that need them, as long as there are others.
            return state
                .idle
                .iter()
                .rposition(|s| same(s) && s.is_plain())
                .or_else(|| state.idle.iter().rposition(same));
        };
        let fits = |s: &Arc<Slab>| {
            let len = s.len() as u64;
            pinned.kind.has(s) && serves(len, self.slab, self.limit) && state.is_turn_of(self.id, len, self.limit)
        };
        state.idle.iter().rposition(fits).or_else(|| match self.waits_for_registered(state, pinned) {
            true => None,
            false => state.idle.iter().rposition(same),
        })
    }

    /// Whether a registered slab will come, or come back: so that no other is made or taken.
    fn waits_for_registered(&self, state: &RingState, pinned: Pinned) -> bool {
        state.shares.iter().any(|m| m.id == self.id && m.growing)
            || state.pool(pinned.kind, |len| serves(len, self.slab, self.limit)) >= pinned.enough
    }

    /// From now on this load gets slabs that other processes can map, and no others; before that it got private ones. To be
    /// called before [`pin`](Self::pin), and before the first slab is acquired.
    ///
    /// # Errors
    /// `Unsupported`, `Permission`, `Limit`, `OutOfMemory`, `Io`: the system refuses a first page of such memory, and the slabs
    /// stay private.
    pub fn share_slabs(&mut self) -> Result<()> {
        Ring::can_share()?;
        self.shared = true;
        Ok(())
    }

    /// From now on this load is to have slabs that are registered with `driver` (a number above 0): enough for `nbytes`
    /// bytes at once, within what is [allowed](pool_bytes). The owner of the growth registers its slabs, or drops it;
    /// then the load continues with plain slabs.
    pub fn pin(&mut self, driver: u64, nbytes: u64) -> Growth {
        let wanted = nbytes.div_ceil(self.slab).max(1).saturating_mul(self.slab);
        let kind = SlabKind { driver, shared: self.shared };
        let pinned = Pinned { kind, enough: pool_bytes(self.limit, self.slab).min(wanted) };
        self.pinned = Some(pinned);
        let mut state = self.ring.lock();
        if let Some(member) = state.member(self.id) {
            member.growing = true;
        }
        let (ring, share, slab, limit, stops) = (self.ring, self.id, self.slab, self.limit, state.stops);
        Growth { ring, share, slab, limit, pinned, stops }
    }

    fn lease(&self, state: &mut RingState, slab: Arc<Slab>) -> Lease {
        let len = slab.len() as u64;
        state.staging.in_use += len;
        if let Some(member) = state.member(self.id) {
            member.held += len;
            member.peak = member.peak.max(member.held);
            (member.waiting, member.refused) = (false, None);
        }
        let out = Out { slab: Arc::downgrade(&slab), share: self.id, apart: false, forever: false, retired: false };
        state.out.insert(slab.address() as usize, out);
        Lease { ring: self.ring, slab: Some(slab) }
    }

    fn refuse(&self, state: &mut RingState) -> Option<Lease> {
        if let Some(member) = state.member(self.id) {
            (member.waiting, member.refused) = (true, Some(Instant::now()));
        }
        None
    }

    /// Readable when it is worth asking again after a `None`; call [`clear`](Self::clear) before asking.
    pub fn fd(&self) -> RawFd {
        self.wake.fd()
    }

    /// Makes the descriptor unreadable until the next notification.
    pub fn clear(&self) {
        self.wake.clear();
    }

    /// Waits until it is worth asking again, at most `time`.
    pub(crate) fn wait(&self, time: Duration) {
        self.wake.wait(time.as_millis() as i32);
    }

    /// Size of its slabs in bytes.
    pub fn slab_bytes(&self) -> u64 {
        self.slab
    }

    /// Most bytes of slabs that this load held at once.
    pub fn peak(&self) -> u64 {
        if self.ring.pid != std::process::id() {
            return 0;
        }
        self.ring.lock().member(self.id).map_or(0, |m| m.peak)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.ring.pid != std::process::id() {
            return;
        }
        let mut state = self.ring.lock();
        state.shares.retain(|m| m.id != self.id);
        // The others' parts have grown.
        self.ring.settle(state);
    }
}

/// The slabs to register for a load until the pool is as large as it can use. Another load may use them as well. The
/// load waits for registered slabs until this is dropped.
pub struct Growth {
    ring: &'static Ring,
    share: u64,
    slab: u64,
    limit: u64,
    pinned: Pinned,
    stops: u64,
}

impl Growth {
    /// The driver to register with.
    pub(crate) fn driver(&self) -> u64 {
        self.pinned.kind.driver
    }

    /// Whether there are fewer registered slabs than the load can use, and growth was not stopped.
    pub(crate) fn is_wanted(&self) -> bool {
        self.ring.pid == std::process::id() && self.is_wanted_in(&self.ring.lock())
    }

    fn is_wanted_in(&self, state: &RingState) -> bool {
        let pool = state.pool(self.pinned.kind, |len| serves(len, self.slab, self.limit));
        self.stops == state.stops && pool < self.pinned.enough
    }

    /// The next slab to register, to be [added](Self::add) in any case; `None` when there are enough, or there is no room.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn next(&self) -> Result<Option<Arc<Slab>>> {
        let kind = self.pinned.kind;
        loop {
            let mut state = self.ring.lock();
            if !self.is_wanted_in(&state) {
                return Ok(None);
            }
            let fits = |s: &Arc<Slab>| s.is_plain() && s.len() as u64 == self.slab && s.is_shared() == kind.shared;
            if let Some(slab) = state.idle.iter().rposition(fits).map(|at| state.idle.remove(at)) {
                *state.growing(kind) += self.slab;
                return Ok(Some(slab));
            }
            if state.has_room(self.slab, self.limit) {
                state.map(self.slab, kind.shared);
                *state.growing(kind) += self.slab;
                drop(state);
                return match Slab::map(self.slab, kind.shared) {
                    Ok(slab) => {
                        self.ring.lock().has_made(&slab, kind.shared);
                        Ok(Some(Arc::new(slab)))
                    }
                    Err(cause) => {
                        let mut state = self.ring.lock();
                        state.unmap(self.slab, kind.shared);
                        *state.growing(kind) -= self.slab;
                        Err(cause)
                    }
                };
            }
            // Slabs of another size or kind make room.
            let Some(victim) = state.idle.iter().position(|s| s.is_plain()) else { return Ok(None) };
            let victim = state.idle.remove(victim);
            drop(state);
            self.ring.free(vec![victim]);
        }
    }

    /// Puts a slab into the ring that came from [`next`](Self::next), registered or not.
    pub(crate) fn add(&self, slab: Arc<Slab>) {
        let mut state = self.ring.lock();
        *state.growing(self.pinned.kind) -= self.slab;
        state.idle.push(slab);
        self.ring.settle(state);
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        if self.ring.pid != std::process::id() {
            return;
        }
        let mut state = self.ring.lock();
        if let Some(member) = state.member(self.share) {
            member.growing = false;
        }
        notify(state);
    }
}

/// A slab on lease: its holder's alone until it is dropped.
pub struct Lease {
    ring: &'static Ring,
    /// Always there; taken by `drop`.
    slab: Option<Arc<Slab>>,
}

impl Lease {
    /// First byte.
    pub fn address(&self) -> *mut u8 {
        self.slab.as_ref().map_or(ptr::null_mut(), |s| s.address())
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.slab.as_ref().map_or(0, |s| s.len())
    }

    /// Never gives the slab back: something that hangs (a read from a dead mount, a copy to a dead GPU) may still touch
    /// it, however late. Its memory stays mapped and counted for the life of the process.
    pub fn quarantine(&self) {
        if self.ring.pid == std::process::id() {
            self.ring.quarantine(self.address());
        }
    }

    /// The slab is not used again: when the lease is dropped, its registration, mapping and file go. A neighbour that has mapped
    /// it keeps the memory until its own mapping goes.
    pub fn retire(&self) {
        if self.ring.pid == std::process::id() {
            self.ring.retire(self.address());
        }
    }

    /// Counts the slab as quarantined until the lease is dropped: its load has given it up, but what hangs holds the lease
    /// too, and may come back. Other loads do not wait for it meanwhile.
    pub fn set_apart(&self) {
        if self.ring.pid == std::process::id() {
            self.ring.set_apart(self.address(), false);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(slab) = self.slab.take() else { return };
        if self.ring.pid == std::process::id() {
            self.ring.release(slab);
        } else {
            std::mem::forget(slab);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::MIB;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    const SLAB: u64 = 2 * MIB;

    fn ring() -> &'static Ring {
        Box::leak(Box::new(Ring::new()))
    }

    fn acquire(share: &Share) -> Lease {
        share.try_acquire().unwrap().expect("a slab")
    }

    fn refused(share: &Share) -> bool {
        share.try_acquire().unwrap().is_none()
    }

    #[test]
    fn the_slab_given_back_last_comes_first_and_is_huge_page_aligned() {
        let share = ring().join(3 * MIB, 64 * MIB).unwrap();
        let (a, b) = (acquire(&share), acquire(&share));
        assert_eq!((a.len() as u64, a.address() as u64 % HUGE_PAGE), (4 * MIB, 0));
        let (at_a, at_b) = (a.address(), b.address());
        assert_ne!(at_a, at_b);
        drop(b);
        drop(a);
        let (first, second) = (acquire(&share), acquire(&share));
        assert_eq!((first.address(), second.address()), (at_a, at_b));
        assert_eq!(share.peak(), 8 * MIB);
    }

    #[test]
    fn slabs_below_a_huge_page_have_the_size_that_was_asked_for() {
        let ring = ring();
        let share = ring.join(MIB / 4, MIB).unwrap();
        let held: Vec<_> = (0..4).map(|_| acquire(&share)).collect();
        assert!(refused(&share));
        assert!(held.iter().all(|slab| slab.len() as u64 == MIB / 4 && slab.address() as u64 % PAGE == 0));
        assert_eq!((share.peak(), ring.staging().mapped), (MIB, MIB));
    }

    #[test]
    fn the_limit_holds_and_a_release_wakes_the_refused() {
        let ring = ring();
        let share = ring.join(SLAB, 3 * SLAB + 1).unwrap();
        let mut held: Vec<_> = (0..3).map(|_| acquire(&share)).collect();
        assert!(!share.wake.wait(0) && refused(&share));
        assert_eq!(
            ring.staging(),
            Staging { mapped: 3 * SLAB, in_use: 3 * SLAB, peak: 3 * SLAB, ..Staging::default() }
        );
        held.pop();
        assert!(share.wake.wait(0));
        share.clear();
        acquire(&share);
        assert!(!share.wake.wait(0), "one notification for one refusal");
    }

    #[test]
    fn two_slabs_are_granted_whatever_the_limit() {
        let share = ring().join(SLAB, 1).unwrap();
        let _held = (acquire(&share), acquire(&share));
        assert!(refused(&share));
    }

    #[test]
    fn slabs_of_another_size_make_room() {
        let ring = ring();
        let small = ring.join(SLAB, 8 * SLAB).unwrap();
        drop((0..8).map(|_| acquire(&small)).collect::<Vec<_>>());
        drop(small);
        let big = ring.join(4 * SLAB, 8 * SLAB).unwrap();
        let _held = (acquire(&big), acquire(&big));
        assert_eq!(ring.staging().mapped, 8 * SLAB);
        assert_eq!(ring.staging().peak, 8 * SLAB, "never more than the limit, not even in between");
    }

    #[test]
    fn loads_side_by_side_have_equal_parts_and_a_lone_one_has_all() {
        let ring = ring();
        let first = ring.join(SLAB, 8 * SLAB).unwrap();
        let mut greedy: Vec<_> = (0..8).map(|_| acquire(&first)).collect();
        let second = ring.join(SLAB, 8 * SLAB).unwrap();
        assert!(refused(&second));
        greedy.truncate(5);
        assert!(second.wake.wait(0));
        let mut held = vec![acquire(&second)];
        assert!(refused(&first), "it is above its part, and the other holds something already");
        held.extend((0..2).map(|_| acquire(&second)));
        assert!(refused(&second), "nothing left under the limit");
        drop((held, second));
        assert!(first.wake.wait(0), "the other load's end is a reason to ask again");
        greedy.push(acquire(&first));
    }

    #[test]
    fn a_load_that_holds_nothing_goes_first_but_not_for_ever() {
        let ring = ring();
        let rich = ring.join(SLAB, 3 * SLAB).unwrap();
        let poor = ring.join(SLAB, 3 * SLAB).unwrap();
        let other = ring.join(SLAB, 3 * SLAB).unwrap();
        let mut held = vec![acquire(&rich), acquire(&rich)];
        let last = acquire(&other);
        assert!(refused(&poor));
        held.pop();
        assert!(refused(&rich), "the hungry one is to have it");
        drop(acquire(&poor));
        held.push(acquire(&rich));
        assert!(refused(&poor));
        held.pop();
        std::thread::sleep(HUNGER + Duration::from_millis(20));
        held.push(acquire(&rich));
        drop(last);
    }

    #[test]
    fn after_the_last_load_only_the_idle_allowance_stays_and_trim_frees_that_too() {
        let ring = ring();
        let share = ring.join(SLAB, 4 * IDLE_STAGING).unwrap();
        let held: Vec<_> = (0..2 * IDLE_STAGING / SLAB).map(|_| acquire(&share)).collect();
        let late = acquire(&share);
        drop(held);
        assert_eq!(ring.staging().mapped, 2 * IDLE_STAGING + SLAB);
        drop(share);
        assert_eq!(ring.staging().mapped, IDLE_STAGING + SLAB);
        drop(late);
        assert_eq!(ring.staging().mapped, IDLE_STAGING);
        ring.trim();
        assert_eq!(ring.staging().mapped, 0);
    }

    #[test]
    fn slabs_of_reads_that_hang_do_not_starve_the_next_load_and_come_back_when_those_end() {
        let ring = ring();
        let share = ring.join(SLAB, 4 * SLAB).unwrap();
        let hanging: Vec<_> = (0..4).map(|_| acquire(&share)).collect();
        assert!(refused(&share));
        hanging.iter().for_each(Lease::set_apart);
        drop(share);
        let next = ring.join(SLAB, 4 * SLAB).unwrap();
        let held = [acquire(&next), acquire(&next)];
        assert!(refused(&next));
        let there = ring.staging();
        assert_eq!((there.mapped, there.in_use, there.quarantined), (6 * SLAB, 2 * SLAB, 4 * SLAB));
        drop(hanging);
        drop(acquire(&next));
        drop((held, next));
        ring.trim();
        assert_eq!(ring.staging(), Staging { peak: 6 * SLAB, ..Staging::default() });
    }

    #[test]
    fn a_quarantined_slab_is_neither_reused_nor_freed() {
        let ring = ring();
        let share = ring.join(SLAB, 4 * SLAB).unwrap();
        let lease = acquire(&share);
        let address = lease.address();
        lease.quarantine();
        lease.quarantine();
        drop(lease);
        let held: Vec<_> = (0..3).map(|_| acquire(&share)).collect();
        assert!(held.iter().all(|l| l.address() != address) && refused(&share));
        drop(held);
        drop(share);
        ring.trim();
        assert_eq!(ring.staging(), Staging { mapped: SLAB, quarantined: SLAB, peak: 4 * SLAB, ..Staging::default() });
        // SAFETY: still mapped, which is the point.
        unsafe { address.write_volatile(1) };
    }

    #[test]
    fn a_registration_is_made_once_per_context_and_undone_before_the_memory_goes() {
        struct Undo(Arc<AtomicUsize>, usize);
        impl Drop for Undo {
            fn drop(&mut self) {
                // SAFETY: mapped, or this test dies, which is the point.
                unsafe { (self.1 as *mut u8).write_volatile(1) };
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (ring, undone, mut made) = (ring(), Arc::new(AtomicUsize::new(0)), 0);
        let share = ring.join(SLAB, 4 * SLAB).unwrap();
        for context in [1, 1, 2, 1] {
            let lease = acquire(&share);
            let slab = ring.slab_at(lease.address()).unwrap();
            slab.register(context, |address, _| {
                made += 1;
                Ok(Box::new(Undo(undone.clone(), address as usize)))
            })
            .unwrap();
        }
        assert_eq!(made, 2);
        drop(share);
        assert_eq!(undone.load(Ordering::SeqCst), 0);
        ring.trim();
        assert_eq!(undone.load(Ordering::SeqCst), 2);
    }

    const DRIVER: u64 = 1;

    /// The work of the pinning thread, as far as it gets.
    fn grow(growth: &Growth, most: usize) -> usize {
        let slabs = std::iter::from_fn(|| growth.next().unwrap());
        let register = |slab: Arc<Slab>| {
            slab.register(DRIVER, |_, _| Ok(Box::new(()))).unwrap();
            growth.add(slab);
        };
        slabs.take(most).map(register).count()
    }

    #[test]
    fn a_pinned_share_waits_for_registered_slabs_and_gets_no_others_once_there_are_enough() {
        let ring = ring();
        let mut share = ring.join(SLAB, 16 * SLAB).unwrap();
        let growth = share.pin(DRIVER, 100 * SLAB);
        assert!(refused(&share), "while more are on the way it waits");
        assert_eq!(grow(&growth, 3), 3);
        assert!(share.wake.wait(0), "each one that is added is told of");
        let held: Vec<_> = (0..3).map(|_| acquire(&share)).collect();
        assert!(refused(&share));
        assert_eq!(grow(&growth, 100), 5, "half of the limit is enough");
        drop(growth);
        let rest: Vec<_> = (0..5).map(|_| acquire(&share)).collect();
        share.clear();
        assert!(refused(&share), "there is room for more, and it waits for one that comes back");
        drop(held);
        assert!(share.wake.wait(0));
        drop((acquire(&share), rest));
        assert_eq!(
            ring.staging(),
            Staging { mapped: 8 * SLAB, registered: 8 * SLAB, peak: 8 * SLAB, ..Staging::default() }
        );
    }

    #[test]
    fn registered_slabs_outlast_the_last_load_and_a_later_growth_finds_them() {
        let ring = ring();
        let limit = 8 * IDLE_STAGING;
        let mut share = ring.join(SLAB, limit).unwrap();
        let grown = grow(&share.pin(DRIVER, limit), usize::MAX) as u64;
        assert_eq!(grown * SLAB, limit / 2);
        drop(share);
        assert_eq!(ring.staging().mapped, limit / 2, "more than is kept of plain ones");
        let mut next = ring.join(SLAB, limit).unwrap();
        assert!(!next.pin(DRIVER, limit).is_wanted());
        drop(acquire(&next));
        // For another driver they are as good as none.
        assert!(next.pin(2, limit).is_wanted());
        drop(next);
        assert_eq!(ring.trim(), limit / 2);
        assert_eq!(ring.staging().mapped, 0);
    }

    #[test]
    fn where_nothing_is_registered_a_pinned_share_gets_plain_slabs_after_all() {
        let ring = ring();
        let mut share = ring.join(SLAB, 16 * SLAB).unwrap();
        let growth = share.pin(DRIVER, 100 * SLAB);
        let slab = growth.next().unwrap().unwrap();
        growth.add(slab);
        assert!(refused(&share), "a plain one is none of its own yet");
        drop(growth);
        assert!(share.wake.wait(0), "the end of growth is a reason to ask again");
        let held: Vec<_> = (0..16).map(|_| acquire(&share)).collect();
        assert_eq!((held.len(), ring.staging().registered), (16, 0));
    }

    #[test]
    fn a_load_of_smaller_slabs_uses_larger_registered_ones_within_its_limit() {
        let ring = ring();
        let mut first = ring.join(4 * SLAB, 64 * SLAB).unwrap();
        grow(&first.pin(DRIVER, u64::MAX), usize::MAX);
        drop(first);
        let there = ring.staging();
        let mut small = ring.join(SLAB, 16 * SLAB).unwrap();
        assert!(!small.pin(DRIVER, u64::MAX).is_wanted());
        let held: Vec<_> = (0..4).map(|_| acquire(&small)).collect();
        assert!(refused(&small), "its limit is full");
        assert_eq!((small.peak(), ring.staging().mapped), (16 * SLAB, there.mapped));
        drop((held, small));
        let mut tiny = ring.join(SLAB, 4 * SLAB).unwrap();
        assert!(tiny.pin(DRIVER, u64::MAX).is_wanted(), "two of the large ones are more than it may have");
    }

    #[test]
    fn a_load_to_the_cpu_leaves_registered_slabs_to_others_as_long_as_it_can() {
        let ring = ring();
        let mut gpu = ring.join(SLAB, 8 * SLAB).unwrap();
        grow(&gpu.pin(DRIVER, u64::MAX), usize::MAX);
        let plain = ring.join(SLAB, 8 * SLAB).unwrap();
        drop(gpu);
        let first = acquire(&plain);
        assert!(ring.slab_at(first.address()).unwrap().is_registered(DRIVER), "no other is there, and it is warm");
        drop(first);
        let unregistered = {
            let held: Vec<_> = (0..5).map(|_| acquire(&plain)).collect();
            let is_plain = |l: &&Lease| ring.slab_at(l.address()).unwrap().is_plain();
            held.iter().find(is_plain).unwrap().address()
        };
        assert_eq!(acquire(&plain).address(), unregistered);
    }

    #[test]
    fn growth_that_is_stopped_goes_no_further() {
        let ring = ring();
        let mut share = ring.join(SLAB, 16 * SLAB).unwrap();
        let growth = share.pin(DRIVER, u64::MAX);
        assert_eq!(grow(&growth, 1), 1);
        ring.stop_growing();
        assert_eq!(grow(&growth, 1), 0);
        drop(growth);
        assert_eq!(grow(&share.pin(DRIVER, u64::MAX), 1), 1, "a later one does");
    }

    #[test]
    fn a_refused_registration_is_tried_again_next_time() {
        let ring = ring();
        let share = ring.join(SLAB, 4 * SLAB).unwrap();
        let lease = acquire(&share);
        let slab = ring.slab_at(lease.address()).unwrap();
        assert!(slab.register(1, |_, _| Err(Error::new(ErrorKind::Device, "no"))).is_err());
        assert!(slab.register(1, |_, _| Ok(Box::new(()))).is_ok());
    }

    #[test]
    fn many_threads_share_without_overlap_loss_of_wake_ups_or_breach_of_the_limit() {
        let ring = ring();
        let (loads, limit, rounds) = (6, 4 * SLAB, 400);
        let breach = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for id in 0..loads {
                let breach = &breach;
                scope.spawn(move || {
                    let share = ring.join(SLAB, limit).unwrap();
                    let mut held: Vec<Lease> = Vec::new();
                    for round in 0..rounds {
                        let lease = loop {
                            share.clear();
                            if let Some(lease) = share.try_acquire().unwrap() {
                                break lease;
                            }
                            if held.is_empty() {
                                assert!(share.wake.wait(30_000), "load {id} was never woken in round {round}");
                            } else {
                                held.remove(0);
                            }
                        };
                        let mark = (id as u64) << 32 | round as u64;
                        // SAFETY: ours alone while leased; that is what is tested.
                        unsafe { lease.address().cast::<u64>().write_volatile(mark) };
                        std::thread::yield_now();
                        // SAFETY: as above.
                        let seen = unsafe { lease.address().cast::<u64>().read_volatile() };
                        if seen != mark || ring.staging().mapped > limit {
                            breach.store(true, Ordering::SeqCst);
                        }
                        held.push(lease);
                        if held.len() > round % 3 {
                            held.clear();
                        }
                    }
                });
            }
        });
        assert!(!breach.load(Ordering::SeqCst));
        assert_eq!(ring.staging().in_use, 0);
    }

    #[test]
    fn slabs_that_are_being_mapped_count_against_the_limit() {
        let ring = ring();
        let share = ring.join(SLAB, 4 * SLAB).unwrap();
        ring.lock().map(4 * SLAB, false);
        assert!(share.try_acquire().unwrap().is_none());
        ring.lock().unmap(4 * SLAB, false);
        assert!(share.try_acquire().unwrap().is_some());
    }

    #[test]
    fn a_forked_child_has_a_ring_of_its_own_and_leaves_the_parents_alone() {
        let share = Ring::process().join(SLAB, 8 * SLAB).unwrap();
        let lease = acquire(&share);
        // SAFETY: the child leaves by _exit.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: in the child: a hang becomes a signal.
                unsafe { libc::alarm(20) };
                let mut ok = matches!(share.try_acquire(), Err(e) if e.kind() == ErrorKind::Forked);
                // Nothing is mapped where the parent's slab is: msync says ENOMEM of such addresses.
                // SAFETY: msync follows no pointer.
                ok &= unsafe { libc::msync(lease.address().cast(), lease.len(), libc::MS_ASYNC) } != 0;
                let own = Ring::process().join(SLAB, 8 * SLAB).unwrap();
                let fresh = acquire(&own);
                // SAFETY: leased.
                unsafe { fresh.address().write_volatile(1) };
                drop((lease, share));
                ok &= Ring::process().staging().in_use == SLAB;
                // SAFETY: always fine.
                unsafe { libc::_exit(if ok { 0 } else { 1 }) }
            }
            child => {
                let mut status = 0;
                // SAFETY: our own child.
                unsafe { libc::waitpid(child, &mut status, 0) };
                assert_eq!(status, 0, "the child's wait status");
                assert!(Ring::process().slab_at(lease.address()).is_some());
            }
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::sync::Builder;
    use std::collections::HashSet;

    const SLAB: u64 = HUGE_PAGE;

    /// Runs a model with a ring of its own, and frees its slabs: a model makes thousands.
    fn ring(model: impl Fn(&'static Ring) + Sync + Send + 'static) {
        loom::model(move || {
            let ring: &'static Ring = Box::leak(Box::new(Ring::new()));
            model(ring);
            assert_eq!(ring.staging().in_use, 0);
            ring.trim();
        });
    }

    /// A slab, waited for as the engine does: clear, ask, sleep.
    fn acquire(share: &Share) -> Lease {
        loop {
            share.clear();
            if let Some(lease) = share.try_acquire().unwrap() {
                return lease;
            }
            share.wake.wait(-1);
        }
    }

    #[test]
    fn a_slab_given_back_by_another_thread_wakes_the_refused() {
        ring(|ring| {
            let share = ring.join(SLAB, 2 * SLAB).unwrap();
            let held = (acquire(&share), acquire(&share));
            let giver = Builder::new().spawn(move || drop(held)).unwrap();
            let both = (acquire(&share), acquire(&share));
            drop(both);
            giver.join().unwrap();
        });
    }

    #[test]
    fn the_end_of_a_load_wakes_the_refused() {
        ring(|ring| {
            let (first, second) = (ring.join(SLAB, 4 * SLAB).unwrap(), ring.join(SLAB, 4 * SLAB).unwrap());
            let held: Vec<_> = (0..2).map(|_| acquire(&first)).collect();
            // Alone, the first may have all four.
            let other = Builder::new().spawn(move || drop(second)).unwrap();
            let third = acquire(&first);
            drop((held, third));
            other.join().unwrap();
        });
    }

    #[test]
    fn two_loads_take_turns_and_never_hold_the_same_slab() {
        ring(|ring| {
            let owned = Arc::new(std::sync::Mutex::new(HashSet::new()));
            let blocker = ring.join(SLAB, 2 * SLAB).unwrap();
            let held = acquire(&blocker);
            let loads: Vec<_> = (0..2)
                .map(|_| {
                    let (owned, share) = (owned.clone(), ring.join(SLAB, 2 * SLAB).unwrap());
                    let load = move || {
                        let lease = acquire(&share);
                        assert!(owned.lock().unwrap().insert(lease.address() as usize), "two holders of one slab");
                        loom::thread::yield_now();
                        assert!(owned.lock().unwrap().remove(&(lease.address() as usize)));
                    };
                    Builder::new().spawn(load).unwrap()
                })
                .collect();
            drop(held);
            loads.into_iter().for_each(|load| load.join().unwrap());
        });
    }
}

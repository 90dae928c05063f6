//! Slabs that processes share. Two rings of one process stand for two processes, except where a process forks.

use super::*;
use crate::error::ErrorKind;
use crate::machine::page_size;
use crate::memory::Anonymous;
use crate::options::{HUGE_PAGE, MIB, PAGE};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

const SLAB: u64 = 2 * MIB;
const OWNER: [u8; 16] = *b"owner of a slab.";
const DRIVER: u64 = 1;

fn ring() -> &'static Ring {
    Box::leak(Box::new(Ring::new()))
}

fn sharing(ring: &'static Ring, slab: u64, limit: u64) -> Share {
    let mut share = ring.join(slab, limit).unwrap();
    share.share_slabs().unwrap();
    share
}

fn acquire(share: &Share) -> Lease {
    share.try_acquire().unwrap().expect("a slab")
}

fn refused(share: &Share) -> bool {
    share.try_acquire().unwrap().is_none()
}

fn slab_of(ring: &Ring, lease: &Lease) -> Arc<Slab> {
    ring.slab_at(lease.address()).unwrap()
}

fn descriptor(slab: &Slab) -> OwnedFd {
    slab.memfd().unwrap().try_clone_to_owned().unwrap()
}

fn register(slab: &Slab, undone: &Arc<AtomicUsize>) {
    struct Undo(Arc<AtomicUsize>, usize);
    impl Drop for Undo {
        fn drop(&mut self) {
            // SAFETY: mapped, or this test dies, which is the point.
            unsafe { (self.1 as *mut u8).read_volatile() };
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    slab.register(DRIVER, |address, _| Ok(Box::new(Undo(undone.clone(), address as usize)))).unwrap();
}

fn write(at: *mut u8, byte: u8) {
    // SAFETY: the first byte of a slab of this test.
    unsafe { at.write_volatile(byte) }
}

fn read(at: *mut u8) -> u8 {
    // SAFETY: as above.
    unsafe { at.read_volatile() }
}

/// A line of /proc/self/smaps of the mapping that begins at this address.
fn of_mapping(address: *mut u8, key: &str) -> Option<String> {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{:x}-", address as usize)));
    lines.find_map(|line| line.strip_prefix(key)).map(|rest| rest.trim().to_owned())
}

fn kib(address: *mut u8, key: &str) -> u64 {
    of_mapping(address, key).unwrap().trim_end_matches(" kB").parse().unwrap()
}

/// Runs this in a forked child, which has to say that all is well.
fn in_child(test: impl FnOnce() -> bool) {
    // SAFETY: the child leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: in the child: a hang becomes a signal.
            unsafe { libc::alarm(20) };
            let code = i32::from(!test());
            // SAFETY: always fine.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: our own child.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(status, 0, "the child's wait status");
        }
    }
}

#[test]
fn a_shared_slab_is_an_aligned_sealed_file_in_memory_that_children_do_not_inherit() {
    let ring = ring();
    let share = sharing(ring, 3 * MIB, 64 * MIB);
    let lease = acquire(&share);
    assert_eq!((lease.len() as u64, lease.address() as u64 % HUGE_PAGE), (4 * MIB, 0));
    let slab = slab_of(ring, &lease);
    let file = fs::File::from(descriptor(&slab));
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB);
    assert!(file.set_len(0).is_err() && file.set_len(8 * MIB).is_err());
    assert!(slab.identity().is_some());
    let flags = of_mapping(lease.address(), "VmFlags:").unwrap();
    assert!(["sh", "dc"].iter().all(|flag| flags.contains(flag)), "{flags}");
    let there = ring.staging();
    assert_eq!((there.mapped, there.shared, there.borrowed), (4 * MIB, 4 * MIB, 0));
    let private = ring.join(MIB, 64 * MIB).unwrap();
    let private = slab_of(ring, &acquire(&private));
    assert!(private.memfd().is_none() && private.identity().is_none());
}

#[test]
fn small_shared_slabs_have_the_size_that_was_asked_for() {
    let ring = ring();
    let share = sharing(ring, 256 << 10, MIB);
    let held: Vec<_> = (0..4).map(|_| acquire(&share)).collect();
    assert!(refused(&share));
    assert!(held.iter().all(|lease| lease.len() == 256 << 10));
    assert_eq!(ring.staging().shared, MIB);
}

#[test]
fn a_load_gets_slabs_of_its_kind_only_and_idle_ones_of_the_other_kind_make_room() {
    let ring = ring();
    let (private, shared) = (ring.join(SLAB, 4 * SLAB).unwrap(), sharing(ring, SLAB, 4 * SLAB));
    drop((0..2).map(|_| acquire(&private)).collect::<Vec<_>>());
    let mut held = vec![acquire(&shared), acquire(&shared)];
    assert!(held.iter().all(|lease| slab_of(ring, lease).memfd().is_some()));
    let there = ring.staging();
    assert_eq!((there.mapped, there.shared), (4 * SLAB, 2 * SLAB), "the private ones are idle");
    drop(private);
    held.extend((0..2).map(|_| acquire(&shared)));
    assert!(refused(&shared), "both kinds are under one limit");
    let there = ring.staging();
    assert_eq!((there.mapped, there.shared, there.peak), (4 * SLAB, 4 * SLAB, 4 * SLAB));
    drop((held, shared));
    let private = ring.join(SLAB, 4 * SLAB).unwrap();
    let held: Vec<_> = (0..4).map(|_| acquire(&private)).collect();
    assert!(held.iter().all(|lease| slab_of(ring, lease).memfd().is_none()));
    assert_eq!(ring.staging().shared, 0);
}

#[test]
fn shared_slabs_are_registered_for_loads_that_share_and_for_no_others() {
    let ring = ring();
    let grow = |growth: Growth| {
        std::iter::from_fn(|| growth.next().unwrap()).fold(0, |count, slab| {
            register(&slab, &Arc::default());
            growth.add(slab);
            count + 1
        })
    };
    let mut shared = sharing(ring, SLAB, 16 * SLAB);
    assert_eq!(grow(shared.pin(DRIVER, 4 * SLAB)), 4);
    let lease = acquire(&shared);
    let slab = slab_of(ring, &lease);
    assert!(slab.is_registered(DRIVER) && slab.memfd().is_some());
    let mut private = ring.join(SLAB, 16 * SLAB).unwrap();
    assert_eq!(grow(private.pin(DRIVER, 3 * SLAB)), 3);
    let slab = slab_of(ring, &acquire(&private));
    assert!(slab.is_registered(DRIVER) && slab.memfd().is_none());
    let there = ring.staging();
    assert_eq!((there.registered, there.shared), (7 * SLAB, 4 * SLAB));
    assert!(!sharing(ring, SLAB, 16 * SLAB).pin(DRIVER, 4 * SLAB).is_wanted(), "there are enough");
}

#[test]
fn a_retired_slab_leaves_the_ring_and_a_neighbour_keeps_its_bytes() {
    let (ring, neighbour, undone) = (ring(), ring(), Arc::new(AtomicUsize::new(0)));
    let share = sharing(ring, SLAB, 2 * SLAB);
    let (lease, other) = (acquire(&share), acquire(&share));
    let slab = slab_of(ring, &lease);
    register(&slab, &undone);
    write(lease.address(), 7);
    let theirs = neighbour.adopt(descriptor(&slab), OWNER, SLAB).unwrap();
    let link = format!("/proc/self/fd/{}", slab.memfd().unwrap().as_raw_fd());
    let ours = Arc::downgrade(&slab);
    drop(slab);
    let before = fs::metadata(&link).unwrap();
    lease.retire();
    assert!(refused(&share));
    assert_eq!(ring.staging().mapped, 2 * SLAB, "as long as the lease is held");
    drop(lease);
    assert!(share.wake.wait(0), "who waits is notified");
    assert_eq!((undone.load(Ordering::SeqCst), ours.strong_count()), (1, 0));
    // Another test may have got the number.
    assert!(fs::metadata(&link).map_or(true, |now| memory_file::identity(&now) != memory_file::identity(&before)));
    let there = ring.staging();
    assert_eq!((there.mapped, there.shared, there.in_use), (SLAB, SLAB, SLAB));
    assert_eq!(read(theirs.address()), 7);
    let fresh = acquire(&share);
    write(fresh.address(), 8);
    assert_eq!(read(theirs.address()), 7);
    drop((other, fresh));
    assert_eq!(ring.staging().mapped, 2 * SLAB, "others are used again");
}

#[test]
fn a_slab_that_is_retired_and_hangs_goes_when_it_comes_back_and_a_quarantined_one_never() {
    let ring = ring();
    let share = sharing(ring, SLAB, 4 * SLAB);
    let (apart, forever) = (acquire(&share), acquire(&share));
    for lease in [&apart, &forever] {
        lease.retire();
        lease.set_apart();
    }
    forever.quarantine();
    let address = forever.address();
    drop((apart, forever));
    let there = ring.staging();
    assert_eq!((there.mapped, there.shared, there.in_use, there.quarantined), (SLAB, SLAB, 0, SLAB));
    write(address, 1);
}

#[test]
fn a_neighbours_slab_is_mapped_once_and_lives_as_long_as_somebody_holds_it() {
    let (ring, neighbour) = (ring(), ring());
    let share = sharing(ring, SLAB, 4 * SLAB);
    let (lease, second) = (acquire(&share), acquire(&share));
    let ours = slab_of(ring, &lease);
    write(lease.address(), 1);
    let theirs = neighbour.adopt(descriptor(&ours), OWNER, SLAB).unwrap();
    assert_eq!(theirs.address() as u64 % HUGE_PAGE, 0);
    assert!(theirs.address() != ours.address() && theirs.memfd().is_none());
    assert_eq!(theirs.identity(), ours.identity());
    write(lease.address(), 2);
    assert_eq!(read(theirs.address()), 2);
    let again = neighbour.adopt(descriptor(&ours), OWNER, SLAB).unwrap();
    let found = neighbour.slab_at(theirs.address()).unwrap();
    assert!(Arc::ptr_eq(&theirs, &again) && Arc::ptr_eq(&theirs, &found));
    let flags = of_mapping(theirs.address(), "VmFlags:").unwrap();
    assert!(["sh", "dc"].iter().all(|flag| flags.contains(flag)), "{flags}");
    let other = neighbour.adopt(descriptor(&slab_of(ring, &second)), OWNER, SLAB).unwrap();
    assert!(!Arc::ptr_eq(&theirs, &other));
    assert_eq!(neighbour.staging(), Staging { borrowed: 2 * SLAB, ..Staging::default() });
    let address = theirs.address();
    drop((theirs, again, found));
    assert!(neighbour.slab_at(address).is_none());
    assert_eq!(neighbour.staging().borrowed, SLAB);
    assert_eq!(of_mapping(address, "VmFlags:").filter(|flags| flags.contains("sh")), None, "unmapped");
}

#[test]
fn threads_that_adopt_one_slab_at_a_time_get_the_same() {
    let (ring, neighbour) = (ring(), ring());
    let share = sharing(ring, SLAB, 4 * SLAB);
    let ours = slab_of(ring, &acquire(&share));
    for _ in 0..50 {
        let all: Vec<_> = std::thread::scope(|scope| {
            let adopt = || neighbour.adopt(descriptor(&ours), OWNER, SLAB).unwrap();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(adopt)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|slab| Arc::ptr_eq(slab, &all[0])));
        assert_eq!(neighbour.staging().borrowed, SLAB);
    }
}

#[test]
fn descriptors_that_could_kill_this_process_are_refused() {
    let memfd = |seals: i32| {
        // SAFETY: the name ends with a zero byte; the result is checked.
        let file = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        assert!(file >= 0);
        // SAFETY: the call gave a new descriptor that nobody else owns.
        let file = unsafe { fs::File::from_raw_fd(file) };
        file.set_len(SLAB).unwrap();
        // SAFETY: no pointer is passed.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        OwnedFd::from(file)
    };
    let sealed = || memfd(libc::F_SEAL_SHRINK);
    let writable = sealed();
    let read_only = || fs::File::open(format!("/proc/self/fd/{}", writable.as_raw_fd())).unwrap().into();
    let ring = ring();
    let cases: [(OwnedFd, u64, ErrorKind, &str); 8] = [
        (sealed(), 0, ErrorKind::Peer, "0 bytes are not whole pages"),
        (sealed(), SLAB - 1, ErrorKind::Peer, "are not whole pages"),
        (sealed(), SLAB + page_size(), ErrorKind::Peer, "it has 2097152 bytes"),
        (memfd(0), SLAB, ErrorKind::Peer, "not sealed"),
        (UnixStream::pair().unwrap().0.into(), SLAB, ErrorKind::Peer, "not one of a file"),
        (fs::File::open("/proc/self/exe").unwrap().into(), page_size(), ErrorKind::Peer, "not sealed"),
        (read_only(), SLAB, ErrorKind::Permission, "cannot map shared memory"),
        (memfd(libc::F_SEAL_SHRINK | libc::F_SEAL_WRITE), SLAB, ErrorKind::Permission, "cannot map shared memory"),
    ];
    for (file, len, kind, text) in cases {
        let error = ring.adopt(file, OWNER, len).err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(text), "{error}, not {text}");
    }
    assert_eq!(ring.staging(), Staging::default());
    let file = sealed();
    let half = ring.adopt(file.try_clone().unwrap(), OWNER, SLAB / 2).unwrap();
    assert_eq!(ring.adopt(file, OWNER, SLAB).err().map(|e| e.kind()), Some(ErrorKind::Peer));
    assert_eq!(half.len() as u64, SLAB / 2);
}

#[test]
fn a_registered_slab_of_a_neighbour_is_kept_until_its_owner_has_no_use_for_it() {
    let (ring, neighbour, undone) = (ring(), ring(), Arc::new(AtomicUsize::new(0)));
    let share = sharing(ring, SLAB, 8 * SLAB);
    let held: Vec<_> = (0..4).map(|_| acquire(&share)).collect();
    let ours: Vec<_> = held.iter().map(|lease| slab_of(ring, lease)).collect();
    let owner = |i: usize| [u8::from(i == 3); 16];
    let adopt = |i: usize| neighbour.adopt(descriptor(&ours[i]), owner(i), SLAB).unwrap();
    let addresses: Vec<_> = (0..4)
        .map(|i| {
            let slab = adopt(i);
            register(&slab, &undone);
            slab.address()
        })
        .collect();
    // Another load.
    for (i, address) in addresses.iter().enumerate() {
        let slab = adopt(i);
        assert!(slab.address() == *address && slab.is_registered(DRIVER));
    }
    assert_eq!((neighbour.staging().borrowed, undone.load(Ordering::SeqCst)), (4 * SLAB, 0));
    neighbour.disown(owner(0), &|file| Some(file) != ours[0].identity());
    assert_eq!((neighbour.staging().borrowed, undone.load(Ordering::SeqCst)), (3 * SLAB, 1));
    // A copy is under way out of the second one.
    let in_use = neighbour.slab_at(addresses[1]).unwrap();
    neighbour.disown(owner(1), &|_| false);
    assert_eq!((neighbour.staging().borrowed, undone.load(Ordering::SeqCst)), (2 * SLAB, 2));
    register(&in_use, &undone);
    assert!(neighbour.slab_at(addresses[1]).is_some(), "the device finds it until then");
    drop(in_use);
    assert_eq!((neighbour.staging().borrowed, undone.load(Ordering::SeqCst)), (SLAB, 3));
    neighbour.disown_all_but(&|known| *known == owner(3));
    assert_eq!(neighbour.staging().borrowed, SLAB);
    neighbour.disown_all_but(&|_| false);
    assert_eq!((neighbour.staging().borrowed, undone.load(Ordering::SeqCst)), (0, 4));
}

#[test]
fn a_disowned_slab_that_is_adopted_again_is_kept_again() {
    let (ring, neighbour, undone) = (ring(), ring(), Arc::new(AtomicUsize::new(0)));
    let share = sharing(ring, SLAB, 8 * SLAB);
    let lease = acquire(&share);
    let adopt = || neighbour.adopt(descriptor(&slab_of(ring, &lease)), OWNER, SLAB).unwrap();
    let first = adopt();
    register(&first, &undone);
    neighbour.disown(OWNER, &|_| false);
    drop(adopt());
    drop(first);
    assert_eq!((neighbour.staging().borrowed, undone.load(Ordering::SeqCst)), (SLAB, 0));
}

#[test]
fn a_trim_lets_go_of_the_neighbours_slabs_that_nobody_holds() {
    let (ring, neighbour, undone) = (ring(), ring(), Arc::new(AtomicUsize::new(0)));
    let share = sharing(ring, SLAB, 8 * SLAB);
    let held = [acquire(&share), acquire(&share)];
    let [first, second] =
        [&held[0], &held[1]].map(|lease| neighbour.adopt(descriptor(&slab_of(ring, lease)), OWNER, SLAB).unwrap());
    [&first, &second].into_iter().for_each(|slab| register(slab, &undone));
    assert_eq!(neighbour.trim(), 0);
    drop(first);
    assert_eq!((neighbour.trim(), undone.load(Ordering::SeqCst)), (SLAB, 1));
    drop(second);
    assert_eq!(neighbour.staging().borrowed, SLAB, "kept, as nothing else has happened");
    assert_eq!((neighbour.trim(), neighbour.staging().borrowed), (SLAB, 0));
    assert_eq!(ring.trim(), 0);
    drop(held);
    assert_eq!((ring.trim(), ring.staging().shared), (2 * SLAB, 0));
}

#[test]
fn a_neighbours_slab_that_a_hanging_copy_may_read_stays_mapped() {
    let (ring, neighbour) = (ring(), ring());
    let share = sharing(ring, SLAB, 8 * SLAB);
    let theirs = neighbour.adopt(descriptor(&slab_of(ring, &acquire(&share))), OWNER, SLAB).unwrap();
    let address = theirs.address();
    neighbour.quarantine(address);
    drop(theirs);
    neighbour.disown_all_but(&|_| false);
    assert_eq!((neighbour.trim(), neighbour.staging().borrowed), (0, SLAB));
    read(address);
}

#[test]
fn shared_slabs_have_huge_pages_where_the_kernel_says_so() {
    let file = fs::File::from(memory_file::create(2 * HUGE_PAGE).unwrap());
    let memory = Anonymous::shared(&file, 2 * HUGE_PAGE).unwrap();
    (0..2).for_each(|i| memory_file::allocate(&file, i * HUGE_PAGE, page_size()).unwrap());
    if memory.collapse() {
        assert_eq!(kib(memory.at(), "ShmemPmdMapped:"), 2 * HUGE_PAGE / 1024);
        // SAFETY: this test's own.
        let bytes = unsafe { std::slice::from_raw_parts(memory.at(), memory.len()) };
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
    assert!(["huge", "4 KiB", "16 KiB", "64 KiB"].contains(&shared_memory_pages()));
}

#[test]
fn pages_of_a_slab_exist_once_for_all_who_map_it() {
    let (ring, neighbour) = (ring(), ring());
    let share = sharing(ring, 4 * SLAB, 16 * SLAB);
    let lease = acquire(&share);
    let ours = slab_of(ring, &lease);
    // SAFETY: a slab of this test.
    unsafe { std::slice::from_raw_parts_mut(lease.address(), lease.len()) }.fill(5);
    let pages = |address| (kib(address, "Rss:"), kib(address, "Pss:"));
    let whole = 4 * SLAB / 1024;
    assert_eq!(pages(lease.address()), (whole, whole));
    let theirs = neighbour.adopt(descriptor(&ours), OWNER, 4 * SLAB).unwrap();
    // SAFETY: a slab of this test, to which nothing writes now.
    let bytes = unsafe { std::slice::from_raw_parts(theirs.address(), theirs.len()) };
    assert!(bytes.iter().all(|byte| *byte == 5));
    for address in [lease.address(), theirs.address()] {
        assert_eq!(pages(address), (whole, whole / 2), "half of each page is counted here, and half there");
    }
}

#[test]
fn a_forked_child_finds_no_shared_and_no_adopted_memory_and_leaves_the_parents_alone() {
    let ring = Ring::process();
    let share = sharing(ring, SLAB, 64 * SLAB);
    let lease = acquire(&share);
    let ours = slab_of(ring, &lease);
    let theirs = ring.adopt(descriptor(&ours), OWNER, SLAB).unwrap();
    let undone = Arc::new(AtomicUsize::new(0));
    register(&theirs, &undone);
    write(lease.address(), 9);
    let (number, at) = (ours.memfd().unwrap().as_raw_fd(), theirs.address());
    let (our_one, their_one) = (ours.clone(), theirs.clone());
    in_child(|| {
        // Nothing is mapped where the slabs are: msync says ENOMEM of such addresses.
        // SAFETY: msync follows no pointer.
        let mapped = |at: *mut u8| unsafe { libc::msync(at.cast(), SLAB as usize, libc::MS_ASYNC) } == 0;
        let mut ok = !mapped(our_one.address()) && !mapped(their_one.address());
        // Of the parent's ring, which a child must not use. The clones of the parent are not freed here either.
        let forked = ring.adopt(descriptor(&our_one), OWNER, SLAB);
        ok &= forked.is_err_and(|e| e.kind() == ErrorKind::Forked);
        // The memory itself can be adopted by whoever has the descriptor.
        let own = Ring::process().adopt(descriptor(&our_one), OWNER, SLAB).unwrap();
        ok &= read(own.address()) == 9;
        lease.retire();
        // SAFETY: what the child has inherited, dropped as if it were the child's.
        unsafe {
            drop((std::ptr::read(&raw const lease), std::ptr::read(&raw const share)));
            let slabs = [Arc::into_raw(our_one.clone()), Arc::into_raw(their_one.clone())];
            slabs.into_iter().for_each(|slab| std::ptr::drop_in_place(slab.cast_mut()));
        }
        // SAFETY: no pointer is passed.
        ok &= unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
        ok && undone.load(Ordering::SeqCst) == 0 && Ring::process().staging().borrowed == SLAB
    });
    drop((our_one, their_one, theirs));
    assert_eq!((undone.load(Ordering::SeqCst), read(at)), (0, 9));
    assert!(ring.slab_at(lease.address()).is_some() && ring.slab_at(at).is_some());
    ring.disown(OWNER, &|_| false);
    assert_eq!(undone.load(Ordering::SeqCst), 1);
}

/// From here on memfd_create fails, for this thread: always, or only with this flag.
fn refuse_memfd(errno: i32, flag: Option<u32>) {
    let stmt = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let jump = |code: u32, k: u32, jf: u8| libc::sock_filter { code: (libc::BPF_JMP | code) as u16, jt: 0, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    // struct seccomp_data: the call's number at 0, its second argument at 24.
    let mut program = vec![
        stmt(load, 0),
        jump(libc::BPF_JEQ, libc::SYS_memfd_create as u32, 3),
        stmt(load, 24),
        flag.map_or(jump(libc::BPF_JGE, 0, 0), |flag| jump(libc::BPF_JSET, flag, 1)),
        stmt(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | errno as u32),
        stmt(libc::BPF_RET, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which copy it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program), 0);
    }
}

#[test]
fn where_the_system_refuses_shared_memory_a_load_is_told_at_once_and_keeps_private_slabs() {
    let told = |kind: ErrorKind, text: &str| {
        let mut share = Ring::process().join(SLAB, 8 * SLAB).unwrap();
        let error = share.share_slabs().unwrap_err();
        let private = Ring::process().slab_at(acquire(&share).address()).is_none_or(|slab| slab.memfd().is_none());
        error.kind() == kind && error.to_string().contains(text) && private
    };
    let because = "cannot make memory that other processes can map (memfd_create): ";
    for (errno, kind, cause) in [
        (libc::ENOSYS, ErrorKind::Unsupported, "Function not implemented"),
        (libc::EPERM, ErrorKind::Permission, "Operation not permitted"),
        (libc::EMFILE, ErrorKind::Limit, "Too many open files"),
        (libc::ENOMEM, ErrorKind::OutOfMemory, "Cannot allocate memory"),
    ] {
        in_child(|| {
            refuse_memfd(errno, None);
            told(kind, &format!("{because}{cause}"))
        });
    }
}

#[test]
fn kernels_that_do_not_know_noexec_memory_share_slabs_too() {
    in_child(|| {
        refuse_memfd(libc::EINVAL, Some(libc::MFD_NOEXEC_SEAL));
        let share = sharing(Ring::process(), SLAB, 8 * SLAB);
        let lease = acquire(&share);
        write(lease.address(), 1);
        slab_of(Ring::process(), &lease).memfd().is_some()
    });
}

#[test]
fn a_slab_is_private_where_shared_memory_ends_in_the_middle_of_a_load() {
    in_child(|| {
        let ring = ring();
        let share = sharing(ring, SLAB, 4 * SLAB);
        let first = acquire(&share);
        refuse_memfd(libc::EMFILE, None);
        let second = acquire(&share);
        let shared = [&first, &second].map(|lease| slab_of(ring, lease).memfd().is_some());
        write(second.address(), 7);
        shared == [true, false] && read(second.address()) == 7 && ring.staging().shared == SLAB
    });
}

#[test]
fn shared_slabs_take_a_quarter_of_the_descriptors_at_most() {
    in_child(|| {
        let limit = libc::rlimit { rlim_cur: 400, rlim_max: 400 };
        // SAFETY: the limit of this child alone.
        let is_set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0;
        let ring = ring();
        let share = sharing(ring, PAGE, 1 << 20);
        let leases: Vec<Lease> = (0..120).map(|_| acquire(&share)).collect();
        let shared = leases.iter().filter(|lease| slab_of(ring, lease).memfd().is_some()).count();
        // Other tests of this process may have had some when it forked.
        is_set && (1..=100).contains(&shared) && ring.staging().shared == shared as u64 * PAGE
    });
}

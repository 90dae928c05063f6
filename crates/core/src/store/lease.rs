//! A lease on a file: as long as it lasts, no program changes the file's bytes without this process hearing of it first.
//!
//! fcntl(2), *Leases*: an open for writing, or a truncation, waits until the holder gives its lease back, or until
//! `/proc/sys/fs/lease-break-time` (45 s) is over. The kernel refuses a lease if the file is open for writing, if the
//! file is another user's (without `CAP_LEASE`), and on file systems that have none.
//!
//! The kernel sends a signal when somebody waits. By default SIGIO ends the process. So the signal goes to one thread
//! that blocks it and reads it from a descriptor ([`Breaks`]): the process has no handler, and no other thread sees it.

use super::files::Files;
use super::version::Identity;
use crate::error::{Error, ErrorKind, Result};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::Arc;

/// `F_SETOWN_EX` and `F_GETOWN_EX` (include/uapi/asm-generic/fcntl.h), on every architecture that matters here.
const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;
/// Leases may take one in this many of the descriptors that the process may have.
const PART: u64 = 8;
/// The owner is one thread.
const F_OWNER_TID: i32 = 0;

/// `struct f_owner_ex`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SignalOwner {
    kind: i32,
    id: i32,
}

/// Signals to the thread that made it: another program waits for a file.
#[derive(Debug)]
pub(crate) struct Breaks {
    signals: OwnedFd,
    thread: i32,
}

impl Breaks {
    /// For the calling thread, which must not end before the leases. Blocks its signals, except those of its own faults.
    pub(crate) fn of_this_thread() -> Result<Breaks> {
        let refused = |doing: &str| Error::io(doing, &io::Error::last_os_error());
        // SAFETY: zeros are a valid set, and each call writes one set.
        let signals = unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
                libc::sigdelset(&raw mut all, fault);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
            let mut asked: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut asked);
            libc::sigaddset(&raw mut asked, libc::SIGIO);
            libc::signalfd(-1, &raw const asked, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if signals < 0 {
            return Err(refused("create a descriptor for signals"));
        }
        // SAFETY: the call gave a new descriptor that nobody else owns; gettid is a plain system call.
        let (signals, thread) = unsafe { (OwnedFd::from_raw_fd(signals), libc::gettid()) };
        Ok(Breaks { signals, thread })
    }

    /// Becomes readable when somebody waits for a file. Only the thread that made it may poll it.
    pub(crate) fn fd(&self) -> RawFd {
        self.signals.as_raw_fd()
    }

    /// Takes what has come.
    pub(crate) fn clear(&self) {
        let mut told = [0u8; std::mem::size_of::<libc::signalfd_siginfo>()];
        // SAFETY: `told` is as long as the count says.
        while unsafe { libc::read(self.fd(), told.as_mut_ptr().cast(), told.len()) } > 0 {}
    }
}

/// A lease for reading. It ends when it is dropped, even if a forked child still has the open file.
#[derive(Debug)]
pub(super) struct FileLease {
    fd: Arc<OwnedFd>,
    /// The number of its descriptor, for a forked child; -1 when it is given back.
    number: Arc<AtomicI32>,
}

impl FileLease {
    /// Takes a lease on an open file that nobody else has opened (`open(2)` by itself, not `dup(2)`), for reading.
    ///
    /// # Errors
    /// `EAGAIN`: the file is open for writing. `EACCES`: it is another user's. `EINVAL`: its file system has no leases.
    pub(super) fn take(fd: Arc<OwnedFd>, breaks: &Breaks) -> io::Result<FileLease> {
        let owner = SignalOwner { kind: F_OWNER_TID, id: breaks.thread };
        // Before the lease: the kernel then keeps this owner. Otherwise it names the whole process, and SIGIO ends that.
        // SAFETY: one structure that outlives the call.
        if unsafe { libc::fcntl(fd.as_raw_fd(), F_SETOWN_EX, &raw const owner) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: no pointer is passed.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let number = Arc::new(AtomicI32::new(fd.as_raw_fd()));
        let lease = FileLease { fd, number };
        let mut kept = SignalOwner { kind: -1, id: -1 };
        // SAFETY: one structure that is written.
        let asked = unsafe { libc::fcntl(lease.fd.as_raw_fd(), F_GETOWN_EX, &raw mut kept) };
        match asked == 0 && kept == owner {
            true => Ok(lease),
            false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Whether nobody waits for the file, and the kernel has not taken the lease.
    pub(super) fn is_whole(&self) -> bool {
        // SAFETY: no pointer is passed. While somebody waits, this is what the lease is to become: F_UNLCK.
        unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_GETLEASE) == libc::F_RDLCK }
    }
}

impl Drop for FileLease {
    fn drop(&mut self) {
        self.number.store(-1, Ordering::SeqCst);
        // The last close would do it too, but a forked child may have the file open.
        // SAFETY: no pointer is passed.
        unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    }
}

/// Where the administrator turns leases off, for all file systems.
const ENABLED: &str = "/proc/sys/fs/leases-enable";

/// Whether this machine gives no leases at all.
fn are_off() -> bool {
    std::fs::read(ENABLED).is_ok_and(|found| found.trim_ascii() == b"0")
}

/// The kernel's reason to refuse a lease. `off`: it refuses all of them.
fn refusal(e: &io::Error, off: bool) -> String {
    match e.raw_os_error() {
        Some(libc::EAGAIN) => "it is open for writing".to_owned(),
        Some(libc::EACCES) => "it is another user's".to_owned(),
        Some(libc::EINVAL) if off => format!("leases are turned off ({ENABLED} is 0)"),
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOLCK) => "its file system gives none".to_owned(),
        _ => e.to_string(),
    }
}

/// Leases on several files.
#[derive(Debug)]
pub(crate) struct Leases {
    files: Files,
    /// With the number of its file.
    leases: Vec<(u32, FileLease)>,
}

impl Leases {
    /// Leases on these files, each of which is still what it was; or why one is refused.
    ///
    /// # Errors
    /// `Changed`: a file is not what it was.
    pub(crate) fn take(files: Files, which: &[u32], breaks: &Breaks) -> Result<std::result::Result<Leases, String>> {
        // The rest of the process needs descriptors too.
        if which.len() as u64 > files.descriptors() / PART {
            return Ok(Err(format!("there are {} files, too many to keep open", which.len())));
        }
        let mut leases = Leases { files, leases: Vec::with_capacity(which.len()) };
        for &file in which {
            let fd = match leases.files.open_own(file) {
                Ok(fd) => fd,
                Err(e) if e.kind() == ErrorKind::Limit => return Ok(Err(e.to_string())),
                Err(e) => return Err(e),
            };
            match FileLease::take(fd, breaks) {
                Ok(lease) => leases.leases.push((file, lease)),
                Err(e) => {
                    let why = refusal(&e, are_off());
                    return Ok(Err(format!("no lease on {}: {why}", leases.files.path(file).display())));
                }
            }
        }
        // They are as they were when they were opened, and stay so.
        leases.unchanged()?;
        Ok(Ok(leases))
    }

    /// A file that somebody waits for, or whose lease the kernel has taken.
    pub(crate) fn asked(&self) -> Option<u32> {
        self.leases.iter().find(|(_, lease)| !lease.is_whole()).map(|(file, _)| *file)
    }

    /// Whether that is so of this file.
    pub(crate) fn is_asked(&self, file: u32) -> bool {
        self.leases.iter().any(|(number, lease)| *number == file && !lease.is_whole())
    }

    /// An error of kind `Changed` if a file is not what it was.
    pub(crate) fn unchanged(&self) -> Result<()> {
        self.leases.iter().try_for_each(|(file, lease)| {
            let now = Identity::of(&lease.fd).map_err(|e| Error::io("stat", &e).at(self.files.path(*file)))?;
            self.files.identity(*file).check(&now).map_err(|e| e.at(self.files.path(*file)))
        })
    }

    /// Their descriptors, for a forked child.
    pub(crate) fn inherited(&self) -> Inherited {
        Inherited(self.leases.iter().map(|(_, lease)| lease.number.clone()).collect())
    }
}

/// The descriptors of leases that a forked child has too.
#[derive(Debug, Default)]
pub(crate) struct Inherited(Vec<Arc<AtomicI32>>);

impl Inherited {
    /// In the child, which cannot use them: closes them. They would keep the leases when the parent has ended.
    pub(crate) fn close(&self) {
        for number in self.0.iter().map(|number| number.swap(-1, Ordering::SeqCst)).filter(|number| *number >= 0) {
            // SAFETY: a descriptor of this process that only the parent's thread of leases uses.
            unsafe { libc::close(number) };
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::time::{Duration, Instant};

    fn opened(path: &Path) -> Arc<OwnedFd> {
        Arc::new(File::open(path).unwrap().into())
    }

    /// A file that nobody has open.
    fn file() -> tempfile::TempPath {
        let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        std::fs::write(&file, b"some bytes").unwrap();
        file
    }

    fn readable(breaks: &Breaks, timeout_ms: i32) -> bool {
        let mut fd = libc::pollfd { fd: breaks.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, as the count says.
        unsafe { libc::poll(&raw mut fd, 1, timeout_ms) == 1 }
    }

    /// On a thread of its own, whose signals are blocked from then on.
    fn on_a_thread(test: impl FnOnce(Breaks) + Send + 'static) {
        std::thread::Builder::new().spawn(|| test(Breaks::of_this_thread().unwrap())).unwrap().join().unwrap();
    }

    #[test]
    fn a_writer_waits_until_the_lease_is_given_back_and_the_process_lives() {
        on_a_thread(|breaks| {
            let file = file();
            let lease = FileLease::take(opened(&file), &breaks).unwrap();
            assert!(lease.is_whole() && !readable(&breaks, 0));
            File::open(&file).unwrap();
            assert!(lease.is_whole(), "who reads does not wait");
            let path = file.to_path_buf();
            let writer = std::thread::Builder::new().spawn(move || {
                OpenOptions::new().write(true).open(path).unwrap();
            });
            let writer = writer.unwrap();
            assert!(readable(&breaks, 30_000));
            breaks.clear();
            assert!(!readable(&breaks, 0) && !lease.is_whole() && !writer.is_finished());
            let (began, number) = (Instant::now(), lease.number.clone());
            drop(lease);
            writer.join().unwrap();
            assert!(began.elapsed() < Duration::from_secs(20), "45 s have passed, and not the lease");
            assert_eq!(number.load(Ordering::SeqCst), -1);
        });
    }

    #[test]
    fn a_file_that_is_open_for_writing_gets_no_lease() {
        on_a_thread(|breaks| {
            let file = file();
            let writer = OpenOptions::new().append(true).open(&file).unwrap();
            let refused = FileLease::take(opened(&file), &breaks).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
            drop(writer);
            FileLease::take(opened(&file), &breaks).unwrap();
        });
    }

    #[test]
    fn leases_that_are_turned_off_are_not_the_file_systems_fault() {
        let why = |errno, off| refusal(&io::Error::from_raw_os_error(errno), off);
        assert!(why(libc::EINVAL, true).contains("leases-enable"));
        assert_eq!(why(libc::EINVAL, false), "its file system gives none");
        assert_eq!(why(libc::EAGAIN, true), "it is open for writing");
    }

    #[test]
    fn two_may_hold_a_lease_and_each_gives_back_its_own() {
        on_a_thread(|breaks| {
            let file = file();
            let [one, other] = [(); 2].map(|()| FileLease::take(opened(&file), &breaks).unwrap());
            drop(one);
            assert!(other.is_whole());
            let refused = || {
                let asked = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&file);
                asked.err().and_then(|e| e.raw_os_error()) == Some(libc::EWOULDBLOCK)
            };
            assert!(refused());
            drop(other);
            assert!(!refused());
        });
    }

    #[test]
    fn a_forked_child_that_has_the_file_does_not_keep_the_lease() {
        on_a_thread(|breaks| {
            let file = file();
            let lease = FileLease::take(opened(&file), &breaks).unwrap();
            // SAFETY: the child calls nothing but pause and is killed.
            let child = unsafe { libc::fork() };
            if child == 0 {
                loop {
                    // SAFETY: a plain system call.
                    unsafe { libc::pause() };
                }
            }
            drop(lease);
            let writer = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&file);
            // SAFETY: the child is this test's own.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
            writer.unwrap();
        });
    }
}

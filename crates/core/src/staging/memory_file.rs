//! Files in memory (memfd_create): memory that another process can map, if it is given the descriptor.

use crate::error::{Error, ErrorKind, Result};
use crate::machine::page_size;
use crate::memory::Anonymous;
use crate::options::HUGE_PAGE;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::OnceLock;

/// Device and inode of a file. No other file has them as long as somebody maps it or has it open.
pub(super) type MemoryFileId = (u64, u64);

/// A new file of `len` bytes, whole pages, whose size nobody can change.
pub(super) fn create(len: u64) -> Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // From 6.3 on, and with vm.memfd_noexec set, the kernel wants to know that nothing in it is executed. Older kernels
    // refuse the flag.
    let made = memfd(flags | libc::MFD_NOEXEC_SEAL).or_else(|cause| match cause.raw_os_error() {
        Some(libc::EINVAL) => memfd(flags),
        _ => Err(cause),
    });
    let file = made.map_err(|cause| refused("make memory that other processes can map (memfd_create)", &cause))?;
    let size = libc::off_t::try_from(len).map_err(|_| Error::new(ErrorKind::OutOfMemory, "no file is that large"))?;
    // SAFETY: no pointer is passed.
    checked(unsafe { libc::ftruncate(file.as_raw_fd(), size) })
        .map_err(|cause| refused("give shared memory its size (ftruncate)", &cause))?;
    // A process that maps it would be killed if it became smaller.
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no pointer is passed.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })
        .map_err(|cause| refused("seal the size of shared memory (F_ADD_SEALS)", &cause))?;
    Ok(file)
}

/// Descriptors of files in memory that are open.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// A file in memory, which counts as open.
pub(super) struct Counted(pub(super) File);

impl Counted {
    pub(super) fn new(file: File) -> Counted {
        OPEN.fetch_add(1, Ordering::Relaxed);
        Counted(file)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// True if one more file leaves three quarters of the descriptors that this process may have.
pub(super) fn may_make_another() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it writes the limit.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    !known || (OPEN.load(Ordering::Relaxed) as u64) < limit.rlim_cur / 4
}

/// Takes `len` bytes of memory for the file now.
pub(super) fn allocate(file: &impl AsRawFd, at: u64, len: u64) -> Result<()> {
    // SAFETY: no pointer is passed. Both numbers lie within a file.
    checked(unsafe { libc::fallocate(file.as_raw_fd(), 0, at as libc::off_t, len as libc::off_t) })
        .map_err(|cause| refused(&format!("take {len} bytes of shared memory (fallocate)"), &cause))
}

/// The slab that was made last has huge pages.
static HUGE: AtomicBool = AtomicBool::new(false);

/// Takes memory for a new file, as far as that must not wait for the first touch.
///
/// Huge pages matter as much as for private slabs. With pages of 4 KiB the first touch took 0.65 s per GiB and mapping it again
/// 0.1 s, with huge ones 0.1 s and 1 ms. O_DIRECT read half as fast: a request to the disk has at most 254 ranges of memory
/// (virtio). Most systems have no huge pages for such files by their settings, but give them if they are asked for.
pub(super) fn take_memory(file: &File, memory: &Anonymous) -> Result<()> {
    let len = memory.len() as u64;
    if len >= HUGE_PAGE && !is_set_huge() {
        // The kernel collapses no empty range.
        (0..len).step_by(HUGE_PAGE as usize).try_for_each(|at| allocate(file, at, page_size()))?;
        HUGE.store(memory.collapse(), Ordering::Relaxed);
    }
    if commits_strictly() {
        // A first touch that finds no memory would be a SIGBUS.
        allocate(file, 0, len)?;
    }
    Ok(())
}

/// Another process' file, of which `len` bytes can be mapped: it has them, and cannot lose them.
pub(super) fn checked_file(file: OwnedFd, len: u64) -> Result<(File, MemoryFileId)> {
    let refuse = |why: String| Err(Error::new(ErrorKind::Peer, format!("cannot use a neighbour's slab: {why}")));
    if len == 0 || len % page_size() != 0 {
        return refuse(format!("{len} bytes are not whole pages of {} bytes", page_size()));
    }
    let file = File::from(file);
    let facts = file.metadata().map_err(|cause| Error::io("look at a neighbour's slab (fstat)", &cause))?;
    if !facts.is_file() {
        return refuse("its descriptor is not one of a file".to_owned());
    }
    if facts.len() < len {
        return refuse(format!("it has {} bytes and not {len}", facts.len()));
    }
    // SAFETY: no pointer is passed.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return refuse("its size is not sealed (F_SEAL_SHRINK), and this process would die if it shrank".to_owned());
    }
    let identity = identity(&facts);
    Ok((file, identity))
}

/// The file's device and inode.
pub(super) fn identity(facts: &fs::Metadata) -> MemoryFileId {
    (facts.dev(), facts.ino())
}

/// The kind of pages that shared slabs of 2 MiB and more have: `huge`, if the one that was made last has such or the system is
/// set to find such, else the size of a small page.
pub fn shared_memory_pages() -> &'static str {
    match (HUGE.load(Ordering::Relaxed) || is_set_huge(), page_size()) {
        (true, _) => "huge",
        (_, 4096) => "4 KiB",
        (_, 16_384) => "16 KiB",
        _ => "64 KiB",
    }
}

/// True if memory files that ask for huge pages get them at the first touch.
fn is_set_huge() -> bool {
    static SET: OnceLock<bool> = OnceLock::new();
    *SET.get_or_init(read_huge)
}

fn read_huge() -> bool {
    let setting = |file: &str| fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{file}"));
    are_huge(&setting("shmem_enabled").unwrap_or_default(), setting("hugepages-2048kB/shmem_enabled").ok().as_deref())
}

/// The meaning of the two settings for memory that asks for huge pages. `large` is the one for pages of 2 MiB, from Linux 6.11 on;
/// see Documentation/admin-guide/mm/transhuge.rst.
fn are_huge(all: &str, large: Option<&str>) -> bool {
    let chosen = |text: &str| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
    match (chosen(all).as_deref(), large.and_then(chosen).as_deref()) {
        (Some("deny") | None, _) => false,
        (Some("force"), _) => true,
        (Some(all), None | Some("inherit")) => all != "never",
        (_, Some(large)) => large != "never",
    }
}

/// Whether the kernel refuses memory that it may not have (vm.overcommit_memory): such a refusal is a SIGBUS if it comes at
/// the first touch.
fn commits_strictly() -> bool {
    static SET: OnceLock<bool> = OnceLock::new();
    let read = || fs::read("/proc/sys/vm/overcommit_memory").is_ok_and(|setting| setting.first() == Some(&b'2'));
    *SET.get_or_init(read)
}

fn memfd(flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: the name ends with a zero byte; the result is checked.
    let file: RawFd = unsafe { libc::memfd_create(c"penstock-slab".as_ptr(), flags) };
    checked(file)?;
    // SAFETY: the call gave a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

fn checked(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn refused(doing: &str, cause: &io::Error) -> Error {
    let error = Error::io(doing, cause);
    match cause.raw_os_error() {
        Some(libc::ENOSYS) => error.of_kind(ErrorKind::Unsupported),
        Some(libc::ENOSPC) => error.of_kind(ErrorKind::OutOfMemory),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_shared_memory_say_whether_its_pages_are_huge() {
        let all = |chosen: &str| "always within_size advise never deny force".replace(chosen, &format!("[{chosen}]"));
        for (chosen, huge) in [
            ("always", true),
            ("within_size", true),
            ("advise", true),
            ("force", true),
            ("never", false),
            ("deny", false),
        ] {
            assert_eq!(are_huge(&all(chosen), None), huge, "{chosen}");
            assert_eq!(are_huge(&all(chosen), Some("always [inherit] within_size advise never")), huge, "{chosen}");
        }
        let of_this_size =
            |chosen: &str| "always inherit within_size advise never".replace(chosen, &format!("[{chosen}]"));
        assert!(are_huge(&all("never"), Some(&of_this_size("advise"))));
        assert!(!are_huge(&all("always"), Some(&of_this_size("never"))));
        assert!(!are_huge(&all("deny"), Some(&of_this_size("always"))));
        assert!(!are_huge("", None), "a kernel without such pages");
    }
}

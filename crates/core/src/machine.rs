//! The cores and the memory that affinity masks and control groups leave to this process.

use crate::options::PAGE;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Cores that this process may run on at once: the affinity mask, cut by the CPU quota of its control groups.
pub fn cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    allowed.max(1)
}

/// The core that the caller runs on, if that is known.
pub(crate) fn processor() -> Option<usize> {
    // SAFETY: it only reads.
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Moves the calling thread to a core. It may stay there, and be moved again like any other thread.
pub(crate) fn go_to(core: usize) {
    if core >= libc::CPU_SETSIZE as usize {
        return;
    }
    // SAFETY: all zeros are an empty set.
    let (mut before, mut there): (libc::cpu_set_t, libc::cpu_set_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let size = size_of::<libc::cpu_set_t>();
    // SAFETY: the sets have this size, the core is in range, and 0 is this thread. Refused, nothing is changed, and the
    // thread works where it is.
    unsafe {
        libc::CPU_SET(core, &mut there);
        if libc::sched_getaffinity(0, size, &raw mut before) == 0
            && libc::sched_setaffinity(0, size, &raw const there) == 0
        {
            libc::sched_setaffinity(0, size, &raw const before);
        }
    }
}

/// Bytes of memory that this process can still take if the kernel evicts nothing except clean page cache: the system's
/// `MemAvailable`, cut by what its control groups leave.
pub fn memory_available() -> u64 {
    memory_left(&["inactive_file"])
}

/// Bytes of memory and swap that this process could have if no other process used any.
pub(crate) fn memory_most() -> u64 {
    let memory = meminfo("MemTotal:").unwrap_or(u64::MAX);
    let memory = cgroup_memory_limit().map_or(memory, |limit| limit.min(memory));
    memory.saturating_add(meminfo("SwapTotal:").unwrap_or(0))
}

/// The time of a clock of the kernel, such as `CLOCK_THREAD_CPUTIME_ID`.
pub(crate) fn time_of(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes to `time` alone. The clocks that are asked for exist on every Linux.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Processor time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    time_of(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The page size of this kernel: 4 KiB on x86-64, up to 64 KiB elsewhere.
pub(crate) fn page_size() -> u64 {
    // Asked each time, which costs nothing. A cached value needs a lock: a child that was forked while another thread
    // asked would wait forever.
    // SAFETY: sysconf only reads.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE)
}

/// Whether a hypervisor runs this machine. Only x86-64 tells: bit 31 of ECX in CPUID leaf 1 (`X86_FEATURE_HYPERVISOR` in
/// Linux' cpufeatures.h). On other processors the answer is no.
pub(crate) fn is_virtual_machine() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 processor has CPUID, and leaf 1 of it. (The function is safe in newer versions of Rust.)
        #[allow(unused_unsafe)]
        let leaf = unsafe { std::arch::x86_64::__cpuid(1) };
        leaf.ecx >> 31 == 1
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether O_DIRECT may fill memory that a forked child inherits.
///
/// A fork makes all private pages read-only, in the parent too, and whichever process writes to a page next gets a copy. If
/// that is the parent while a read fills the page, the read goes on in the old page and the parent's copy lacks the bytes.
/// From 6.3 on O_DIRECT pins its pages as `page_needs_cow_for_dma` (5.12) wants it: a fork copies them for the child at
/// once and the parent keeps its own. Before that the reference is a plain one, and it depends on who writes to a page
/// while it is read into. Nobody does where a page belongs to one read: extents end at multiples of [`PAGE`], blocks begin
/// there, a tensor is handed out after all reads of its pages, and the child's writes copy the child's page. Two cases are
/// left. Where pages are larger than [`PAGE`], two reads share one, and the second one to start copies it. Before 5.8 the
/// first write to a huge page after a fork copies all 2 MiB of it, not 4 KiB, with other reads under way in them.
pub(crate) fn direct_reads_survive_forks() -> bool {
    // SAFETY: zeros are a valid value of these arrays.
    let mut name: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: it writes to `name` alone.
    if unsafe { libc::uname(&raw mut name) } != 0 {
        return false;
    }
    let release: Vec<u8> = name.release.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    survive_forks(&String::from_utf8_lossy(&release), page_size())
}

fn survive_forks(release: &str, page: u64) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version >= (6, 3) || (version >= (5, 8) && page <= PAGE)
}

/// The tightest memory limit of the control groups that this process is in, in bytes.
pub fn cgroup_memory_limit() -> Option<u64> {
    cgroup_folders().into_iter().filter_map(|(dir, v2)| limit(&dir, v2)).min()
}

/// Bytes of memory that this process can take before the kernel kills one: as [`memory_available`], but the kernel gives up
/// pages of files that were read twice too.
pub(crate) fn memory_before_a_kill() -> u64 {
    memory_left(&["inactive_file", "active_file"])
}

/// Bytes that the system and every control group leave, if these pages of files are given up.
fn memory_left(given_up: &[&str]) -> u64 {
    let groups = cgroup_folders().into_iter().filter_map(|(dir, v2)| left(&dir, v2, given_up));
    groups.chain(meminfo("MemAvailable:")).min().unwrap_or(u64::MAX)
}

/// Bytes that one group leaves, if these pages of its files are given up.
fn left(dir: &std::path::Path, v2: bool, given_up: &[&str]) -> Option<u64> {
    // Above `memory.high` nothing is killed, but the kernel takes pages back and makes the processes wait. Kubernetes sets
    // it with its feature gate MemoryQoS. Version 1 has nothing like it.
    let high = if v2 { number(&dir.join("memory.high")) } else { None };
    let limit = limit(dir, v2).into_iter().chain(high).min()?;
    let used = number(&dir.join(if v2 { "memory.current" } else { "memory.usage_in_bytes" }))?;
    // Pages of files count as used, but the kernel gives them up first.
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let clean: u64 = given_up
        .iter()
        .filter_map(|name| {
            let count = |l: &str| {
                l.strip_prefix(if v2 { "" } else { "total_" })?
                    .strip_prefix(name)?
                    .strip_prefix(' ')?
                    .trim()
                    .parse::<u64>()
                    .ok()
            };
            stat.lines().find_map(count)
        })
        .sum();
    Some(limit.saturating_sub(used.saturating_sub(clean)))
}

fn limit(dir: &std::path::Path, v2: bool) -> Option<u64> {
    let limit = number(&dir.join(if v2 { "memory.max" } else { "memory.limit_in_bytes" }))?;
    // Version 1 writes "no limit" as the largest multiple of the page size.
    (limit < 1 << 60).then_some(limit)
}

fn number(path: &std::path::Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Folders of the memory controller for this process and every group above it, innermost first, and whether they are
/// version 2. Inside a container the path in /proc/self/cgroup may lie outside the mount. Then the mount's root is
/// used.
fn cgroup_folders() -> Vec<(PathBuf, bool)> {
    let mut folders = Vec::new();
    let Ok(groups) = fs::read_to_string("/proc/self/cgroup") else { return folders };
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (root, v2) = match (id, controllers) {
            ("0", "") => ("/sys/fs/cgroup", true),
            (_, c) if c.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", false),
            _ => continue,
        };
        let root = PathBuf::from(root);
        let mut dir = root.join(path.trim_start_matches('/'));
        if !dir.is_dir() {
            dir = root.clone();
        }
        while dir.starts_with(&root) {
            folders.push((dir.clone(), v2));
            if !dir.pop() {
                break;
            }
        }
    }
    folders
}

fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Signals are for the program's own threads: a handler that runs here would interrupt reads for nothing.
pub fn block_signals() {
    // SAFETY: the set is initialised by sigfillset before it is used; only this thread's mask changes.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

/// Gives this thread the lowest priority, of processors and of disks. It cannot take that back.
pub(crate) fn give_way() {
    const THIS_THREAD: libc::id_t = 0;
    /// `IOPRIO_WHO_PROCESS`, and the class that waits for all others (ioprio_set(2)).
    const WHO: libc::c_int = 1;
    const IDLE: libc::c_int = 3 << 13;
    // SAFETY: plain system calls about this thread. Where they are refused, the work has the usual priority.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, THIS_THREAD, 19);
        libc::syscall(libc::SYS_ioprio_set, WHO, 0, IDLE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_gives_way_is_the_last_one_for_processors_and_disks() {
        // SAFETY: a plain system call about this thread.
        let own = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = own();
        let found = std::thread::spawn(|| {
            give_way();
            // SAFETY: plain system calls about this thread.
            unsafe { (libc::getpriority(libc::PRIO_PROCESS, 0), libc::syscall(libc::SYS_ioprio_get, 1, 0) >> 13) }
        });
        assert_eq!(found.join().expect("it only asks"), (19, 3));
        assert_eq!(own(), before, "this one is as before");
    }

    #[test]
    fn available_memory_is_within_the_total() {
        let total = meminfo("MemTotal:").expect("Linux has /proc/meminfo");
        assert!(memory_available() > 0 && memory_available() <= total);
        assert!(memory_most() >= memory_available());
        assert!(cores() >= 1);
    }

    #[test]
    fn a_group_leaves_what_the_lower_of_its_limits_leaves_and_its_inactive_files() {
        let folder = tempfile::tempdir().unwrap();
        for (max, high, limited, room) in [
            ("5000", "max", Some(5000), Some(3600)),
            ("5000", "3000", Some(5000), Some(1600)),
            ("3000", "5000", Some(3000), Some(1600)),
            ("max", "3000", None, Some(1600)),
            ("1000", "max", Some(1000), Some(0)),
            ("max", "max", None, None),
        ] {
            let files = [
                ("memory.max", max),
                ("memory.high", high),
                ("memory.current", "2000"),
                ("memory.stat", "anon 1200\nfile 800\nactive_file 200\ninactive_file 600\n"),
            ];
            for (name, text) in files {
                fs::write(folder.path().join(name), format!("{text}\n")).unwrap();
            }
            let left = |given_up: &[&str]| left(folder.path(), true, given_up);
            assert_eq!((limit(folder.path(), true), left(&["inactive_file"])), (limited, room), "{max} {high}");
            let all = left(&["inactive_file", "active_file"]);
            assert_eq!(all, if max == "1000" { Some(0) } else { room.map(|room| room + 200) }, "{max} {high}");
        }
    }

    #[test]
    fn direct_reads_land_in_inherited_memory_where_a_fork_cannot_take_their_bytes() {
        for (release, page, survive) in [
            ("6.18.44", 65536, true),
            ("6.3.0-rc1", 65536, true),
            ("6.1.0-40-amd64", 4096, true),
            ("6.1.0-40-arm64-64k", 65536, false),
            ("5.8.0", 4096, true),
            ("5.4.0-150-generic", 4096, false),
            ("4.18.0-553.el8.x86_64", 4096, false),
            ("", 4096, false),
            ("kernel", 4096, false),
        ] {
            assert_eq!(survive_forks(release, page), survive, "{release} {page}");
        }
    }

    #[test]
    fn a_thread_that_was_moved_may_run_where_it_could_before() {
        let allowed = || {
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            status.lines().find(|l| l.starts_with("Cpus_allowed_list")).unwrap().to_string()
        };
        std::thread::spawn(move || {
            let before = allowed();
            // SAFETY: an empty set, which is then written to.
            let may_run_on = unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set), 0);
                (0..libc::CPU_SETSIZE as usize).filter(move |core| libc::CPU_ISSET(*core, &set))
            };
            for core in may_run_on {
                // It may be moved again at once, but not every time.
                let there = (0..100).any(|_| {
                    go_to(core);
                    assert_eq!(allowed(), before);
                    go_to(core);
                    processor() == Some(core)
                });
                assert!(there, "never on core {core}");
            }
            for nowhere in [libc::CPU_SETSIZE as usize, usize::MAX] {
                go_to(nowhere);
                assert_eq!(allowed(), before);
            }
        })
        .join()
        .unwrap();
    }
}

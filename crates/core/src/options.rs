//! Every default and limit of the options, in one place. Python's `penstock.Options` mirrors this struct and adds
//! nothing. `order` and `misaligned` are arguments of each load in Python.

use std::fmt;
use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

/// 1 KiB, 1 MiB, 1 GiB in bytes.
pub(crate) const KIB: u64 = 1 << 10;
/// 2^20.
pub const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
/// 1e9 bytes, the unit of rates.
pub(crate) const GB: f64 = 1e9;

/// Page size assumed for the alignment of reads and of mirror blocks: O_DIRECT needs 512 or 4096, and both divide it.
pub const PAGE: u64 = 4096;
/// A transparent huge page; also the granule in which private CPU memory is given back.
pub const HUGE_PAGE: u64 = 2 * MIB;
/// Where tensors start in blocks allocated on a GPU (the alignment that cudaMalloc itself promises).
pub const GPU_ALIGN: u64 = 256;
/// Where tensors start in dense blocks allocated on the CPU (a cache line).
pub const CPU_ALIGN: u64 = 64;
/// Small neighbours share an allocated block of at most this size; a larger tensor has its own block.
pub const SHARED_BLOCK: u64 = 32 * MIB;

/// The longest extent. Many systems read 2 GiB at most in one call.
pub const MOST_EXTENT: u64 = 1 << 30;

/// The shortest extent that a store may declare: shorter reads cost every store more than they bring.
pub const LEAST_EXTENT: u64 = 256 * KIB;

/// Holes up to this many bytes are always read if no other limit is given: reading them costs less than any read.
pub const LEAST_GAP: u64 = 16 * KIB;

/// Gaps between short rows in the page cache are read up to this many bytes, and longer ones are skipped: a system call
/// costs as much as copying 6 to 8 KiB (0.6 us).
pub const ROW_GAP: u64 = 8 * KIB;

/// Plain staging memory that stays for the next load after the last load of the process has ended: 16 slabs of the
/// default size. All memory that is registered with a GPU's driver stays.
pub const IDLE_STAGING: u64 = 64 * MIB;

/// How much registered staging memory loads to GPUs keep, with a `staging` limit of `limit` bytes in slabs of `slab`
/// bytes: half of the limit, and at least two slabs. By default that is 32 slabs of 4 MiB. A link of 55 GB/s drains a
/// slab in 76 us, and a core fills one in 0.5 to 0.8 ms out of the page cache, so about 10 slabs are being filled at a
/// time. 24 keep both sides busy (`engine/virtual_time.rs`), and each further slab costs 0.4 ms to register.
pub const fn pool_bytes(limit: u64, slab: u64) -> u64 {
    if limit / 2 > 2 * slab {
        limit / 2
    } else {
        2 * slab
    }
}

/// Most threads that register staging memory: the driver serialises much of it, and the pool has 32 slabs.
pub const MOST_PINNING_THREADS: u32 = 16;

/// Bytes of blocks that a caller grants together at first: reads into them go on while it allocates more.
const FIRST_GRANT: u64 = 16 * MIB;
/// The same at most. A fence costs 10 us, and an allocation of a GPU's driver 0.1 ms and more.
const MOST_GRANT: u64 = 256 * MIB;

/// The blocks that a caller allocates and grants together, by the sizes of all blocks in their order: groups that double
/// from 16 to 256 MiB, or one block where that is larger.
pub fn grants(sizes: &[u64]) -> Vec<Range<usize>> {
    let (mut groups, mut begin, mut held, mut most) = (Vec::new(), 0, 0, FIRST_GRANT);
    for (block, size) in sizes.iter().enumerate() {
        held += size;
        if held >= most {
            groups.push(begin..block + 1);
            (begin, held, most) = (block + 1, 0, (2 * most).min(MOST_GRANT));
        }
    }
    if begin < sizes.len() {
        groups.push(begin..sizes.len());
    }
    groups
}

/// How bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// Chosen per extent from file system, residency, device and cache policy.
    #[default]
    Auto,
    /// The page cache is mapped (CPU targets only).
    Mapped,
    /// Reads through the page cache, by a pool of threads.
    Buffered,
    /// Reads through the page cache, by io_uring.
    UringBuffered,
    /// O_DIRECT, by io_uring, or by a pool of threads if this kernel refuses it.
    Direct,
    /// O_DIRECT through io_uring.
    Uring,
    /// O_DIRECT through a pool of threads.
    Threads,
}

/// The effect of a load on the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cache {
    /// Keep what is mapped. Keep copies too if that costs nothing, judged by the memory left and the pace of the
    /// storage. Otherwise bypass.
    #[default]
    Auto,
    /// Cold bytes go through the page cache, so that the next start is warm.
    Keep,
    /// Cold bytes leave the page cache as it was.
    Bypass,
}

/// Whether ranks that load together exchange what several of them want.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Exchanging {
    /// They try both ways, and go on in the quicker one.
    #[default]
    Auto,
    /// One reads it and sends it to the others.
    On,
    /// Each reads what it wants.
    Off,
}

/// The ranks that read for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// All of them.
    #[default]
    World,
    /// Ranks of one machine. Each machine reads all bytes that its ranks want.
    Node,
}

/// The ports at which a rank listens for the others: the first and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports(u16, u16);

impl Ports {
    /// Ports from a text such as "40000-40100".
    ///
    /// # Errors
    /// Says what such a text must be.
    pub fn parse(text: &str) -> Result<Ports, String> {
        let port = |text: &str| match !text.is_empty() && text.len() <= 5 && text.bytes().all(|b| b.is_ascii_digit()) {
            true => text.parse::<u16>().ok().filter(|port| *port > 0),
            false => None,
        };
        let range = text.split_once('-').and_then(|(first, last)| Some((port(first)?, port(last)?)));
        match range {
            // A rank that meets the others listens at two ports: for them, and for the question whether it is there.
            Some((first, last)) if first < last => Ok(Ports(first, last)),
            Some((first, last)) if first == last => Err("must be two ports or more: a rank needs two at a time".into()),
            Some(_) => Err("must begin with the lower port".into()),
            None => Err("must be a range of ports from 1 to 65535, such as \"40000-40100\"".into()),
        }
    }

    /// How many there are.
    pub fn count(self) -> usize {
        usize::from(self.1 - self.0) + 1
    }

    /// All of them, from the one at this place among them to the one before it.
    pub fn from(self, place: usize) -> impl Iterator<Item = u16> {
        let count = self.count();
        (0..count).map(move |step| self.0 + ((place + step) % count) as u16)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

/// Where a rank listens for the others, and what they are told to reach.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Bind {
    /// The address at which the rendezvous store is reached from.
    #[default]
    Chosen,
    /// An address of this machine.
    Address(IpAddr),
    /// An address of this interface.
    Interface(String),
}

impl Bind {
    /// An address or the name of an interface; an empty text leaves the choice to Penstock.
    ///
    /// # Errors
    /// Says what such a text must be, or why others cannot reach this address.
    pub fn parse(text: &str) -> Result<Bind, String> {
        if text.is_empty() {
            return Ok(Bind::Chosen);
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            let refused = match address {
                _ if address.is_unspecified() => Some("is no address that others can reach: name one of this machine"),
                _ if address.is_multicast() => Some("is a multicast address: name one of this machine"),
                IpAddr::V4(v4) if v4.is_broadcast() => Some("is a broadcast address: name one of this machine"),
                IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80 => {
                    Some("is a link-local address, which means another interface on each machine: name a routed one")
                }
                _ => None,
            };
            return refused.map_or(Ok(Bind::Address(address)), |why| Err(why.into()));
        }
        // The kernel's rule for a name (dev_valid_name), in visible ASCII. getifaddrs(3) gives the label of an IPv4 address in place
        // of the name. A label has a colon: "eth0:1".
        let (name, label) = text.split_once(':').unwrap_or((text, "none"));
        let is_name = text.len() <= 15 && !matches!(name, "" | "." | "..") && !label.is_empty();
        let is_name = is_name && text.bytes().all(|b| b.is_ascii_graphic() && b != b'/') && !label.contains(':');
        // An address and a port, such as "10.0.0.7:80", is no label.
        let is_name = is_name && name.parse::<IpAddr>().is_err();
        match is_name {
            true => Ok(Bind::Interface(text.to_owned())),
            false => {
                Err("must be an address such as \"10.0.0.7\" or \"fd00::7\", or an interface such as \"eth0\"".into())
            }
        }
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bind::Chosen => Ok(()),
            Bind::Address(address) => address.fmt(f),
            Bind::Interface(name) => f.write_str(name),
        }
    }
}

/// In which order tensors are read and handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// As they stand in the files.
    #[default]
    File,
    /// Grouped by layer (the first number in the name); within a group in the order of the files.
    Layer,
    /// As they are asked for: in the order of the wants. Of a save, that of its tensors, as `File`.
    Asked,
}

/// Options of one load. `Default` is right for nearly every load.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// How bytes travel.
    pub io: Io,
    /// The effect of the load on the page cache.
    pub cache: Cache,
    /// Most bytes of staging memory (slabs) for this process. At least two extents. A load takes less where less is left.
    pub staging: u64,
    /// Most bytes of one extent: one I/O. A store may declare less.
    pub extent: u64,
    /// Most reads in flight; 0 adapts to the lane.
    pub depth: u32,
    /// Worker threads of the buffered and mapped routes, and of direct reads without io_uring; 0 adapts to cores and file system.
    pub threads: u32,
    /// Threads that register staging memory with a GPU's driver when the pool of it grows; at least 1. More than one has not
    /// been measured on hardware.
    pub pinning_threads: u32,
    /// On a CPU target: `Some(true)` gives private copies. `Some(false)` insists on mapping where the file system
    /// allows it. `None` maps local files; with [`Cache::Bypass`] only those that are resident.
    pub copy: Option<bool>,
    /// Tensors that the file misaligns may keep their place in it, mapped or read (unless `copy` is `Some(true)` or `io` was
    /// chosen): for consumers that read any address, as torch does.
    /// Otherwise they are copied to aligned memory.
    pub misaligned: bool,
    /// Extra bytes between two wanted runs are read, not skipped, up to this many. A store may declare more. `None`:
    /// [`LEAST_GAP`], or what a read of the storage costs, measured if there are thousands of longer holes.
    pub gap: Option<u64>,
    /// Order of reading and hand-out.
    pub order: Order,
    /// Most bytes read ahead of the consumer of a stream; or the next tensor alone where that is larger.
    pub window: u64,
    /// If nothing moves for this long, reads count as hung and the load fails.
    pub stall_timeout: Duration,
    /// Whether ranks that load together exchange what several of them want.
    pub exchange: Exchanging,
    /// The ranks that do so.
    pub scope: Scope,
    /// The longest silence of another rank. After it that rank is dead, and the load fails.
    pub peer_timeout: Duration,
    /// How long a rank waits for the others before a load.
    pub join_timeout: Duration,
    /// The ports at which a rank listens for the others; `None`: whichever the kernel gives.
    pub ports: Option<Ports>,
    /// The address at which it listens.
    pub bind: Bind,
    /// File for a trace of the load, for Chrome or Perfetto; empty: no trace. `{pid}` and `{n}` in it stand for the
    /// process and the number of the traced load in it.
    pub trace: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            io: Io::Auto,
            cache: Cache::Auto,
            staging: 256 * MIB,
            extent: 4 * MIB,
            depth: 0,
            threads: 0,
            pinning_threads: 1,
            copy: None,
            misaligned: false,
            gap: None,
            order: Order::File,
            window: GIB,
            stall_timeout: Duration::from_secs(120),
            exchange: Exchanging::Auto,
            scope: Scope::World,
            peer_timeout: Duration::from_secs(5),
            join_timeout: Duration::from_secs(300),
            ports: None,
            bind: Bind::Chosen,
            trace: String::new(),
        }
    }
}

impl Options {
    /// The gap before anything is known of the storage.
    pub fn least_gap(&self) -> u64 {
        self.gap.unwrap_or(LEAST_GAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ports_are_a_range_of_two_or_more() {
        let ports = Ports::parse("40000-40002").unwrap();
        assert_eq!((ports.count(), ports.to_string().as_str()), (3, "40000-40002"));
        assert_eq!(ports.from(2).collect::<Vec<_>>(), [40002, 40000, 40001]);
        assert_eq!(Ports::parse("1-65535").unwrap().from(65534).next(), Some(65535));
        for wrong in
            ["", "40000", "40000-", "-40000", "40000:40100", "0-10", "40000-65536", "+1-5", " 1-5", "1-5-9", "a-b"]
        {
            assert!(Ports::parse(wrong).unwrap_err().contains("40000-40100"), "{wrong:?}");
        }
        assert!(Ports::parse("5-4").unwrap_err().contains("lower port"));
        assert!(Ports::parse("5-5").unwrap_err().contains("two"));
    }

    #[test]
    fn a_rank_listens_where_others_can_reach_it() {
        assert_eq!(Bind::parse(""), Ok(Bind::Chosen));
        assert_eq!(Bind::parse("10.0.0.7"), Ok(Bind::Address("10.0.0.7".parse().unwrap())));
        assert_eq!(Bind::parse("fd00::7"), Ok(Bind::Address("fd00::7".parse().unwrap())));
        for name in ["eth0.100", "eth0:1", "br-1:vip", "a-name-of-15:ab"] {
            assert_eq!(Bind::parse(name), Ok(Bind::Interface(name.into())));
        }
        for unreachable in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "fe80::1"] {
            assert!(Bind::parse(unreachable).is_err(), "{unreachable}");
        }
        for wrong in [
            "10.0.0.7:80",
            "[fd00::7]",
            "[fd00:7]:80",
            "fe80::1%eth0",
            "eth0:",
            ":1",
            "..:1",
            "eth0:1:2",
            "a-name-of-15:abc",
            "eth 0",
            "a/b",
            "a-name-that-is-too-long",
            " eth0",
            "..",
            "ethö",
        ] {
            assert!(Bind::parse(wrong).unwrap_err().contains("eth0"), "{wrong:?}");
        }
    }

    proptest! {
        /// Each block is in one group, in order; no group is larger than its bound by more than its last block.
        #[test]
        fn blocks_are_granted_in_groups_that_grow(sizes in prop::collection::vec(0..400 * MIB, 0..200)) {
            let groups = grants(&sizes);
            let blocks: Vec<usize> = groups.iter().flat_map(Clone::clone).collect();
            prop_assert_eq!(blocks, (0..sizes.len()).collect::<Vec<_>>());
            let mut most = FIRST_GRANT;
            for (i, group) in groups.iter().enumerate() {
                prop_assert!(!group.is_empty());
                let held: u64 = sizes[group.clone()].iter().sum();
                prop_assert!(held - sizes[group.end - 1] < most);
                prop_assert!(held >= most || i + 1 == groups.len());
                most = (2 * most).min(MOST_GRANT);
            }
        }
    }
}

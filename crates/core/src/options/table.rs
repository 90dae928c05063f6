//! The table of the options: all that the program says of an option stands once, here. Guides may name a default too: search
//! them for its number when you change one.
//!
//! A new option is an entry of [`option_table!`](crate::option_table) and the code that reads its field. The entry
//! makes the field, the keyword and the environment variable `PENSTOCK_` with the name in capitals.
//! `tools/option_docs.py` writes what type checkers and `docs/tuning.md` say of it.

use super::{is_extent, GIB, LEAST_GAP, MIB, MOST_PINNING_THREADS};
use super::{Bind, Cache, Exchanging, FileName, Form, Io, OptionValue, Order, Ports, Scope, Shown};
use std::time::Duration;

/// Gives the table to a macro. An entry, in the order in which options are listed everywhere:
///
/// - its description for `help(penstock.Options)`; behind an empty line that for the table in `docs/tuning.md`;
/// - name, type and default. `means` explains a default such as 0 or an empty text;
/// - `help`: the line of the command line, which adds the default;
/// - `limit`: a test of the value, and the text of the error. Without it all values of the type are possible.
///
/// The descriptions of a choice do not list its texts: the type does.
#[macro_export]
macro_rules! option_table {
    ($with:ident) => {
        $with! {
            everyday {
                /// whether bytes that come from the disk stay in the page cache.
                ///
                /// `"keep"`, `"bypass"`: see [The page cache](#the-page-cache)
                cache { Cache = Cache::Auto, help: "whether bytes from the disk stay in the page cache" }

                /// on the CPU. True gives private copies. False maps files wherever the file system allows it. None
                /// (the default) maps local files (with cache="bypass" only those that are resident).
                ///
                /// `True`: [private copies](#cpu-memory). `False`: map, and refuse options that contradict a mapping;
                /// bytes that cannot be mapped are copied all the same
                copy { Option<bool> = None, help: "true: private copies; false: map files wherever that is possible" }

                /// the most bytes that a stream reads ahead of its consumer (default 1 GiB). A next tensor that is
                /// larger is read alone.
                ///
                /// most bytes that a `stream` reads ahead. Lower it to save memory. A larger next tensor is read alone
                window { u64 = GIB, help: "the most bytes that a stream reads ahead" }

                /// the most bytes of staging memory of this process (default 256 MiB). A load takes less where less
                /// memory is left.
                ///
                /// most staging memory of all loads of the process, at least two extents. Where less memory is left, as
                /// in a pod, a load takes less (`fallbacks`). Raise it if a load is bound by `staging`
                staging {
                    u64 = 256 * MIB,
                    help: "the most staging memory of this process",
                    // An impossible extent is an error of its own
                    limit: |o| !is_extent(o.extent) || o.staging >= 2 * o.extent,
                        format!("must hold at least two extents of {} bytes", o.extent),
                }

                /// the number of threads that read through the page cache and copy; 0 (the default) adapts.
                ///
                /// workers that read through the page cache and copy. Default: the cores, at most 16; at least 12 for a
                /// disk, 32 on network file systems
                threads { u32 = 0, means: "adapts", help: "threads that read and copy" }

                /// seconds. If nothing moves for so long, reads count as hung, and the load fails (default 120).
                ///
                /// fail if nothing moves for this time. Raise it for storage as slow as tape; lower it to fail over
                /// sooner. `PENSTOCK_STALL_TIMEOUT` also bounds `open`, `verify` and the commands (`--stall-timeout`)
                stall_timeout { Duration = Duration::from_secs(120), help: "fail if nothing moves for so long" }
            }
            advanced {
                /// the way of reading.
                /// "buffered" reads through the page cache by a thread pool, "uring_buffered" by io_uring. "direct"
                /// reads past it with O_DIRECT, by io_uring if this system grants it, else by a thread pool; "uring"
                /// and "threads" name one.
                ///
                /// to compare routes. Through the page cache: `"mapped"`, `"buffered"` (threads), `"uring_buffered"`.
                /// O_DIRECT: `"direct"` (io_uring, or threads if that is refused), `"uring"`, `"threads"`. All except
                /// `"auto"` and `"mapped"` give private memory
                io { Io = Io::Auto, help: "the way of reading" }

                /// the most bytes of one read, a multiple of 4096 (default 4 MiB).
                ///
                /// most bytes of one read, a multiple of 4096. Larger helps high latency per request; smaller gives the
                /// first tensor earlier
                extent {
                    u64 = 4 * MIB,
                    help: "the most bytes of one read",
                    limit: |o| is_extent(o.extent),
                        "must be a multiple of 4096 bytes, from 4096 to 1 GiB",
                }

                /// the most reads in flight; 0 (the default) adapts.
                ///
                /// most reads in flight. Raise it for disk arrays; lower it to leave more of a shared disk to others.
                /// Without io_uring, `threads` bounds direct reads
                depth { u32 = 0, means: "adapts", help: "the most reads in flight" }

                /// if at most so many unwanted bytes lie between two wanted ranges, they are read too. "auto" (the
                /// default): 16 KiB; more where a load has thousands of longer holes and a read of this storage, timed,
                /// costs more.
                ///
                /// longest gap between two wanted runs that is read, not skipped. `"auto"`: 16 KiB, more (up to 512
                /// KiB) if a load has thousands of gaps and a timed read of the storage costs more. 0 reads only the
                /// wanted pages
                gap { Option<u64> = None, help: "read up to so many unwanted bytes between two wanted ranges" }

                /// whether the load times some pages as it gets them. Where they are slow, the rest comes in small
                /// pages, and cold mapped pages are touched. None (the default): private memory only in a virtual
                /// machine. True: on every machine. False: never; pages are huge, and none is touched.
                ///
                /// whether some pages are timed. Where they are slow, the rest comes in small pages, and cold mapped
                /// pages are [touched](#cpu-memory). `None`: private memory only in a virtual machine. `True`: on every
                /// machine. `False`: never; pages are huge, none is touched, and `first_touch_seconds` is None
                page_timing { Option<bool> = None, help: "false: never time pages, take huge ones, and touch none" }

                /// the number of threads, 1 (the default) to 16, that register staging memory with a GPU's driver in
                /// the first load to it. More than one has not been measured on hardware.
                ///
                /// threads, at most 16, that register staging memory with a GPU's driver. More than one has not been
                /// measured on hardware
                pinning_threads {
                    u32 = 1,
                    help: "threads that register staging memory with a GPU's driver",
                    limit: |o| (1..=MOST_PINNING_THREADS).contains(&o.pinning_threads),
                        format!("must be from 1 to {MOST_PINNING_THREADS}"),
                }

                /// of several ranks that load together, whether one reads what several of them want and
                /// sends it to the others. "auto" (the default) tries both ways with the first 64 MiB of it, and goes
                /// on in the quicker one.
                ///
                /// whether [ranks that load together](guides.md#ranks-that-load-together) read for each other.
                /// `"auto"`: they try both ways and take the quicker one; below 128 MiB shared they exchange; with
                /// files in every page cache, and onto GPUs, each reads alone. `"on"`, `"off"`: always, never
                exchange { Exchanging = Exchanging::Auto, help: "of ranks that load together: read for each other" }

                /// which ranks do so. "world" (the default): all of them, so that each byte leaves the
                /// storage once. "node": those of one machine, so that each machine reads what its ranks want, and
                /// nothing crosses the network.
                ///
                /// which ranks read for each other. `"node"`: those of one machine, so nothing of the model crosses the
                /// network: for files on each machine's own disk, or a network slower than the storage. A machine is
                /// one kernel
                scope { Scope = Scope::World, help: "which ranks read for each other: all, or those of one machine" }

                /// of several ranks that load together, whether those of one machine copy out of each other's
                /// staging memory. True (the default), or False: bytes go through sockets.
                ///
                /// ranks of one machine copy out of each other's [staging
                /// memory](guides.md#ranks-that-load-together), which is shared memory then. `False`: bytes go through
                /// sockets
                shared_slabs { bool = true, help: "of ranks on one machine: copy out of each other's staging memory" }

                /// seconds. Of several ranks that load together, one that says nothing for so long is dead, and the
                /// load fails on the others (default 5).
                ///
                /// a rank that says nothing for this time counts as dead. A busy rank is not silent. Raise it if
                /// processes are stopped on purpose
                peer_timeout {
                    Duration = Duration::from_secs(5),
                    help: "of ranks that load together: fail if one says nothing for so long",
                }

                /// seconds that a rank waits for the others before a load (default 300).
                ///
                /// how long a rank waits for the others before a load; in a `stream` also for one that consumes its
                /// half of the window
                join_timeout {
                    Duration = Duration::from_secs(300),
                    help: "how long a rank waits for the others before a load",
                }

                /// the ports at which a rank listens for the others, such as "40000-40100". "" (the default): any. A
                /// rank takes two in a load, and two more in a stream and within `joined`.
                ///
                /// ports at which a rank listens, `"40000-40100"`, outside of `net.ipv4.ip_local_port_range`: [how
                /// many](guides.md#several-nodes)
                ports { Option<Ports> = None, means: "any", help: "the ports at which a rank listens for the others" }

                /// the address or the interface at which it listens, and which the others are told to reach. "" (the
                /// default): the interface in GLOO_SOCKET_IFNAME, else the address from which the rendezvous store is
                /// reached.
                ///
                /// address (`"10.0.0.7"`, `"fd00::7"`) or interface (`"eth1"`, IPv4 first) at which a rank listens.
                /// Default: `GLOO_SOCKET_IFNAME`, else the address from which the store's server is reached
                bind { Bind = Bind::Chosen, means: "chosen", help: "the address or the interface at which it listens" }

                /// a file. The load writes to it what happened when, for Chrome or Perfetto. "{pid}" and "{n}" in the
                /// name stand for the process and the number of the traced load in it. "" (the default) writes none.
                ///
                /// file for [a trace](#a-trace). `{pid}` stands for the process, `{n}` for the number of the traced
                /// load
                trace {
                    FileName = FileName::default(), means: "none",
                    help: "write what happened when, as --trace does",
                }
            }
        }
    };
}

/// Checks the value of an option. The error names the limit.
type Limit = fn(&Options) -> Result<(), String>;

/// One option, as the table has it.
pub struct OptionRow {
    /// Name of the keyword.
    pub name: &'static str,
    /// "everyday": options that a user may well set. "advanced": those for measurements, for unusual storage, and for
    /// finding out what is wrong.
    pub group: &'static str,
    /// Kind of values.
    pub form: Form,
    /// Word for a value in the help of the command line.
    pub word: &'static str,
    /// Meaning of a default that is no value of its own.
    pub means: Option<&'static str>,
    /// Line of the command line.
    pub help: &'static str,
    /// Lines of both descriptions, each behind a space, with an empty line between them.
    pub doc: &'static [&'static str],
    /// Value of an option.
    pub get: fn(&Options) -> Shown<'_>,
    set: fn(&mut Options, &str) -> Result<(), String>,
    limit: Option<Limit>,
}

impl OptionRow {
    /// Sets the option to the value that a text means.
    ///
    /// # Errors
    /// Says what such a text must be.
    pub fn set(&self, options: &mut Options, text: &str) -> Result<(), String> {
        (self.set)(options, text)
    }

    /// Name of the environment variable.
    pub fn variable(&self) -> String {
        format!("PENSTOCK_{}", self.name.to_uppercase())
    }
}

/// The entry of this name.
pub fn row(name: &str) -> Option<&'static OptionRow> {
    TABLE.iter().find(|row| row.name == name)
}

macro_rules! options {
    ($($group:ident { $(
        $(#[doc = $doc:literal])*
        $name:ident {
            $kind:ty = $default:expr, $(means: $means:literal,)? help: $help:literal
            $(, limit: |$o:ident| $holds:expr, $why:expr)? $(,)?
        }
    )* })*) => {
        /// Options of one load. `Default` is right for nearly every load.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Options {
            $($($(#[doc = $doc])* pub $name: $kind,)*)*
            /// Tensors that the file misaligns may keep their place in it, mapped or read (unless `copy` is
            /// `Some(true)` or `io` was chosen): for consumers that read any address, as torch does. Otherwise they are
            /// copied to aligned memory.
            pub misaligned: bool,
            /// Order of reading and hand-out.
            pub order: Order,
        }

        impl Default for Options {
            fn default() -> Self {
                Self { $($($name: $default,)*)* misaligned: false, order: Order::File }
            }
        }

        /// All options, the everyday ones first.
        pub static TABLE: &[OptionRow] = &[$($(OptionRow {
            name: stringify!($name),
            group: stringify!($group),
            form: <$kind as OptionValue>::FORM,
            word: <$kind as OptionValue>::WORD,
            means: [$(Some($means),)? None][0],
            help: $help,
            doc: &[$($doc),*],
            get: |options| options.$name.shown(),
            set: |options, text| OptionValue::parse(text).map(|value| options.$name = value),
            limit: [$(Some((|$o| ($holds).then_some(()).ok_or_else(|| $why.into())) as Limit),)? None][0],
        },)*)*];
    };
}
option_table!(options);

impl Options {
    /// Checks the value of every option.
    ///
    /// # Errors
    /// The first option with an impossible value: its name, the value, and the limit.
    pub fn check(&self) -> Result<(), String> {
        TABLE.iter().try_for_each(|row| {
            let checked = row.limit.map_or(Ok(()), |limit| limit(self));
            checked.map_err(|why| format!("{}={}: {why}", row.name, (row.get)(self)))
        })
    }

    /// The gap before anything is known of the storage.
    pub fn least_gap(&self) -> u64 {
        self.gap.unwrap_or(LEAST_GAP)
    }
}

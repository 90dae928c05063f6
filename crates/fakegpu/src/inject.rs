//! Settings: what the machine looks like, and which calls and copies fail.
//!
//! Each setting is an environment variable `FAKEGPU_<NAME>` (read when the library is first used and at every reset) and
//! a key of `fakegpu_configure` in lower case.
//!
//! | key | value | default |
//! |---|---|---|
//! | `devices` | number of devices | 1 |
//! | `memory` | bytes of memory per device; an allocation beyond it is error 2 | 16 GiB |
//! | `integrated` | 1: devices share memory with the host | 0 |
//! | `host_pointer` | 0: registered memory has another address on the device | 1 |
//! | `fail` | `name:nth:code` or `name:nth:code:times`, comma separated: the nth call from now of that function, and the `times - 1` after it (0: all), return code; empty clears | none |
//! | `ignore` | `name` or `name@thread`, comma separated: every call of that function, or those by the threads of that name, does nothing and returns 0, as if the program had left it out; empty clears | none |
//! | `cost` | `name:us` or `name:us:us_per_mib`, comma separated: every call of that function takes so long, and so long for each MiB of its memory (registering, unregistering, allocating); a call that waits takes it after that, as waking up does; empty clears | none |
//! | `copy_delay_us` | every copy takes this much longer on its stream, whatever its size | 0 |
//! | `h2d_bytes_per_s` | all copies to a device share a link of this bandwidth, in real time; 0: memory speed | 0 |
//! | `move_bytes` | 0: copies to a device take their time and move nothing, so that, as with a real one, they cost the host no CPU time: for measuring rates | 1 |
//! | `refuse_register` | every host registration returns this code; 0: none | 0 |
//! | `register_limit` | bytes that can be registered; beyond it error 2 | none |
//! | `sticky` | `nth:code`: the nth copy from now breaks the context when it runs, and everything returns code; empty clears | none |
//! | `hang_copy` | the nth copy from now does not finish before `fakegpu_release_hang` | none |
//! | `strict` | 1: copies from or to unregistered host memory are a misuse | 0 |
//! | `on_misuse` | `record` or `abort` | record |
//! | `checksum` | 0: do not look for modified sources (for benchmarks) | 1 |
//! | `poison` | 0: leave fresh device memory zero instead of filling it with 0xA5 | 1 |
//! | `expect_devices` | bit mask of the devices on which a context may be made | all |
//! | `report` | file that gets the misuse log and the leaks when the process exits | none |

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::misuse::Reaction;

/// A failure waiting for its call.
#[derive(Debug, Clone, Copy)]
struct Failure {
    after: u64,
    code: i32,
    times: u64,
}

#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) devices: usize,
    pub(crate) memory: u64,
    pub(crate) integrated: bool,
    pub(crate) host_pointer: bool,
    pub(crate) copy_delay: Duration,
    pub(crate) h2d_bytes_per_s: u64,
    pub(crate) move_bytes: bool,
    pub(crate) refuse_register: i32,
    pub(crate) register_limit: u64,
    /// Absolute number of the copy that breaks the context, and the code from then on.
    pub(crate) sticky: Option<(u64, i32)>,
    /// Absolute number of the copy that hangs.
    pub(crate) hang_copy: Option<u64>,
    pub(crate) strict: bool,
    pub(crate) on_misuse: Reaction,
    pub(crate) checksum: bool,
    pub(crate) poison: bool,
    pub(crate) expect_devices: u64,
    pub(crate) report: Option<PathBuf>,
    failures: HashMap<String, Vec<Failure>>,
    /// Functions, each with the thread whose calls are ignored, unless all are.
    ignored: Vec<(String, Option<String>)>,
    /// Microseconds per call and per MiB, by function.
    costs: HashMap<String, (f64, f64)>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: 1,
            memory: 16 << 30,
            integrated: false,
            host_pointer: true,
            copy_delay: Duration::ZERO,
            h2d_bytes_per_s: 0,
            move_bytes: true,
            refuse_register: 0,
            register_limit: u64::MAX,
            sticky: None,
            hang_copy: None,
            strict: false,
            on_misuse: Reaction::Record,
            checksum: true,
            poison: true,
            expect_devices: u64::MAX,
            report: None,
            failures: HashMap::new(),
            ignored: Vec::new(),
            costs: HashMap::new(),
        }
    }
}

pub(crate) const KEYS: &[&str] = &[
    "devices",
    "memory",
    "integrated",
    "host_pointer",
    "fail",
    "ignore",
    "cost",
    "copy_delay_us",
    "h2d_bytes_per_s",
    "move_bytes",
    "refuse_register",
    "register_limit",
    "sticky",
    "hang_copy",
    "strict",
    "on_misuse",
    "checksum",
    "poison",
    "expect_devices",
    "report",
];

impl Settings {
    /// The defaults, overridden by the environment. A value that cannot be read ends the process: a test that does not
    /// inject the failure it believes in would prove nothing.
    pub(crate) fn from_environment() -> Self {
        let mut settings = Self::default();
        for key in KEYS {
            let variable = format!("FAKEGPU_{}", key.to_uppercase());
            if let Some(value) = std::env::var_os(&variable) {
                if settings.set(key, &value.to_string_lossy(), 0).is_none() {
                    eprintln!("fakegpu: {variable}={value:?} makes no sense");
                    std::process::abort();
                }
            }
        }
        settings
    }

    /// Sets one key; `copies` is the number of copies submitted so far. `None` if the key or value is not understood.
    pub(crate) fn set(&mut self, key: &str, value: &str, copies: u64) -> Option<()> {
        let number = || value.parse::<u64>().ok();
        let flag = || match value {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        };
        match key {
            "devices" => self.devices = number().filter(|n| *n <= 64)? as usize,
            "memory" => self.memory = number()?,
            "integrated" => self.integrated = flag()?,
            "host_pointer" => self.host_pointer = flag()?,
            "fail" => self.failures = parse_failures(value)?,
            "ignore" => self.ignored = parse_ignored(value),
            "cost" => self.costs = parse_costs(value)?,
            "copy_delay_us" => self.copy_delay = Duration::from_micros(number()?),
            "h2d_bytes_per_s" => self.h2d_bytes_per_s = number()?,
            "move_bytes" => self.move_bytes = flag()?,
            "refuse_register" => self.refuse_register = value.parse().ok()?,
            "register_limit" => self.register_limit = number()?,
            "sticky" if value.is_empty() => self.sticky = None,
            "sticky" => {
                let (nth, code) = value.split_once(':')?;
                self.sticky = Some((copies + nth.parse::<u64>().ok()?, code.parse().ok()?));
            }
            "hang_copy" if value.is_empty() => self.hang_copy = None,
            "hang_copy" => self.hang_copy = Some(copies + number()?),
            "strict" => self.strict = flag()?,
            "on_misuse" => {
                self.on_misuse = match value {
                    "record" => Reaction::Record,
                    "abort" => Reaction::Abort,
                    _ => return None,
                }
            }
            "checksum" => self.checksum = flag()?,
            "poison" => self.poison = flag()?,
            "expect_devices" => self.expect_devices = number()?,
            "report" => self.report = (!value.is_empty()).then(|| PathBuf::from(value)),
            _ => return None,
        }
        Some(())
    }

    /// How long a call of `function` takes if it registers, unregisters or allocates so many bytes.
    pub(crate) fn cost_of(&self, function: &str, bytes: u64) -> Duration {
        let Some((each, per_mib)) = self.costs.get(function) else { return Duration::ZERO };
        Duration::from_secs_f64((each + per_mib * bytes as f64 / (1 << 20) as f64) / 1e6)
    }

    /// Whether this thread's call of `function` does nothing.
    pub(crate) fn ignores(&self, function: &str) -> bool {
        let mut threads = self.ignored.iter().filter(|(name, _)| name == function).map(|(_, thread)| thread);
        threads.any(|thread| thread.as_ref().is_none_or(|name| *name == this_thread()))
    }

    /// Counts a call of `function`, and returns the code with which it must fail, if it must.
    pub(crate) fn failure_of(&mut self, function: &str) -> Option<i32> {
        let list = self.failures.get_mut(function)?;
        let mut code = None;
        for failure in list.iter_mut() {
            if failure.after > 1 {
                failure.after -= 1;
            } else {
                code = Some(failure.code);
                failure.times = failure.times.saturating_sub(1);
            }
        }
        list.retain(|f| f.times > 0);
        code
    }
}

/// The name of this thread. Threads of Rust that another library has started are nameless here, except to the kernel.
fn this_thread() -> String {
    let name = std::fs::read_to_string("/proc/thread-self/comm").expect("the kernel names each thread");
    name.trim_end().to_owned()
}

fn parse_ignored(value: &str) -> Vec<(String, Option<String>)> {
    let items = value.split(',').filter(|item| !item.is_empty());
    let parts = items.map(|item| item.split_once('@').map_or((item, None), |(name, thread)| (name, Some(thread))));
    // The kernel keeps 15 bytes of a name.
    parts.map(|(name, thread)| (name.to_owned(), thread.map(|thread| thread.chars().take(15).collect()))).collect()
}

fn parse_costs(value: &str) -> Option<HashMap<String, (f64, f64)>> {
    let mut costs = HashMap::new();
    for item in value.split(',').filter(|item| !item.is_empty()) {
        let parts: Vec<&str> = item.split(':').collect();
        let (name, each, per_mib) = match parts[..] {
            [name, each] => (name, each, "0"),
            [name, each, per_mib] => (name, each, per_mib),
            _ => return None,
        };
        let number = |text: &str| text.parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0);
        costs.insert(name.to_owned(), (number(each)?, number(per_mib)?));
    }
    Some(costs)
}

fn parse_failures(value: &str) -> Option<HashMap<String, Vec<Failure>>> {
    let mut failures: HashMap<String, Vec<Failure>> = HashMap::new();
    for item in value.split(',').filter(|item| !item.is_empty()) {
        let parts: Vec<&str> = item.split(':').collect();
        let (name, nth, code, times) = match parts[..] {
            [name, nth, code] => (name, nth, code, 1),
            [name, nth, code, times] => (name, nth, code, times.parse::<u64>().ok()?),
            _ => return None,
        };
        let times = if times == 0 { u64::MAX } else { times };
        let failure = Failure { after: nth.parse().ok().filter(|n| *n > 0)?, code: code.parse().ok()?, times };
        failures.entry(name.to_owned()).or_default().push(failure);
    }
    Some(failures)
}

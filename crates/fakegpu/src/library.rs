//! The cdylib, as Rust tests of other crates use it: found, loaded, and asked through its exported functions.

use std::ffi::{c_char, c_void, CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Path of the cdylib: `FAKEGPU_LIBRARY`, otherwise `libfakegpu.so` beside the running test (`target/<profile>/deps`)
/// or one or two folders above it.
///
/// # Errors
/// If there is none, a text that names the paths searched: build it with `cargo build -p fakegpu`.
pub fn library_path() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("FAKEGPU_LIBRARY") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(|cause| format!("cannot tell where this program is: {cause}"))?;
    let tried: Vec<PathBuf> = own.ancestors().skip(1).take(3).map(|dir| dir.join("libfakegpu.so")).collect();
    tried.iter().find(|path| path.exists()).cloned().ok_or_else(|| {
        format!("no libfakegpu.so ({tried:?}); build it with `cargo build -p fakegpu` or set FAKEGPU_LIBRARY")
    })
}

/// A copy of the cdylib, written to `into`, whose dynamic symbols lack `names`, like a driver that is too old to have
/// them. The loader finds a symbol by a hash of its name and then compares the names. So a name that is changed is not
/// found. The copy has its own state.
///
/// # Errors
/// The file system's error, or a name that the library does not export.
pub fn without(names: &[&str], into: &Path) -> Result<(), String> {
    let path = library_path()?;
    let mut bytes = std::fs::read(&path).map_err(|cause| format!("{}: {cause}", path.display()))?;
    for name in names {
        let entry = [b"\0", name.as_bytes(), b"\0"].concat();
        let places: Vec<usize> = (0..bytes.len() - entry.len()).filter(|&at| bytes[at..].starts_with(&entry)).collect();
        if places.is_empty() {
            return Err(format!("{} exports no {name}", path.display()));
        }
        places.iter().for_each(|at| bytes[at + 1] = b'-');
    }
    std::fs::write(into, bytes).map_err(|cause| format!("{}: {cause}", into.display()))
}

/// One test at a time, because the library's state belongs to the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The control interface of a loaded cdylib.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    handle: *mut c_void,
}

// SAFETY: the handle is only given to dlsym, and the library's functions take its lock.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// The library, reset, for one user at a time. Dereferences to [`Library`].
#[derive(Debug)]
pub struct Exclusive {
    library: Library,
    _lock: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Exclusive {
    type Target = Library;

    fn deref(&self) -> &Library {
        &self.library
    }
}

macro_rules! control {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            $(#[$doc])*
            pub fn $name(&self, $($arg: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                // SAFETY: the symbol has this signature: it is defined in `control.rs` of this very crate.
                unsafe { std::mem::transmute::<*mut c_void, Function>(self.symbol($symbol))($($arg),*) }
            }
        )*
    };
}

impl Library {
    /// Loads the cdylib that [`library_path`] finds.
    ///
    /// # Errors
    /// A text that says which paths were searched, or what `dlopen` said.
    pub fn open() -> Result<Self, String> {
        Self::open_at(&library_path()?)
    }

    /// Loads the cdylib at `path`. It stays loaded until the process ends.
    ///
    /// # Errors
    /// What `dlopen` said.
    pub fn open_at(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|cause| cause.to_string())?;
        // SAFETY: loading runs no code of the library.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror gives a C string or null.
            let said = unsafe { libc::dlerror() };
            let said = if said.is_null() {
                "no reason given".into()
            } else {
                // SAFETY: not null, and valid until this thread's next dl call.
                unsafe { CStr::from_ptr(said) }.to_string_lossy()
            };
            return Err(format!("cannot load {}: {said}", path.display()));
        }
        Ok(Self { path: path.to_owned(), handle })
    }

    /// Loads the library, waits for other tests of this process to finish with it, and resets it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn exclusive() -> Result<Exclusive, String> {
        let lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let library = Self::open()?;
        library.reset();
        Ok(Exclusive { library, _lock: lock })
    }

    /// The file, for penstock's setting of the GPU library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is that of a loaded library.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!address.is_null(), "{} has no {}", self.path.display(), name.to_string_lossy());
        address
    }

    control! {
        /// Ends hangs, waits for all work, forgets everything and reads the environment again. Returns the number of
        /// things that were leaked until then.
        reset = c"fakegpu_reset"() -> u64;
        /// How many misuses were found since the last reset or clear.
        misuse_count = c"fakegpu_misuse_count"() -> u64;
        /// Empties the misuse log.
        misuse_clear = c"fakegpu_misuse_clear"() -> ();
        /// Makes `len` bytes of the test's own memory device memory of `device`. Returns 0, or -1 if the memory
        /// overlaps other device memory or there is no such device.
        adopt = c"fakegpu_adopt"(start: u64, len: u64, device: i32) -> i32;
        /// Ends an adoption, once no work is queued anywhere (release a hanging copy first). 0 or -1.
        disown = c"fakegpu_disown"(start: u64) -> i32;
        /// A stream that belongs to the test (a framework's current stream): needs no context and is never a leak.
        /// 0 if there is no such device.
        stream_create = c"fakegpu_stream_create"(device: i32, non_blocking: i32) -> usize;
        /// Destroys a stream made by `stream_create`. 0 or -1.
        stream_destroy = c"fakegpu_stream_destroy"(stream: usize) -> i32;
        /// Queues a kernel that sets device memory to `byte` after `delay_us`. 0 or -1.
        launch_write = c"fakegpu_launch_write"(stream: usize, start: u64, len: u64, byte: u8, delay_us: u64) -> i32;
        /// Queues a kernel that reads device memory and logs `wrong-bytes` unless its FNV-1a hash is `expected`.
        launch_check = c"fakegpu_launch_check"(stream: usize, start: u64, len: u64, expected: u64, delay_us: u64) -> i32;
        /// Queues a kernel that copies device memory into the test's buffer at `out`.
        launch_copy_out = c"fakegpu_launch_copy_out"(stream: usize, start: u64, len: u64, out: u64, delay_us: u64) -> i32;
        /// Queues work that uses device memory for `delay_us` and does not change its bytes; it counts as a write.
        pending_use = c"fakegpu_pending_use"(stream: usize, start: u64, len: u64, delay_us: u64) -> i32;
        /// Reports that the host now reads (or writes) memory. Returns 1, with a misuse in the log, if queued work on
        /// the memory was never waited for; otherwise 0.
        host_access = c"fakegpu_host_access"(start: u64, len: u64, write: i32) -> i32;
        /// The host waits for a stream, as a framework's synchronize does. 0 or -1.
        stream_synchronize = c"fakegpu_stream_synchronize"(stream: usize, device: i32) -> i32;
        /// Waits until no work is queued or running. This orders nothing: it is only for looking at results.
        drain = c"fakegpu_drain"() -> ();
        /// Whether no work is queued or running: 1 or 0.
        is_idle = c"fakegpu_is_idle"() -> i32;
        /// Lets the copy that hangs run, and all copies submitted so far.
        release_hang = c"fakegpu_release_hang"() -> ();
    }

    /// Sets one of the settings listed in `inject.rs`.
    ///
    /// # Panics
    /// If the library does not understand it: a test whose failure is not injected would pass for nothing.
    pub fn configure(&self, key: &str, value: &str) {
        type Function = unsafe extern "C" fn(*const c_char, *const c_char) -> i32;
        let c = |text: &str| CString::new(text).expect("settings contain no NUL");
        // SAFETY: the symbol has this signature.
        let set = unsafe { std::mem::transmute::<*mut c_void, Function>(self.symbol(c"fakegpu_configure")) };
        // SAFETY: two C strings that live through the call.
        let done = unsafe { set(c(key).as_ptr(), c(value).as_ptr()) };
        assert_eq!(done, 0, "fakegpu does not understand {key}={value}");
    }

    /// The misuses found, a line `kind: what happened` each.
    pub fn misuses(&self) -> Vec<String> {
        self.lines(c"fakegpu_misuse_log")
    }

    /// What the program still holds: allocations, registrations, streams, events, retained contexts.
    pub fn leaks(&self) -> Vec<String> {
        self.lines(c"fakegpu_leaks")
    }

    /// A counter: `bytes_h2d`, `bytes_d2h`, `copies`, `device_bytes`, `peak_device_bytes`, `adopted_bytes`,
    /// `registered_bytes`, `peak_registered_bytes`, `contexts_made`, `contexts_retained`, `streams`, `events`, `pending`,
    /// `misuses`, or `calls.<function>`.
    ///
    /// # Panics
    /// If there is no such counter.
    pub fn counter(&self, name: &str) -> u64 {
        type Function = unsafe extern "C" fn(*const c_char) -> u64;
        // SAFETY: the symbol has this signature.
        let get = unsafe { std::mem::transmute::<*mut c_void, Function>(self.symbol(c"fakegpu_counter")) };
        let text = CString::new(name).expect("counter names contain no NUL");
        // SAFETY: a C string that lives through the call.
        let value = unsafe { get(text.as_ptr()) };
        assert_ne!(value, u64::MAX, "fakegpu has no counter {name}");
        value
    }

    /// FNV-1a of `bytes`, as [`launch_check`](Self::launch_check) expects it.
    pub fn fnv(bytes: &[u8]) -> u64 {
        crate::stream::fnv(bytes)
    }

    fn lines(&self, symbol: &CStr) -> Vec<String> {
        type Function = unsafe extern "C" fn(*mut u8, usize) -> usize;
        // SAFETY: the symbol has this signature.
        let get = unsafe { std::mem::transmute::<*mut c_void, Function>(self.symbol(symbol)) };
        let mut text = Vec::new();
        loop {
            // SAFETY: the buffer is valid for its length.
            let whole = unsafe { get(text.as_mut_ptr(), text.len()) };
            if whole <= text.len() {
                text.truncate(whole);
                return String::from_utf8_lossy(&text).lines().map(str::to_owned).collect();
            }
            text.resize(whole, 0);
        }
    }
}

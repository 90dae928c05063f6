//! The driver interfaces of CUDA and HIP, loaded when they are first asked for.
//!
//! Nothing is linked: `libcuda.so.1` comes with NVIDIA's driver, `libamdhip64.so.*` with ROCm, and a machine with
//! neither gives one ordinary error. The two interfaces differ only in names and in what is *current* on a thread (a
//! context or a device). So one table serves both, and [`Context`] hides the difference.
//!
//! Only the *primary* context of the requested device is used, because frameworks use that one. No context is made on
//! any other device. [`Current`] restores what was current on the caller's thread.
//!
//! Signatures: cuda.h of CUDA 12.0 to 13.2, hip_runtime_api.h of ROCm 6 and 7. In cuda.h, plain names stand for names
//! with `_v2`.

use crate::error::{Error, ErrorKind, Result};
use std::ffi::{c_char, c_void, CStr, CString, OsStr, OsString};
use std::marker::PhantomData;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, ptr};

/// Names another library instead of the driver's: a path, or `cuda:` or `hip:` and a path if the file has both
/// interfaces.
pub const LIBRARY_VARIABLE: &str = "PENSTOCK_GPU_LIBRARY";

/// Names under which drivers are searched, in this order, after those that the process has mapped already.
const SONAMES: [(Vendor, &str); 4] = [
    (Vendor::Cuda, "libcuda.so.1"),
    (Vendor::Hip, "libamdhip64.so.7"),
    (Vendor::Hip, "libamdhip64.so.6"),
    (Vendor::Hip, "libamdhip64.so"),
];

/// The interface of a library: one of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA's driver, `cu*`.
    Cuda,
    /// AMD's runtime, `hip*`.
    Hip,
}

/// A stream handle of the driver: `CUstream`, `hipStream_t`. 0 is the legacy default stream of the current context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Stream(pub usize);

/// An event handle of the driver: `CUevent`, `hipEvent_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DriverEvent(pub usize);

/// Properties of a device that can be queried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attribute {
    /// 1 if device and host share their memory.
    Integrated,
    /// How many copies can run beside kernels.
    CopyEngines,
}

impl Attribute {
    /// `CU_DEVICE_ATTRIBUTE_*` and `hipDeviceAttribute*` are numbered differently.
    fn number(self, vendor: Vendor) -> i32 {
        let (cuda, hip) = match self {
            Self::Integrated => (18, 16),
            Self::CopyEngines => (40, 2),
        };
        vendor.pick(cuda, hip)
    }
}

/// Rows of bytes to copy: `rows` times `width` bytes, with a separate distance on each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// First byte of the destination: a device address.
    pub to: u64,
    /// Bytes from row to row there.
    pub to_pitch: u64,
    /// First byte of the source.
    pub from: u64,
    /// Bytes from row to row there.
    pub from_pitch: u64,
    /// Bytes of each row.
    pub width: u64,
    /// How many rows.
    pub rows: u64,
}

impl Rows {
    /// The number of bytes, if both sides are one contiguous range.
    fn contiguous(&self) -> Option<u64> {
        let one = self.rows <= 1 || (self.to_pitch == self.width && self.from_pitch == self.width);
        one.then(|| self.width * self.rows)
    }
}

/// A code other than success, and the function that returned it.
#[derive(Debug, Clone, Copy)]
struct Failed {
    function: &'static str,
    code: i32,
}

/// Makes the tables from one list: a struct of pointers each, the code that fills it, and a method per function that
/// calls it and returns its code as a `Result`.
macro_rules! tables {
    (
        required { $($r:ident($($ra:ident: $rt:ty),*) = $rc:literal | $rh:literal;)* }
        optional { $($o:ident($($oa:ident: $ot:ty),*) = $oc:literal | $oh:literal;)* }
        cuda { $($c:ident($($ca:ident: $ct:ty),*) -> $cr:ty = $cc:literal;)* }
        hip { $($h:ident($($ha:ident: $ht:ty),*) -> $hr:ty = $hh:literal;)* }
    ) => {
        struct Required { $($r: unsafe extern "C" fn($($rt),*) -> i32,)* }
        struct Optional { $($o: Option<unsafe extern "C" fn($($ot),*) -> i32>,)* }
        struct Cuda { $($c: unsafe extern "C" fn($($ct),*) -> $cr,)* }
        struct Hip { $($h: unsafe extern "C" fn($($ht),*) -> $hr,)* }

        impl Required {
            fn load(library: &Library, vendor: Vendor) -> Result<Self, &'static str> {
                $(let $r = library.symbol(vendor.pick($rc, $rh));)*
                Ok(Self { $(
                    // SAFETY: the function of this name has this signature (cuda.h, hip_runtime_api.h).
                    $r: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($rt),*) -> i32>(
                            $r.ok_or(vendor.pick($rc, $rh))?,
                        )
                    },
                )* })
            }
        }

        impl Optional {
            fn load(library: &Library, vendor: Vendor) -> Self {
                Self { $(
                    // SAFETY: as above.
                    $o: library.symbol(vendor.pick($oc, $oh)).map(|f| unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ot),*) -> i32>(f)
                    }),
                )* }
            }
        }

        impl Cuda {
            fn load(library: &Library) -> Result<Self, &'static str> {
                Ok(Self { $(
                    // SAFETY: as above.
                    $c: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ct),*) -> $cr>(
                            library.symbol($cc).ok_or($cc)?,
                        )
                    },
                )* })
            }
        }

        impl Hip {
            fn load(library: &Library) -> Result<Self, &'static str> {
                Ok(Self { $(
                    // SAFETY: as above.
                    $h: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ht),*) -> $hr>(
                            library.symbol($hh).ok_or($hh)?,
                        )
                    },
                )* })
            }
        }

        /// The raw calls: the arguments are the driver's, with all requirements of the driver.
        #[allow(clippy::too_many_arguments)]
        impl Api {
            $(unsafe fn $r(&self, $($ra: $rt),*) -> Result<(), Failed> {
                // SAFETY: the caller's promise.
                let code = unsafe { (self.required.$r)($($ra),*) };
                if code == 0 { Ok(()) } else { Err(Failed { function: self.vendor.pick($rc, $rh), code }) }
            })*

            /// `None` if this driver does not have the function.
            $(unsafe fn $o(&self, $($oa: $ot),*) -> Option<Result<(), Failed>> {
                // SAFETY: the caller's promise.
                let code = unsafe { (self.optional.$o?)($($oa),*) };
                let failed = Failed { function: self.vendor.pick($oc, $oh), code };
                Some(if code == 0 { Ok(()) } else { Err(failed) })
            })*
        }
    };
}

// `CUdeviceptr` is an unsigned integer and HIP's a pointer; both are passed in the same register on x86-64 and aarch64.
tables! {
    required {
        raw_init(flags: u32) = "cuInit" | "hipInit";
        raw_driver_version(version: *mut i32) = "cuDriverGetVersion" | "hipDriverGetVersion";
        raw_device_count(count: *mut i32) = "cuDeviceGetCount" | "hipGetDeviceCount";
        raw_device(device: *mut i32, ordinal: i32) = "cuDeviceGet" | "hipDeviceGet";
        raw_device_name(name: *mut c_char, len: i32, device: i32) = "cuDeviceGetName" | "hipDeviceGetName";
        raw_attribute(value: *mut i32, attribute: i32, device: i32) = "cuDeviceGetAttribute" | "hipDeviceGetAttribute";
        raw_pci_bus_id(id: *mut c_char, len: i32, device: i32) = "cuDeviceGetPCIBusId" | "hipDeviceGetPCIBusId";
        raw_alloc(pointer: *mut u64, bytes: usize) = "cuMemAlloc_v2" | "hipMalloc";
        raw_free(pointer: u64) = "cuMemFree_v2" | "hipFree";
        raw_memory(free: *mut usize, total: *mut usize) = "cuMemGetInfo_v2" | "hipMemGetInfo";
        raw_register(pointer: *mut c_void, bytes: usize, flags: u32) = "cuMemHostRegister_v2" | "hipHostRegister";
        raw_unregister(pointer: *mut c_void) = "cuMemHostUnregister" | "hipHostUnregister";
        raw_to_device(to: u64, from: *const c_void, bytes: usize, stream: usize)
            = "cuMemcpyHtoDAsync_v2" | "hipMemcpyHtoDAsync";
        raw_to_host(to: *mut c_void, from: u64, bytes: usize, stream: usize)
            = "cuMemcpyDtoHAsync_v2" | "hipMemcpyDtoHAsync";
        raw_stream_create(stream: *mut usize, flags: u32) = "cuStreamCreate" | "hipStreamCreateWithFlags";
        raw_stream_destroy(stream: usize) = "cuStreamDestroy_v2" | "hipStreamDestroy";
        raw_stream_wait(stream: usize, event: usize, flags: u32) = "cuStreamWaitEvent" | "hipStreamWaitEvent";
        raw_stream_synchronize(stream: usize) = "cuStreamSynchronize" | "hipStreamSynchronize";
        raw_event_create(event: *mut usize, flags: u32) = "cuEventCreate" | "hipEventCreateWithFlags";
        raw_event_record(event: usize, stream: usize) = "cuEventRecord" | "hipEventRecord";
        raw_event_synchronize(event: usize) = "cuEventSynchronize" | "hipEventSynchronize";
        raw_event_destroy(event: usize) = "cuEventDestroy_v2" | "hipEventDestroy";
    }
    optional {
        raw_allocation(start: *mut u64, bytes: *mut usize, pointer: u64)
            = "cuMemGetAddressRange_v2" | "hipMemGetAddressRange";
        raw_capture_mode(mode: *mut i32) = "cuThreadExchangeStreamCaptureMode" | "hipThreadExchangeStreamCaptureMode";
        // The form of CUDA 12.8, which later drivers keep under this name beside `_v2`.
        raw_batch(
            to: *const u64,
            from: *const u64,
            bytes: *const usize,
            count: usize,
            attributes: *const CopyAttributes,
            first: *const usize,
            kinds: usize,
            failed_at: *mut usize,
            stream: usize
        ) = "cuMemcpyBatchAsync" | "hipMemcpyBatchAsync";
    }
    cuda {
        primary_retain(context: *mut usize, device: i32) -> i32 = "cuDevicePrimaryCtxRetain";
        primary_release(device: i32) -> i32 = "cuDevicePrimaryCtxRelease_v2";
        context_set(context: usize) -> i32 = "cuCtxSetCurrent";
        context_get(context: *mut usize) -> i32 = "cuCtxGetCurrent";
        copy_rows(copy: *const CudaMemcpy2d, stream: usize) -> i32 = "cuMemcpy2DAsync_v2";
        error_name(code: i32, name: *mut *const c_char) -> i32 = "cuGetErrorName";
        error_text(code: i32, text: *mut *const c_char) -> i32 = "cuGetErrorString";
    }
    hip {
        device_set(device: i32) -> i32 = "hipSetDevice";
        device_get(device: *mut i32) -> i32 = "hipGetDevice";
        // With plain arguments: the struct's memory types were renumbered between ROCm 5 and 6.
        copy_rows(
            to: u64,
            to_pitch: usize,
            from: u64,
            from_pitch: usize,
            width: usize,
            rows: usize,
            kind: i32,
            stream: usize
        ) -> i32 = "hipMemcpy2DAsync";
        error_name(code: i32) -> *const c_char = "hipGetErrorName";
        error_text(code: i32) -> *const c_char = "hipGetErrorString";
    }
}

/// `CUDA_MEMCPY2D_v2` of cuda.h.
#[repr(C)]
#[derive(Debug, Default)]
struct CudaMemcpy2d {
    from_x: usize,
    from_y: usize,
    from_type: u32,
    from_host: u64,
    from_device: u64,
    from_array: u64,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_type: u32,
    to_host: u64,
    to_device: u64,
    to_array: u64,
    to_pitch: usize,
    width: usize,
    height: usize,
}

/// `CUmemcpyAttributes` of cuda.h: the order in which the source is read, hints about both places, flags.
#[repr(C)]
#[derive(Debug)]
struct CopyAttributes {
    order: i32,
    from_place: [i32; 2],
    to_place: [i32; 2],
    flags: u32,
}

const _: () = assert!(size_of::<CudaMemcpy2d>() == 128 && size_of::<CopyAttributes>() == 24);

const MEMORY_TYPE_HOST: u32 = 1;
const MEMORY_TYPE_DEVICE: u32 = 2;
/// `hipMemcpyHostToDevice`.
const HIP_HOST_TO_DEVICE: i32 = 1;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: the source is read when the copy's turn in the stream comes.
const SOURCE_IN_STREAM_ORDER: i32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: captures of other threads forbid nothing to this thread.
const CAPTURE_RELAXED: i32 = 2;
/// `CU_STREAM_NON_BLOCKING`: not ordered with the legacy default stream.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: a waiting thread sleeps instead of spinning, and recording an
/// event writes no time stamp.
const EVENT_FLAGS: u32 = 1 | 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`: registered for every context, so that one slab ring serves several devices.
const REGISTER_PORTABLE: u32 = 1;
/// Largest distance of rows in one strided copy: every device so far gives this for `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: u64 = i32::MAX as u64;

/// Codes that mean the same in both interfaces.
const OUT_OF_MEMORY: i32 = 2;
const STUB_LIBRARY: i32 = 34;
const NO_DEVICE: i32 = 100;
/// A context that was destroyed, as `cudaDeviceReset` does with everybody's: the first when it is made current, the second
/// when it still is.
const INVALID_CONTEXT: i32 = 201;
const CONTEXT_IS_DESTROYED: i32 = 709;
const NOT_SUPPORTED: i32 = 801;
/// After these the context answers every call with the same code until the process ends (cuda.h). An uncorrectable memory
/// error (214), an illegal address, a launch that timed out, an assertion in a kernel (710), a hardware stack error (714),
/// an illegal instruction, a misaligned address, an address of the wrong space, an invalid program counter (718), a
/// failed launch.
const CONTEXT_LOST: [i32; 10] = [214, 700, 702, 710, 714, 715, 716, 717, 718, 719];

impl Vendor {
    fn pick<T>(self, cuda: T, hip: T) -> T {
        match self {
            Self::Cuda => cuda,
            Self::Hip => hip,
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.pick("CUDA", "HIP"))
    }
}

/// A shared library that stays loaded: drivers have threads of their own that outlive any owner here.
struct Library {
    handle: *mut c_void,
}

impl Library {
    /// Loads `name`, or with `RTLD_NOLOAD` finds it among the mapped libraries. The error is the loader's text.
    fn open(name: &OsStr, flags: i32) -> Result<Self, String> {
        let name = CString::new(name.as_bytes()).map_err(|cause| cause.to_string())?;
        // SAFETY: a C string. A driver's initialisers make no demands on the process.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | flags) };
        if !handle.is_null() {
            return Ok(Self { handle });
        }
        // SAFETY: gives null or a C string that is this thread's until its next call.
        let said = unsafe { libc::dlerror() };
        if said.is_null() {
            return Err("not loaded".to_owned());
        }
        // SAFETY: as above.
        Err(unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
    }

    fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: a live handle and a C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Driver libraries that the process has mapped, under any path: a framework's wheel may have its own.
fn mapped_drivers() -> Vec<(Vendor, OsString)> {
    unsafe extern "C" fn note(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> i32 {
        // SAFETY: the loader gives a valid entry, and `found` is the vector below.
        let (name, found) = unsafe { ((*info).dlpi_name, &mut *found.cast::<Vec<OsString>>()) };
        if !name.is_null() {
            // SAFETY: a C string of the loader.
            found.push(OsString::from_vec(unsafe { CStr::from_ptr(name) }.to_bytes().to_vec()));
        }
        0
    }
    let mut names: Vec<OsString> = Vec::new();
    // SAFETY: the callback matches, does not unwind, and the vector outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note), ptr::from_mut(&mut names).cast()) };
    let vendor = |path: &OsString| {
        let file = Path::new(path).file_name()?.to_string_lossy();
        // Not just `libcuda`: that would match the runtime, libcudart, too.
        let known = [(Vendor::Cuda, "libcuda.so"), (Vendor::Hip, "libamdhip64")];
        known.iter().find(|(_, prefix)| file.starts_with(prefix)).map(|(vendor, _)| *vendor)
    };
    let mut drivers: Vec<_> = names.into_iter().filter_map(|path| Some((vendor(&path)?, path))).collect();
    drivers.sort_by_key(|(vendor, _)| *vendor == Vendor::Hip);
    drivers
}

/// A driver: its functions, with their failures as errors.
///
/// Unless a method says otherwise, the context of the device must be current on the calling thread: see [`Context`].
pub struct Api {
    /// Differs from that of any other driver of this process; counts from 1.
    number: u64,
    vendor: Vendor,
    library: String,
    /// The loader's handle, the same under every path of one library.
    handle: usize,
    required: Required,
    optional: Optional,
    own: Own,
}

/// The functions that only one of the interfaces has.
enum Own {
    Cuda(Cuda),
    Hip(Hip),
}

/// The tables loaded so far, by name or path and vendor. A library has one table per vendor, under whichever of its names
/// it was asked for.
static LOADED: Mutex<Vec<(OsString, Arc<Api>)>> = Mutex::new(Vec::new());

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Api({} from {})", self.vendor, self.library)
    }
}

impl Api {
    /// The driver of this machine, or the one that [`LIBRARY_VARIABLE`] names. None of its functions is called yet.
    ///
    /// # Errors
    /// `Unsupported` if there is none, with everything that was tried.
    pub fn load() -> Result<Arc<Self>> {
        if let Some(named) = std::env::var_os(LIBRARY_VARIABLE).filter(|value| !value.is_empty()) {
            let bytes = named.as_bytes();
            let (vendor, path) = if let Some(path) = bytes.strip_prefix(b"cuda:") {
                (Some(Vendor::Cuda), path)
            } else if let Some(path) = bytes.strip_prefix(b"hip:") {
                (Some(Vendor::Hip), path)
            } else {
                (None, bytes)
            };
            return Self::load_from(OsStr::from_bytes(path), vendor);
        }
        let mut tried = Vec::new();
        for (vendor, path) in mapped_drivers() {
            match Self::load_one(&path, vendor, libc::RTLD_NOLOAD) {
                Ok(api) => return Ok(api),
                Err(why) => tried.push(format!("{}: {why}", path.to_string_lossy())),
            }
        }
        for (vendor, soname) in SONAMES {
            match Self::load_one(OsStr::new(soname), vendor, 0) {
                Ok(api) => return Ok(api),
                Err(why) => tried.push(why),
            }
        }
        Err(none_found(&tried))
    }

    /// The driver in the library at `path`, as `vendor`, or as the vendor whose functions it has.
    ///
    /// # Errors
    /// `Unsupported` if it cannot be loaded or lacks a function.
    pub fn load_from(path: impl AsRef<OsStr>, vendor: Option<Vendor>) -> Result<Arc<Self>> {
        let mut tried = Vec::new();
        for candidate in [Vendor::Cuda, Vendor::Hip] {
            if vendor.is_none_or(|wanted| wanted == candidate) {
                match Self::load_one(path.as_ref(), candidate, 0) {
                    Ok(api) => return Ok(api),
                    Err(why) => tried.push(why),
                }
            }
        }
        tried.dedup();
        Err(none_found(&tried))
    }

    fn load_one(name: &OsStr, vendor: Vendor, flags: i32) -> Result<Arc<Self>, String> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, api)) = loaded.iter().find(|(known, api)| known == name && api.vendor == vendor) {
            return Ok(Arc::clone(api));
        }
        let library = Library::open(name, flags)?;
        let handle = library.handle as usize;
        // Two tables would be two drivers to this module: two contexts retained, and every slab registered twice
        let same = loaded.iter().find(|(_, api)| api.handle == handle && api.vendor == vendor);
        if let Some(api) = same.map(|(_, api)| Arc::clone(api)) {
            loaded.push((name.to_owned(), Arc::clone(&api)));
            return Ok(api);
        }
        let named = name.to_string_lossy().into_owned();
        let lacks = |symbol| format!("{named} has no {symbol}, so it is no usable {vendor} driver");
        let required = Required::load(&library, vendor).map_err(lacks)?;
        let optional = Optional::load(&library, vendor);
        let own = match vendor {
            Vendor::Cuda => Own::Cuda(Cuda::load(&library).map_err(lacks)?),
            Vendor::Hip => Own::Hip(Hip::load(&library).map_err(lacks)?),
        };
        let api =
            Arc::new(Self { number: loaded.len() as u64 + 1, vendor, library: named, handle, required, optional, own });
        loaded.push((name.to_owned(), Arc::clone(&api)));
        Ok(api)
    }

    /// The number of this driver among the drivers of this process, from 1.
    pub fn driver_number(&self) -> u64 {
        self.number
    }

    /// The interface.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// The library's name or path, as it was loaded.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// The error for a code, with the driver's own name and text for it. `doing` reads like "allocate 12 bytes".
    fn error(&self, failed: Failed, doing: impl fmt::Display) -> Error {
        let Failed { function, code } = failed;
        let (name, text) = self.describe(code);
        let (kind, advice) = match code {
            OUT_OF_MEMORY => (ErrorKind::OutOfMemory, ""),
            NOT_SUPPORTED => (ErrorKind::Unsupported, ""),
            NO_DEVICE => (ErrorKind::Unsupported, "; the driver is installed, but it shows no device to this process"),
            STUB_LIBRARY => (ErrorKind::Unsupported, "; this is the toolkit's stub, not a driver"),
            c if CONTEXT_LOST.contains(&c) => {
                (ErrorKind::Device, "; this process has lost the device and must be restarted")
            }
            INVALID_CONTEXT | CONTEXT_IS_DESTROYED => (
                ErrorKind::Device,
                "; other code of this process has reset the device: let go of the tensors on it, call \
                 penstock.release_staging(), and load again",
            ),
            _ => (ErrorKind::Device, ""),
        };
        Error::new(kind, format!("cannot {doing}: {function} gave {name} ({code}), {text}{advice}"))
    }

    fn describe(&self, code: i32) -> (String, String) {
        let (mut name, mut text) = (ptr::null(), ptr::null());
        // SAFETY: valid out parameters; both interfaces take any code. CUDA leaves null for one that it does not know.
        unsafe {
            match &self.own {
                Own::Cuda(cuda) => {
                    (cuda.error_name)(code, &mut name);
                    (cuda.error_text)(code, &mut text);
                }
                Own::Hip(hip) => {
                    name = (hip.error_name)(code);
                    text = (hip.error_text)(code);
                }
            }
        }
        let read = |at: *const c_char, otherwise: &str| {
            if at.is_null() {
                return otherwise.to_owned();
            }
            // SAFETY: a C string that the driver never frees.
            unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
        };
        (read(name, "an unknown error"), read(text, "no description"))
    }

    /// Starts the driver; needs no context, and may be called again.
    ///
    /// # Errors
    /// `Unsupported` if it sees no device, `Device` if it does not start.
    pub fn init(&self) -> Result<()> {
        // SAFETY: takes no pointers.
        unsafe { self.raw_init(0) }.map_err(|f| self.error(f, format_args!("start the {} driver", self.vendor)))
    }

    /// The driver's version: 1000 x major + 10 x minor of the CUDA interface that it offers; HIP counts in its own way.
    /// Needs no context.
    ///
    /// # Errors
    /// `Device`.
    pub fn driver_version(&self) -> Result<i32> {
        self.number("ask for the driver's version", |out| {
            // SAFETY: a valid out parameter.
            unsafe { self.raw_driver_version(out) }
        })
    }

    /// How many devices there are. Needs no context, only [`init`](Self::init).
    ///
    /// # Errors
    /// `Device`.
    pub fn device_count(&self) -> Result<i32> {
        self.number("count the devices", |out| {
            // SAFETY: a valid out parameter.
            unsafe { self.raw_device_count(out) }
        })
    }

    fn number(&self, doing: impl fmt::Display, ask: impl FnOnce(*mut i32) -> Result<(), Failed>) -> Result<i32> {
        let mut value = 0;
        ask(&mut value).map_err(|f| self.error(f, doing))?;
        Ok(value)
    }

    /// The driver's handle of a device. Needs no context.
    ///
    /// # Errors
    /// `Device` if there is no such device.
    pub fn device(&self, ordinal: i32) -> Result<i32> {
        self.number(format_args!("use device {ordinal}"), |out| {
            // SAFETY: a valid out parameter.
            unsafe { self.raw_device(out, ordinal) }
        })
    }

    /// The product name of a device. Needs no context.
    ///
    /// # Errors
    /// `Device` if there is no such device.
    pub fn device_name(&self, ordinal: i32) -> Result<String> {
        let device = self.device(ordinal)?;
        self.text(format_args!("ask device {ordinal} for its name"), |at, len| {
            // SAFETY: `at` is valid for `len` bytes.
            unsafe { self.raw_device_name(at, len, device) }
        })
    }

    /// The PCI address of a device, like `0000:17:00.0`, as sysfs has it (letters may differ in case). Needs no
    /// context.
    ///
    /// # Errors
    /// `Device` if there is no such device.
    pub fn pci_bus_id(&self, ordinal: i32) -> Result<String> {
        let device = self.device(ordinal)?;
        self.text(format_args!("ask device {ordinal} for its PCI address"), |at, len| {
            // SAFETY: `at` is valid for `len` bytes.
            unsafe { self.raw_pci_bus_id(at, len, device) }
        })
    }

    fn text(
        &self,
        doing: impl fmt::Display,
        ask: impl FnOnce(*mut c_char, i32) -> Result<(), Failed>,
    ) -> Result<String> {
        let mut text = [0u8; 256];
        // One byte less than the buffer has: the last byte stays zero whatever the driver does.
        ask(text.as_mut_ptr().cast(), text.len() as i32 - 1).map_err(|f| self.error(f, doing))?;
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    /// A property of a device. Needs no context.
    ///
    /// # Errors
    /// `Device` if there is no such device, or the driver does not know the property.
    pub fn attribute(&self, ordinal: i32, attribute: Attribute) -> Result<i32> {
        let device = self.device(ordinal)?;
        self.number(format_args!("ask device {ordinal} for {attribute:?}"), |out| {
            // SAFETY: a valid out parameter.
            unsafe { self.raw_attribute(out, attribute.number(self.vendor), device) }
        })
    }

    /// The primary context of a device, made if it does not exist, for as long as the value lives.
    ///
    /// # Errors
    /// `Device` if there is no such device, `OutOfMemory` or `Device` if its context cannot be made.
    pub fn context(self: &Arc<Self>, ordinal: i32) -> Result<Context> {
        let device = self.device(ordinal)?;
        let mut handle = device as usize;
        if let Own::Cuda(cuda) = &self.own {
            // SAFETY: a valid out parameter and a device of this driver.
            let code = unsafe { (cuda.primary_retain)(&mut handle, device) };
            self.check("cuDevicePrimaryCtxRetain", code)
                .map_err(|f| self.error(f, format_args!("make the context of device {ordinal}")))?;
        }
        Ok(Context { api: Arc::clone(self), ordinal, device, handle })
    }

    /// The context that is current on this thread, or the device (HIP).
    fn current(&self) -> Result<usize, Failed> {
        match &self.own {
            Own::Cuda(cuda) => {
                let mut current = 0;
                // SAFETY: a valid out parameter.
                self.check("cuCtxGetCurrent", unsafe { (cuda.context_get)(&mut current) }).map(|()| current)
            }
            Own::Hip(hip) => {
                let mut current = 0;
                // SAFETY: as above.
                self.check("hipGetDevice", unsafe { (hip.device_get)(&mut current) }).map(|()| current as usize)
            }
        }
    }

    /// Makes it current: a context that is retained, or was current a moment ago.
    fn make_current(&self, it: usize) -> Result<(), Failed> {
        match &self.own {
            // SAFETY: takes no pointers. The driver knows its contexts, and refuses others.
            Own::Cuda(cuda) => self.check("cuCtxSetCurrent", unsafe { (cuda.context_set)(it) }),
            // SAFETY: takes no pointers.
            Own::Hip(hip) => self.check("hipSetDevice", unsafe { (hip.device_set)(it as i32) }),
        }
    }

    fn check(&self, function: &'static str, code: i32) -> Result<(), Failed> {
        if code == 0 {
            Ok(())
        } else {
            Err(Failed { function, code })
        }
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// `OutOfMemory`, `Device`.
    pub fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut pointer = 0;
        // SAFETY: a valid out parameter.
        unsafe { self.raw_alloc(&mut pointer, bytes) }
            .map_err(|f| self.error(f, format_args!("allocate {bytes} bytes of device memory")))?;
        Ok(pointer)
    }

    /// Frees device memory.
    ///
    /// # Safety
    /// `pointer` is from [`alloc`](Self::alloc), is freed once, and everything queued on it has completed.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn free(&self, pointer: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_free(pointer) }.map_err(|f| self.error(f, format_args!("free device memory {pointer:#x}")))
    }

    /// Free and total bytes of memory of the current device.
    ///
    /// # Errors
    /// `Device`.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out parameters.
        unsafe { self.raw_memory(&mut free, &mut total) }
            .map_err(|f| self.error(f, "ask how much device memory is free"))?;
        Ok((free, total))
    }

    /// Registers host memory for all devices of the driver, so that copies from it are asynchronous and run at the full
    /// rate of the link.
    ///
    /// # Safety
    /// The range is mapped, and stays so until it is unregistered.
    ///
    /// # Errors
    /// `OutOfMemory` (also where a memory limit forbids it), `Unsupported`, `Device`.
    pub unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_register(start.cast(), bytes, REGISTER_PORTABLE) }
            .map_err(|f| self.error(f, format_args!("register {bytes} bytes of host memory")))
    }

    /// Ends a registration.
    ///
    /// # Safety
    /// `start` was given to [`register`](Self::register), and everything queued from or to the range has completed.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn unregister(&self, start: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_unregister(start.cast()) }
            .map_err(|f| self.error(f, format_args!("unregister the host memory at {start:p}")))
    }

    /// The allocation that a device address lies in; `None` if the driver cannot tell.
    pub fn allocation(&self, pointer: u64) -> Option<Range<u64>> {
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: valid out parameters; the driver looks the address up and does not follow it.
        let asked = unsafe { self.raw_allocation(&mut start, &mut bytes, pointer) };
        matches!(asked, Some(Ok(()))).then(|| start..start + bytes as u64)
    }

    /// Queues a copy of contiguous bytes to the device.
    ///
    /// # Safety
    /// Both ranges are valid, and until the copy has completed they stay so and the source is not written.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn copy_to_device(&self, to: u64, from: *const u8, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_to_device(to, from.cast(), bytes, stream.0) }
            .map_err(|f| self.error(f, format_args!("copy {bytes} bytes to device memory {to:#x}")))
    }

    /// Queues a copy of contiguous bytes to the host.
    ///
    /// # Safety
    /// Both ranges are valid, and until the copy has completed they stay so and nobody else touches the destination.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_to_host(to.cast(), from, bytes, stream.0) }
            .map_err(|f| self.error(f, format_args!("copy {bytes} bytes from device memory {from:#x}")))
    }

    /// Queues a copy of rows to the device, in one call where the driver can.
    ///
    /// # Safety
    /// As [`copy_to_device`](Self::copy_to_device), for every row.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn copy_rows_to_device(&self, rows: Rows, stream: Stream) -> Result<()> {
        let range = |to: u64, from: u64, bytes: u64| {
            // SAFETY: the caller's promise, for a part of the rows.
            unsafe { self.copy_to_device(to, from as *const u8, bytes as usize, stream) }
        };
        if let Some(bytes) = rows.contiguous() {
            return range(rows.to, rows.from, bytes);
        }
        if rows.to_pitch.max(rows.from_pitch) > MAX_PITCH {
            return (0..rows.rows)
                .try_for_each(|i| range(rows.to + i * rows.to_pitch, rows.from + i * rows.from_pitch, rows.width));
        }
        let Rows { to, from, .. } = rows;
        let (to_pitch, from_pitch) = (rows.to_pitch as usize, rows.from_pitch as usize);
        let (width, height) = (rows.width as usize, rows.rows as usize);
        let done = match &self.own {
            Own::Cuda(cuda) => {
                let (from_type, to_type) = (MEMORY_TYPE_HOST, MEMORY_TYPE_DEVICE);
                let places = CudaMemcpy2d { from_type, from_host: from, to_type, to_device: to, ..Default::default() };
                let copy = CudaMemcpy2d { from_pitch, to_pitch, width, height, ..places };
                // SAFETY: the driver reads the description before it returns; the caller's promise for the bytes.
                self.check("cuMemcpy2DAsync_v2", unsafe { (cuda.copy_rows)(&copy, stream.0) })
            }
            Own::Hip(hip) => {
                let kind = HIP_HOST_TO_DEVICE;
                // SAFETY: the caller's promise.
                let code = unsafe { (hip.copy_rows)(to, to_pitch, from, from_pitch, width, height, kind, stream.0) };
                self.check("hipMemcpy2DAsync", code)
            }
        };
        done.map_err(|f| self.error(f, format_args!("copy {height} rows of {width} bytes from {from:#x} to {to:#x}")))
    }

    /// Queues many contiguous copies to the device at once: `to[i]` gets `bytes[i]` bytes from the host address
    /// `from[i]`. Returns `false`, with nothing queued, if the driver has no such function (CUDA before 12.8), refuses
    /// this stream (the legacy default one), or is slower with it than without (HIP: ROCm/clr issue 273).
    ///
    /// # Safety
    /// As [`copy_to_device`](Self::copy_to_device) for every copy, and no two overlap: their order is not defined.
    ///
    /// # Errors
    /// `Device`; `Internal` if the lists differ in length. Some of the copies may then have been queued.
    pub unsafe fn copy_batch_to_device(
        &self,
        to: &[u64],
        from: &[u64],
        bytes: &[usize],
        stream: Stream,
    ) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_batch(to, from, bytes, stream, "to the device") }
    }

    /// Queues many contiguous copies to the host at once, like [`copy_batch_to_device`](Self::copy_batch_to_device) in
    /// the other direction: the host address `to[i]` gets `bytes[i]` bytes from `from[i]`.
    ///
    /// # Safety
    /// As [`copy_to_host`](Self::copy_to_host) for every copy, and no two overlap: their order is not defined.
    ///
    /// # Errors
    /// As [`copy_batch_to_device`](Self::copy_batch_to_device).
    pub unsafe fn copy_batch_to_host(&self, to: &[u64], from: &[u64], bytes: &[usize], stream: Stream) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_batch(to, from, bytes, stream, "to the host") }
    }

    /// The driver derives the direction of each copy from its addresses.
    unsafe fn copy_batch(
        &self,
        to: &[u64],
        from: &[u64],
        bytes: &[usize],
        stream: Stream,
        way: &'static str,
    ) -> Result<bool> {
        if to.len() != from.len() || to.len() != bytes.len() {
            return Err(Error::new(ErrorKind::Internal, "a batch of copies whose lists differ in length"));
        }
        if self.vendor == Vendor::Hip || stream.0 <= 1 || to.is_empty() {
            return Ok(to.is_empty());
        }
        let order = CopyAttributes { order: SOURCE_IN_STREAM_ORDER, from_place: [0; 2], to_place: [0; 2], flags: 0 };
        let (first, mut failed_at) = (0, 0);
        // SAFETY: the lists are equally long and are read before the driver returns; the caller's promise for the bytes.
        let done = unsafe {
            let (to, from, sizes, count) = (to.as_ptr(), from.as_ptr(), bytes.as_ptr(), to.len());
            self.raw_batch(to, from, sizes, count, &order, &first, 1, &mut failed_at, stream.0)
        };
        let done = done
            .transpose()
            .map_err(|f| self.error(f, format_args!("copy {} ranges {way} (the culprit is {failed_at})", to.len())))?;
        Ok(done.is_some())
    }

    /// A new stream that is not ordered with the legacy default one.
    ///
    /// # Errors
    /// `OutOfMemory`, `Device`.
    pub fn create_stream(&self) -> Result<Stream> {
        let mut stream = 0;
        // SAFETY: a valid out parameter.
        unsafe { self.raw_stream_create(&mut stream, STREAM_NON_BLOCKING) }
            .map_err(|f| self.error(f, "make a stream"))?;
        Ok(Stream(stream))
    }

    /// Gives a stream back; what is queued on it still runs.
    ///
    /// # Safety
    /// The stream is from [`create_stream`](Self::create_stream) and is not used afterwards.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_stream_destroy(stream.0) }.map_err(|f| self.error(f, "give a stream back"))
    }

    /// Makes all work that is queued on `stream` from now on wait for the last recording of `event`. Does not block.
    ///
    /// # Safety
    /// Both are live handles.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn stream_wait(&self, stream: Stream, event: DriverEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_stream_wait(stream.0, event.0, 0) }
            .map_err(|f| self.error(f, "make a stream wait for an event"))
    }

    /// Blocks until everything queued on `stream` has run.
    ///
    /// # Safety
    /// A live handle.
    ///
    /// # Errors
    /// `Device`, also for errors in anything queued before.
    pub unsafe fn synchronize_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_stream_synchronize(stream.0) }.map_err(|f| self.error(f, "wait for a stream"))
    }

    /// Sets how captures of other threads affect this thread, and returns the previous setting; `None` if the driver
    /// cannot do that. Needs no context.
    fn exchange_capture_mode(&self, mut mode: i32) -> Option<i32> {
        // SAFETY: a valid parameter for both ways.
        let exchanged = unsafe { self.raw_capture_mode(&mut mode) };
        // It fails only for a mode that it does not know, and then nothing has changed.
        matches!(exchanged, Some(Ok(()))).then_some(mode)
    }

    /// A new event of the current device, without a time stamp; waiting for it sleeps.
    ///
    /// # Errors
    /// `OutOfMemory`, `Device`.
    pub fn create_event(&self) -> Result<DriverEvent> {
        let mut event = 0;
        // SAFETY: a valid out parameter.
        unsafe { self.raw_event_create(&mut event, EVENT_FLAGS) }.map_err(|f| self.error(f, "make an event"))?;
        Ok(DriverEvent(event))
    }

    /// Records `event` after everything that is queued on `stream` so far.
    ///
    /// # Safety
    /// Both are live handles of one device.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn record(&self, event: DriverEvent, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_event_record(event.0, stream.0) }.map_err(|f| self.error(f, "record an event"))
    }

    /// Blocks until everything before the event has run.
    ///
    /// # Safety
    /// A live handle.
    ///
    /// # Errors
    /// `Device`, also for errors in anything queued before.
    pub unsafe fn synchronize_event(&self, event: DriverEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_event_synchronize(event.0) }.map_err(|f| self.error(f, "wait for an event"))
    }

    /// Gives an event back. A thread that waits for it already continues to wait.
    ///
    /// # Safety
    /// The event is from [`create_event`](Self::create_event) and is not used afterwards.
    ///
    /// # Errors
    /// `Device`.
    pub unsafe fn destroy_event(&self, event: DriverEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw_event_destroy(event.0) }.map_err(|f| self.error(f, "give an event back"))
    }
}

fn none_found(tried: &[String]) -> Error {
    let text = format!(
        "no GPU driver: {}. Load to the CPU, install the driver, or name its library in {LIBRARY_VARIABLE}",
        tried.join("; ")
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// The primary context of one device, kept for as long as this lives.
///
/// HIP has no contexts to keep: there, the device itself is made current.
#[derive(Debug)]
pub struct Context {
    api: Arc<Api>,
    ordinal: i32,
    device: i32,
    /// As it is made current: the context, or the device (HIP).
    handle: usize,
}

impl Context {
    /// The driver it belongs to.
    pub fn api(&self) -> &Arc<Api> {
        &self.api
    }

    /// The device's number.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Makes the device current on this thread until the guard is dropped. Then the previous one is current again.
    ///
    /// # Errors
    /// `Device`.
    pub fn enter(&self) -> Result<Current<'_>> {
        let entered = self.api.current().and_then(|before| match before == self.handle {
            true => Ok(None),
            false => self.api.make_current(self.handle).map(|()| Some(before)),
        });
        let before = entered.map_err(|f| self.api.error(f, format_args!("make device {} current", self.ordinal)))?;
        let capture_mode = self.api.exchange_capture_mode(CAPTURE_RELAXED);
        Ok(Current { context: self, before, capture_mode, this_thread: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Own::Cuda(cuda) = &self.api.own {
            // A failure means that the driver is gone (the process ends) or that the context is lost. In both cases
            // nothing is kept.
            // SAFETY: retained once by `Api::context`, released once here.
            unsafe { (cuda.primary_release)(self.device) };
        }
    }
}

/// A device is current on this thread while this lives.
///
/// Meanwhile the thread's capture mode for CUDA graphs is *relaxed*. Otherwise, while any thread captures in global
/// mode (torch's default), the driver would refuse this thread to allocate, register and wait, and would invalidate
/// that capture. Nothing here touches a stream that is being captured, so this does no harm.
#[derive(Debug)]
#[must_use = "the device is current only while this lives"]
pub struct Current<'a> {
    context: &'a Context,
    /// The context or device to make current again; `None` if it is the same.
    before: Option<usize>,
    /// The thread's previous capture mode; `None` if the driver has no such modes.
    capture_mode: Option<i32>,
    /// Being current is a property of the thread.
    this_thread: PhantomData<*const ()>,
}

impl std::ops::Deref for Current<'_> {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.context.api
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.capture_mode {
            self.context.api.exchange_capture_mode(mode);
        }
        let Some(before) = self.before else { return };
        // It was current a moment ago, so restoring it fails only if its owner destroyed it meanwhile. Then there is
        // nothing to restore.
        let _restored = self.context.api.make_current(before);
    }
}

#[cfg(test)]
mod tests;

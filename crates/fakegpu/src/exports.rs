//! The functions that differ only in name between `libcuda.so.1` and `libamdhip64.so`. `CUdeviceptr` is an integer and
//! HIP's a pointer, which are passed alike on every 64-bit platform. Contexts, streams and events are opaque words.

#![allow(non_snake_case)]

use crate::codes::Vendor;
use crate::driver;
use crate::state::call;

macro_rules! export {
    ($($cuda:ident | $hip:ident ($($arg:ident: $type:ty),*) = $function:ident;)*) => {
        $(
            #[no_mangle]
            pub(crate) extern "C" fn $cuda($($arg: $type),*) -> i32 {
                call(Vendor::Cuda, stringify!($cuda), |call| driver::$function(call, $($arg),*))
            }

            #[no_mangle]
            pub(crate) extern "C" fn $hip($($arg: $type),*) -> i32 {
                call(Vendor::Hip, stringify!($hip), |call| driver::$function(call, $($arg),*))
            }
        )*
    };
}

export! {
    cuInit | hipInit(flags: u32) = init;
    cuDriverGetVersion | hipDriverGetVersion(version: *mut i32) = driver_version;
    cuDeviceGetCount | hipGetDeviceCount(count: *mut i32) = device_count;
    cuDeviceGet | hipDeviceGet(device: *mut i32, ordinal: i32) = device_get;
    cuDeviceGetName | hipDeviceGetName(name: *mut libc::c_char, len: i32, device: i32) = device_name;
    cuDeviceGetPCIBusId | hipDeviceGetPCIBusId(id: *mut libc::c_char, len: i32, device: i32) = pci_bus_id;
    cuDeviceGetAttribute | hipDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) = attribute;
    cuDevicePrimaryCtxRetain | hipDevicePrimaryCtxRetain(context: *mut usize, device: i32) = primary_retain;
    cuDevicePrimaryCtxRelease_v2 | hipDevicePrimaryCtxRelease(device: i32) = primary_release;
    cuDevicePrimaryCtxGetState | hipDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32)
        = primary_state;
    cuCtxSetCurrent | hipCtxSetCurrent(context: usize) = context_set;
    cuCtxGetCurrent | hipCtxGetCurrent(context: *mut usize) = context_get;
    cuMemAlloc_v2 | hipMalloc(pointer: *mut u64, bytes: usize) = alloc;
    cuMemFree_v2 | hipFree(pointer: u64) = free;
    cuMemGetInfo_v2 | hipMemGetInfo(free: *mut usize, total: *mut usize) = memory_info;
    cuMemHostRegister_v2 | hipHostRegister(pointer: u64, bytes: usize, flags: u32) = host_register;
    cuMemHostUnregister | hipHostUnregister(pointer: u64) = host_unregister;
    cuMemHostGetDevicePointer_v2 | hipHostGetDevicePointer(device: *mut u64, pointer: u64, flags: u32)
        = host_device_pointer;
    cuMemGetAddressRange_v2 | hipMemGetAddressRange(start: *mut u64, bytes: *mut usize, pointer: u64) = address_range;
    cuMemcpyHtoDAsync_v2 | hipMemcpyHtoDAsync(to: u64, from: u64, bytes: usize, stream: usize) = copy_to_device;
    cuMemcpyDtoHAsync_v2 | hipMemcpyDtoHAsync(to: u64, from: u64, bytes: usize, stream: usize) = copy_to_host;
    cuStreamCreate | hipStreamCreateWithFlags(stream: *mut usize, flags: u32) = stream_create;
    cuStreamDestroy_v2 | hipStreamDestroy(stream: usize) = stream_destroy;
    cuStreamWaitEvent | hipStreamWaitEvent(stream: usize, event: usize, flags: u32) = stream_wait_event;
    cuStreamSynchronize | hipStreamSynchronize(stream: usize) = stream_synchronize;
    cuStreamIsCapturing | hipStreamIsCapturing(stream: usize, status: *mut i32) = stream_is_capturing;
    cuStreamGetCaptureInfo | hipStreamGetCaptureInfo(stream: usize, status: *mut i32, id: *mut u64)
        = stream_capture_info;
    cuStreamBeginCapture_v2 | hipStreamBeginCapture(stream: usize, mode: i32) = capture_begin;
    cuStreamEndCapture | hipStreamEndCapture(stream: usize, graph: *mut usize) = capture_end;
    cuThreadExchangeStreamCaptureMode | hipThreadExchangeStreamCaptureMode(mode: *mut i32) = capture_mode;
    cuEventCreate | hipEventCreateWithFlags(event: *mut usize, flags: u32) = event_create;
    cuEventRecord | hipEventRecord(event: usize, stream: usize) = event_record;
    cuEventQuery | hipEventQuery(event: usize) = event_query;
    cuEventSynchronize | hipEventSynchronize(event: usize) = event_synchronize;
    cuEventDestroy_v2 | hipEventDestroy(event: usize) = event_destroy;
}

macro_rules! export_batch {
    ($($name:ident, $vendor:expr;)*) => {
        $(
            /// # Safety
            /// The arrays hold as many elements as the counts beside them say.
            #[no_mangle]
            pub(crate) unsafe extern "C" fn $name(
                to: *const u64,
                from: *const u64,
                sizes: *const usize,
                count: usize,
                attributes: *const driver::Attributes,
                indices: *const usize,
                kinds: usize,
                failed_at: *mut usize,
                stream: usize,
            ) -> i32 {
                call($vendor, stringify!($name), |call| {
                    // SAFETY: the caller's promise.
                    let done = unsafe {
                        driver::copy_batch(call, (to, from, sizes), count, (attributes, indices, kinds), stream)
                    };
                    if done.is_err() && !failed_at.is_null() {
                        // SAFETY: an out parameter of the driver. The real one says usize::MAX when no single copy is
                        // to blame.
                        unsafe { failed_at.write(usize::MAX) };
                    }
                    done
                })
            }
        )*
    };
}

export_batch! {
    cuMemcpyBatchAsync, Vendor::Cuda;
    hipMemcpyBatchAsync, Vendor::Hip;
}

//! The result codes that CUDA's and HIP's driver interfaces share, with the texts that the real libraries give.

use std::ffi::CStr;

pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const NO_DEVICE: i32 = 100;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ALREADY_REGISTERED: i32 = 712;
pub(crate) const NOT_REGISTERED: i32 = 713;
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
pub(crate) const CAPTURE_INVALIDATED: i32 = 901;

/// Which of the two interfaces a call came through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vendor {
    Cuda,
    Hip,
}

type Row = (i32, &'static CStr, &'static CStr, &'static CStr);

const TEXTS: &[Row] = &[
    (0, c"CUDA_SUCCESS", c"hipSuccess", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"hipErrorInvalidValue", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"hipErrorOutOfMemory", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"hipErrorNotInitialized", c"initialization error"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"hipErrorNoDevice", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"hipErrorInvalidDevice", c"invalid device ordinal"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"hipErrorInvalidContext", c"invalid device context"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"hipErrorECCNotCorrectable", c"uncorrectable ECC error encountered"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"hipErrorOperatingSystem", c"OS call failed or operation not supported"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"hipErrorInvalidHandle", c"invalid resource handle"),
    (600, c"CUDA_ERROR_NOT_READY", c"hipErrorNotReady", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"hipErrorIllegalAddress", c"an illegal memory access was encountered"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"hipErrorLaunchTimeOut", c"the launch timed out and was terminated"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"hipErrorContextIsDestroyed", c"context is destroyed"),
    (710, c"CUDA_ERROR_ASSERT", c"hipErrorAssert", c"device-side assert triggered"),
    (
        712,
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"hipErrorHostMemoryAlreadyRegistered",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        713,
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"hipErrorHostMemoryNotRegistered",
        c"pointer does not correspond to a registered memory region",
    ),
    (714, c"CUDA_ERROR_HARDWARE_STACK_ERROR", c"hipErrorUnknown", c"hardware stack error"),
    (715, c"CUDA_ERROR_ILLEGAL_INSTRUCTION", c"hipErrorUnknown", c"an illegal instruction was encountered"),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"hipErrorUnknown", c"misaligned address"),
    (717, c"CUDA_ERROR_INVALID_ADDRESS_SPACE", c"hipErrorUnknown", c"operation not supported on this address space"),
    (718, c"CUDA_ERROR_INVALID_PC", c"hipErrorUnknown", c"invalid program counter"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"hipErrorLaunchFailure", c"unspecified launch failure"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"hipErrorNotSupported", c"operation not supported"),
    (
        900,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"hipErrorStreamCaptureUnsupported",
        c"operation not permitted when stream is capturing",
    ),
    (
        901,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"hipErrorStreamCaptureInvalidated",
        c"operation failed due to a previous error during capture",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"hipErrorUnknown", c"unknown error"),
];

/// The enumerator's name, or `None` for a code that this library does not know.
pub(crate) fn name(code: i32, vendor: Vendor) -> Option<&'static CStr> {
    let row = TEXTS.iter().find(|row| row.0 == code)?;
    Some(if vendor == Vendor::Cuda { row.1 } else { row.2 })
}

/// The description that goes with the code.
pub(crate) fn text(code: i32) -> Option<&'static CStr> {
    TEXTS.iter().find(|row| row.0 == code).map(|row| row.3)
}

//! The driver's error codes that the stand-in can return.

use stand_in_shared::Stale;

macro_rules! failures {
    ($($variant:ident = $code:literal, $name:literal, $text:literal;)*) => {
        /// The driver's error code of a failed call.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub(crate) enum Failure { $(#[doc = $text] $variant = $code),* }

        impl Failure {
            /// The failure with this code; `None` for success and for codes that the stand-in does
            /// not use.
            pub(crate) fn from_code(code: u32) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }
        }

        /// The name and text of a code, zero-terminated.
        pub(crate) fn describe(code: u32) -> Option<(&'static str, &'static str)> {
            match code {
                0 => Some(("CUDA_SUCCESS\0", "no error\0")),
                $($code => Some((concat!($name, "\0"), concat!($text, "\0"))),)*
                _ => None,
            }
        }
    };
}

failures! {
    InvalidValue = 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument";
    OutOfMemory = 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory";
    NotInitialized = 3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error";
    InvalidDevice = 101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal";
    InvalidImage = 200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid";
    InvalidContext = 201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context";
    MapFailed = 205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed";
    AlreadyMapped = 208, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped";
    NoBinaryForGpu = 209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device";
    InvalidPtx = 218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed";
    InvalidHandle = 400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle";
    NotFound = 500, "CUDA_ERROR_NOT_FOUND", "named symbol not found";
    NotReady = 600, "CUDA_ERROR_NOT_READY", "device not ready";
    IllegalAddress = 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered";
    LaunchTimeout = 702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated";
    Assert = 710, "CUDA_ERROR_ASSERT", "device-side assert triggered";
    HostMemoryAlreadyRegistered = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "part or all of the requested memory range is already mapped";
    HostMemoryNotRegistered = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        "pointer does not correspond to a registered memory region";
    IllegalInstruction = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered";
    MisalignedAddress = 716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address";
    InvalidAddressSpace = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space";
    LaunchFailed = 719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure";
    NotPermitted = 800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted";
    NotSupported = 801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported";
    CaptureUnsupported = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing";
    CaptureInvalidated = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "operation failed due to a previous error during capture";
    CaptureMerge = 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
        "operation would result in a merge of separate capture sequences";
    CaptureUnmatched = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began";
    CaptureUnjoined = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work";
    CaptureIsolation = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        "dependency created on uncaptured work in another stream";
    CapturedEvent = 907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream";
    Unknown = 999, "CUDA_ERROR_UNKNOWN", "unknown error";
}

/// The result of a driver function.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl From<Stale> for Failure {
    fn from(_: Stale) -> Self {
        Self::InvalidHandle
    }
}

/// Prints a diagnosis to stderr.
macro_rules! say {
    ($($part:tt)*) => {
        stand_in_shared::print("cuda", &format!($($part)*))
    };
}
pub(crate) use say;

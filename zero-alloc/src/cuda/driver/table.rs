//! The driver's functions, found by name.
//!
//! The types are cudarc's, generated from NVIDIA's headers. Its functions are not used, for three
//! reasons: they panic if the library or a function is missing; they return codes as a Rust enum,
//! which has no value for codes of newer drivers; and they search for `libcuda.so` before
//! `libcuda.so.1`, so that they may load the toolkit's stub. A compile-time check compares the
//! parameters of each function here with cudarc's.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;

use crate::library::{Library, MissingFunction};

type Flags = std::ffi::c_ulonglong;

macro_rules! table {
    ($($symbol:ident($($arg:ty),*);)*) => {
        /// The functions in use, under the names that the library exports.
        #[allow(non_snake_case, reason = "NVIDIA's names")]
        pub(super) struct Table {
            $(pub(super) $symbol: unsafe extern "C" fn($($arg),*) -> c_int,)*
            /// Every driver exports it, but the newest headers declare only its successor.
            pub(super) cuEventElapsedTime: unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> c_int,
            /// Drivers before CUDA 12 lack it.
            pub(super) cuStreamGetId: Option<unsafe extern "C" fn(sys::CUstream, *mut u64) -> c_int>,
            /// These two accept any code, not only values of cudarc's enum.
            pub(super) cuGetErrorName: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
            pub(super) cuGetErrorString: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        }

        $(const _: unsafe fn($($arg),*) -> sys::CUresult = sys::$symbol;)*

        impl Table {
            /// Finds every function.
            ///
            /// # Errors
            /// Names the first function that `library` lacks.
            #[allow(clippy::multiple_unsafe_ops_per_block, reason = "one proof for all fields")]
            pub(super) fn load(library: &Library) -> Result<Self, MissingFunction> {
                // SAFETY: each field has the function's signature in NVIDIA's headers.
                unsafe {
                    Ok(Self {
                        $($symbol: library.function(stringify!($symbol))?,)*
                        cuEventElapsedTime: library.function("cuEventElapsedTime")?,
                        cuStreamGetId: library.function("cuStreamGetId").ok(),
                        cuGetErrorName: library.function("cuGetErrorName")?,
                        cuGetErrorString: library.function("cuGetErrorString")?,
                    })
                }
            }
        }
    };
}

table! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);

    cuDeviceGet(*mut sys::CUdevice, c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, sys::CUdevice);
    cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice);
    cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
    cuCtxSetCurrent(sys::CUcontext);
    cuCtxGetCurrent(*mut sys::CUcontext);
    cuCtxGetDevice(*mut sys::CUdevice);
    cuCtxSynchronize();

    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
    cuMemFree_v2(sys::CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemAddressReserve(*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, Flags);
    cuMemAddressFree(sys::CUdeviceptr, usize);
    cuMemCreate(*mut sys::CUmemGenericAllocationHandle, usize, *const sys::CUmemAllocationProp, Flags);
    cuMemRelease(sys::CUmemGenericAllocationHandle);
    cuMemMap(sys::CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, Flags);
    cuMemUnmap(sys::CUdeviceptr, usize);
    cuMemSetAccess(sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
    cuMemGetAllocationGranularity(*mut usize, *const sys::CUmemAllocationProp, sys::CUmemAllocationGranularity_flags);

    cuMemcpyAsync(sys::CUdeviceptr, sys::CUdeviceptr, usize, sys::CUstream);
    cuLaunchHostFunc(sys::CUstream, sys::CUhostFn, *mut c_void);
    cuMemsetD8Async(sys::CUdeviceptr, u8, usize, sys::CUstream);

    cuStreamCreateWithPriority(*mut sys::CUstream, c_uint, c_int);
    cuStreamDestroy_v2(sys::CUstream);
    cuStreamGetCtx(sys::CUstream, *mut sys::CUcontext);
    cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
    cuStreamQuery(sys::CUstream);
    cuStreamWaitValue64_v2(sys::CUstream, sys::CUdeviceptr, sys::cuuint64_t, c_uint);
    cuStreamWriteValue64_v2(sys::CUstream, sys::CUdeviceptr, sys::cuuint64_t, c_uint);
    cuStreamBeginCapture_v2(sys::CUstream, sys::CUstreamCaptureMode);
    cuStreamIsCapturing(sys::CUstream, *mut sys::CUstreamCaptureStatus);
    cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph);
    cuThreadExchangeStreamCaptureMode(*mut sys::CUstreamCaptureMode);
    cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, Flags);
    cuGraphLaunch(sys::CUgraphExec, sys::CUstream);
    cuGraphExecDestroy(sys::CUgraphExec);
    cuGraphDestroy(sys::CUgraph);
    cuEventCreate(*mut sys::CUevent, c_uint);
    cuEventDestroy_v2(sys::CUevent);
    cuEventRecord(sys::CUevent, sys::CUstream);
    cuEventQuery(sys::CUevent);

    cuModuleLoadDataEx(*mut sys::CUmodule, *const c_void, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
    cuModuleUnload(sys::CUmodule);
    cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, sys::CUfunction);
    cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int);
    cuLaunchKernel(
        sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, sys::CUstream,
        *mut *mut c_void, *mut *mut c_void
    );
}

//! Modules and launches.

use std::ffi::c_void;

use zero_alloc::cuda::{CudaDevice, CudaStream, Function};
use zero_alloc::device::{AnySlice, Device, DeviceError, Stream};

use crate::{LIMIT, floats, open, read, rig, slice};

/// `scale_add(x, n, scale, add)`: x[i] = x[i] * scale + add, rounded twice. An old version of PTX
/// for sm_50, so that any driver compiles it.
const PTX: &str = "
.version 6.0
.target sm_50
.address_size 64

.visible .entry scale_add(
    .param .u64 x,
    .param .u32 n,
    .param .f32 scale,
    .param .f32 add
)
{
    .reg .pred %p<2>;
    .reg .f32 %f<5>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    ld.param.f32 %f1, [scale];
    ld.param.f32 %f2, [add];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f3, [%rd4];
    mul.rn.f32 %f4, %f3, %f1;
    add.rn.f32 %f4, %f4, %f2;
    st.global.f32 [%rd4], %f4;
DONE:
    ret;
}
\0";

pub(crate) fn scale_add(device: &CudaDevice) -> Function {
    // SAFETY: complete PTX.
    let module = unsafe { device.load_module(PTX.as_bytes()) }.expect("it compiles");
    // The function keeps its module loaded.
    module.function("scale_add").expect("it is there")
}

/// x = x * scale + add.
pub(crate) fn launch(
    function: &Function,
    stream: &CudaStream,
    x: AnySlice,
    scale: f32,
    add: f32,
) -> Result<(), DeviceError> {
    launch_blocks(function, stream, (x, scale, add), 128, 0)
}

/// As [`launch`], in blocks of `threads` threads, each with `shared_bytes` of shared memory that it
/// does not use.
pub(crate) fn launch_blocks(
    function: &Function,
    stream: &CudaStream,
    (x, scale, add): (AnySlice, f32, f32),
    threads: u32,
    shared_bytes: u32,
) -> Result<(), DeviceError> {
    let (mut x, mut n, mut scale, mut add) = (x.as_ptr(), x.len() as u32, scale, add);
    let mut args: [*mut c_void; 4] = [
        (&raw mut x).cast(),
        (&raw mut n).cast(),
        (&raw mut scale).cast(),
        (&raw mut add).cast(),
    ];
    let blocks = n.div_ceil(threads).max(1);
    // SAFETY: the kernel's four parameters; `x` has `n` floats, and the tests order its uses and
    // keep the function.
    unsafe {
        function.launch(
            stream,
            [blocks, 1, 1],
            [threads, 1, 1],
            shared_bytes,
            &mut args,
        )
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_kernels_run_in_stream_order() {
    let (device, pool, [stream]) = rig(["compute"]);
    let function = scale_add(&device);
    assert_eq!(function.name(), "scale_add");
    for len in [1, 127, 128, 1000] {
        let x = floats(&pool, &stream, len, 3.0);
        launch(&function, &stream, slice(&x), 2.0, 1.0).expect("enqueued");
        launch(&function, &stream, slice(&x), 10.0, -4.0).expect("enqueued");
        assert_eq!(read(&device, &stream, &x), vec![66.0; len]);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn invalid_cuda_module_is_an_error() {
    let device = open();
    let fails = |image: &[u8]| {
        // SAFETY: no image below is machine code.
        let loaded = unsafe { device.load_module(image) };
        loaded.expect_err("no module").to_string()
    };

    assert!(fails(b"").contains("neither machine code nor PTX"));
    assert!(fails(&PTX.as_bytes()[..PTX.len() - 1]).contains("zero byte"));
    let broken = PTX.replace("mul.rn.f32", "mul.wrong.f32");
    let error = fails(broken.as_bytes());
    assert!(
        error.starts_with("cuModuleLoadData: CUDA_ERROR_"),
        "{error}"
    );
    // SAFETY: complete PTX.
    let module = unsafe { device.load_module(PTX.as_bytes()) }.expect("it compiles");
    let error = module
        .function("no_such_kernel")
        .expect_err("there is none")
        .to_string();
    assert!(
        error.contains("CUDA_ERROR_NOT_FOUND") && error.contains("no_such_kernel"),
        "{error}"
    );
    assert!(module.function("zero\0byte").is_err());
}

#[test]
#[ignore = "needs a CUDA device"]
fn refused_cuda_launch_poisons_its_stream() {
    let (device, pool, [stream, other]) = rig(["a", "b"]);
    let function = scale_add(&device);
    let x = floats(&pool, &stream, 10, 1.0);
    let refused = launch_blocks(&function, &stream, (slice(&x), 2.0, 0.0), 4096, 0)
        .expect_err("too large a block");

    let DeviceError::Operation {
        stream: at,
        op,
        cause,
    } = &refused
    else {
        panic!("{refused}")
    };

    assert_eq!((at.as_str(), op.as_str()), ("a", "scale_add"));
    assert!(
        cause
            .to_string()
            .starts_with("cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"),
        "{cause}"
    );
    // The error is sticky: later operations return it.
    assert_eq!(
        launch(&function, &stream, slice(&x), 2.0, 0.0),
        Err(refused.clone())
    );
    assert_eq!(device.fill_zero(&stream, slice(&x)), Err(refused.clone()));
    assert_eq!(stream.synchronize(LIMIT), Err(refused));
    launch(&function, &other, slice(&x), 2.0, 0.0).expect("enqueued");
    assert_eq!(read(&device, &other, &x), [2.0; 10]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn poisoned_cuda_stream_fails_its_waiters() {
    let device = open();
    let comm = device.create_stream("comm").expect("a stream");
    let compute = device.create_stream("compute").expect("a stream");
    let reached = comm.record().expect("recorded");
    reached_by_now(&reached);
    compute
        .wait(&comm.record().expect("recorded"))
        .expect("enqueued");
    comm.poison(DeviceError::Driver {
        call: "ncclAllGather",
        message: "rank 3 is gone".into(),
    });
    let expected = DeviceError::Operation {
        stream: "comm".into(),
        op: "an operation".into(),
        cause: "ncclAllGather: rank 3 is gone".into(),
    };
    assert_eq!(comm.synchronize(LIMIT), Err(expected.clone()));
    assert_eq!(compute.synchronize(LIMIT), Err(expected));
    reached_by_now(&reached);
}

fn reached_by_now(event: &zero_alloc::cuda::CudaEvent) {
    use zero_alloc::device::Event;
    event.synchronize(LIMIT).expect("reached");
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_shared_memory_beyond_48_kib() {
    let (device, pool, [stream]) = rig(["compute"]);
    let function = scale_add(&device);
    let x = floats(&pool, &stream, 10, 1.0);
    function
        .allow_shared_bytes(64 << 10)
        .expect("every device since sm_70 has that");
    launch_blocks(&function, &stream, (slice(&x), 4.0, 0.0), 32, 64 << 10).expect("enqueued");
    assert_eq!(read(&device, &stream, &x), [4.0; 10]);
    assert!(function.allow_shared_bytes(1 << 30).is_err());
}

//! Instructions compared with plain Rust. Every test runs a few lines of PTX in all threads of a
//! grid.

use crate::api::tests::{allocate, download, new_stream, own_device, upload};
use crate::api::*;

mod arithmetic;
mod conversions;
mod faults;
mod flow;
mod matrices;
mod memories;
mod nvrtc;
mod warps;

const HEAD: &str = ".version 9.2\n.target sm_90\n.address_size 64\n";

/// A module on a device that no other test uses.
pub(crate) struct Bench {
    pub(crate) stream: usize,
    module: usize,
}

impl Bench {
    /// Loads PTX. A missing header is added.
    pub(crate) fn load(text: &str) -> Self {
        own_device();
        let mut module = 0;
        let stream = new_stream();
        let head = if text.contains(".version") { "" } else { HEAD };
        let text = format!("{head}{text}\0");
        // SAFETY: the text ends in zero.
        let result = unsafe { cuModuleLoadData((&mut module).into(), text.as_ptr()) };
        assert_eq!(result, 0);
        Self { stream, module }
    }

    pub(crate) fn function(&self, name: &'static std::ffi::CStr) -> usize {
        let mut function = 0;
        // SAFETY: a static string.
        let result =
            unsafe { cuModuleGetFunction((&mut function).into(), self.module, name.into()) };
        assert_eq!(result, 0);
        function
    }

    /// Launches a kernel with 64-bit parameters. Returns the codes of the launch and of the
    /// synchronization.
    pub(crate) fn launch(
        &self,
        function: usize,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic: u32,
        args: &[u64],
    ) -> (u32, u32) {
        let pointers: Vec<*const u8> = args
            .iter()
            .map(|arg| std::ptr::from_ref(arg).cast())
            .collect();
        let values = pointers.as_slice().into();
        let [gx, gy, gz] = grid;
        let [bx, by, bz] = block;

        // SAFETY: one pointer to a live value per parameter of the kernel.
        let code = unsafe {
            cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                dynamic,
                self.stream,
                values,
                0,
            )
        };

        // SAFETY: a handle, which the function checks.
        (code, unsafe { cuStreamSynchronize(self.stream) })
    }

    pub(crate) fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        // SAFETY: plain numbers, seen as their bytes.
        let bytes = unsafe {
            std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values))
        };
        upload(self.stream, bytes)
    }

    pub(crate) fn allocate(&self, bytes: usize) -> u64 {
        allocate(bytes)
    }

    pub(crate) fn u64s(&self, address: u64, count: usize) -> Vec<u64> {
        let bytes = download(self.stream, address, count * 8);
        bytes
            .chunks(8)
            .map(|c| u64::from_le_bytes(c.try_into().unwrap()))
            .collect()
    }
}

impl Bench {
    pub(crate) fn u32s(&self, address: u64, count: usize) -> Vec<u32> {
        let bytes = download(self.stream, address, count * 4);
        bytes
            .chunks(4)
            .map(|c| u32::from_le_bytes(c.try_into().unwrap()))
            .collect()
    }
}

/// Runs `code` in one thread per triple. The triple is in `%a, %b, %c` (64 bits), `%x, %y, %z` (32)
/// and `%i, %j, %k` (16). Temporaries are `%t0..%t7` (32), `%u0..%u7` (64), `%p0..%p7` and
/// `%carry`. The result is in `%d` (64), `%r` (32) or `%h` (16); `code` may use only one of these.
pub(crate) fn evaluate(code: &str, triples: &[[u64; 3]]) -> Vec<u64> {
    let widen = match ["%d", "%r", "%h"].map(|name| code.contains(name)) {
        [true, false, false] => "",
        [false, true, false] => "cvt.u64.u32 %d, %r;",
        [false, false, true] => "cvt.u64.u16 %d, %h;",
        _ => panic!("one result expected: {code}"),
    };

    let text = format!(
        ".visible .entry f(.param .u64 p0, .param .u64 p1, .param .u64 p2) {{
            .reg .b64 %a, %b, %c, %d, %in, %out, %count, %index;
            .reg .b32 %x, %y, %z, %r, %tid, %ctaid; .reg .b16 %i, %j, %k, %h; .reg .b32 %t<8>; .reg .b64 %u<8>;
            .reg .pred %p<8>, %past;
            ld.param.u64 %in, [p0]; ld.param.u64 %out, [p1]; ld.param.u64 %count, [p2];
            mov.u32 %tid, %tid.x; mov.u32 %ctaid, %ctaid.x; mad.lo.s32 %tid, %ctaid, 96, %tid;
            cvt.u64.u32 %index, %tid; setp.ge.u64 %past, %index, %count; @%past bra END;
            mad.lo.s64 %in, %index, 24, %in;
            ld.global.b64 %a, [%in]; ld.global.b64 %b, [%in+8]; ld.global.b64 %c, [%in+16];
            cvt.u32.u64 %x, %a; cvt.u32.u64 %y, %b; cvt.u32.u64 %z, %c;
            cvt.u16.u64 %i, %a; cvt.u16.u64 %j, %b; cvt.u16.u64 %k, %c;
            {{ {code} }}
            {widen}
            shl.b64 %index, %index, 3; add.s64 %out, %out, %index; st.global.b64 [%out], %d;
            END: ret; }}"
    );

    let bench = Bench::load(&text);
    let input = bench.upload(triples);
    let output = bench.allocate(triples.len() * 8);
    let grid = [triples.len().div_ceil(96) as u32, 1, 1];
    let args = [input, output, triples.len() as u64];
    assert_eq!(
        bench.launch(bench.function(c"f"), grid, [96, 1, 1], 0, &args),
        (0, 0),
        "{code}"
    );

    bench.u64s(output, triples.len())
}

/// All triples of these values, or a subset that covers all pairs.
pub(crate) fn triples(values: &[u64]) -> Vec<[u64; 3]> {
    let mut all = Vec::new();
    for (i, &a) in values.iter().enumerate() {
        for (j, &b) in values.iter().enumerate() {
            all.push([a, b, values[(i * 7 + j * 3) % values.len()]]);
        }
    }
    all
}

/// Edge cases of integers.
pub(crate) const INTEGERS: [u64; 22] = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    63,
    64,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fffe,
    0xffff_ffff,
    0x1234_5678_9abc_def0,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];

/// Edge cases of `f32`, as bits.
pub(crate) fn floats() -> Vec<u64> {
    let values = [
        0.0f32,
        -0.0,
        1.0,
        -1.0,
        1.5,
        0.1,
        -3.7,
        255.5,
        1e-40,
        -1e-44,
        1.1754944e-38,
        3.4e38,
        -3.4e38,
        65504.0,
        65520.0,
        1e-7,
        2.5,
        3.5,
        -2.5,
        0.5,
        16777217.0,
        4.2e9,
        -4.2e9,
        9.3e18,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];

    values.iter().map(|x| u64::from(x.to_bits())).collect()
}

/// Compares results with a function of the triples, and reports the first difference.
pub(crate) fn check(code: &str, triples: &[[u64; 3]], expected: impl Fn([u64; 3]) -> u64) {
    for (got, &triple) in evaluate(code, triples).into_iter().zip(triples) {
        let want = expected(triple);
        assert_eq!(
            got, want,
            "{code} of {triple:x?}: {got:#x}, and not {want:#x}"
        );
    }
}

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

/// The bits of a result, with the canonical NaN of GPUs.
fn bits(x: f32) -> u64 {
    if x.is_nan() {
        0x7fff_ffff
    } else {
        u64::from(x.to_bits())
    }
}

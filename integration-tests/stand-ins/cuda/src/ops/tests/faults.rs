use super::{Bench, HEAD};
use crate::api::tests::own_device;
use crate::api::*;
use crate::error::Failure;

/// Loads an invalid image. Returns the code and the log.
fn refused(image: &[u8]) -> (u32, String) {
    own_device();
    let mut module = 0;
    let mut log = [0u8; 256];
    let options = [5u32, 6];
    let values = [log.as_mut_ptr() as usize, log.len()];
    // SAFETY: an image that is zero-terminated or starts like machine code; a log buffer of the
    // given size.
    let code = unsafe {
        cuModuleLoadDataEx(
            (&mut module).into(),
            image.as_ptr(),
            2,
            options.as_slice().into(),
            values.as_slice().into(),
        )
    };
    let end = log.iter().position(|&byte| byte == 0).unwrap();
    (code, String::from_utf8(log[..end].to_vec()).unwrap())
}

fn refused_code(code: &str) -> String {
    let text = format!(
        "{HEAD}.visible .entry f() {{ .reg .b32 %r<4>; .reg .pred %p<2>;\n{code}\n ret; }}\0"
    );
    let (code, log) = refused(text.as_bytes());
    assert_eq!(code, Failure::InvalidPtx as u32);
    log
}

#[test]
fn what_is_not_known_is_refused_by_name_and_line() {
    for (code, word) in [
        ("tex.1d.v4.f32.s32 {%r0, %r1, %r2, %r3}, [%r1];", "tex.1d"),
        ("add.rainbow.s32 %r1, %r2, %r3;", "rainbow"),
        ("add.s32 %r1, %r2, %r9;", "%r9"),
        ("add.s32 %r1, %r2;", "operands"),
        ("@%r1 bra X;", "%r1"),
        ("bra NOWHERE;", "NOWHERE"),
        ("setp.ltu.s32 %p0, %r1, %r2;", "ltu"),
        ("mov.u32 %r1, %pm0;", "%pm0"),
        ("call other, 1;", "call"),
        ("atom.global.add.u32 %r1, [%r2], 1;", "atom"),
        (".local .b8 depot[8];", ".local"),
        ("shfl.bfly.b32 %r1, %r2, 1, 31;", "shfl"),
        (
            "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r0}, {%r1}, {%r2}, {%r3};",
            "mma",
        ),
    ] {
        let log = refused_code(code);
        assert!(
            log.contains(word) && log.contains("line 5"),
            "{code}: {log}"
        );
    }
}

#[test]
fn machine_code_and_a_missing_kernel_are_refused() {
    assert_eq!(
        refused(b"\x7fELF\x02\x01\x01\0").0,
        Failure::NoBinaryForGpu as u32
    );
    let bench = Bench::load(".visible .entry f() { ret; }");
    let mut function = 0;
    // SAFETY: a handle, which the function checks, and a static string.
    let code = unsafe { cuModuleGetFunction((&mut function).into(), bench.module, c"g".into()) };
    assert_eq!(code, Failure::NotFound as u32);
}

/// Runs a kernel with one parameter, the address of 64 bytes, which must fail with `failure`.
fn fails(failure: Failure, code: &str) {
    let text = format!(
        ".visible .entry f(.param .u64 p) {{ .shared .align 4 .b8 s[16]; .reg .b64 %d<4>; .reg .b32 %r<8>; .reg .pred %p<4>;
        ld.param.u64 %d1, [p]; mov.u32 %r1, %tid.x; {code} ret; }}"
    );
    let bench = Bench::load(&text);
    let place = bench.allocate(64);
    let (code, waited) = bench.launch(bench.function(c"f"), [1; 3], [64, 1, 1], 0, &[place]);
    assert_eq!((code, waited), (0, failure as u32), "{text}");
    // The context stays unusable.
    let mut again = 0;
    // SAFETY: a valid result pointer.
    let result = unsafe { cuMemAlloc_v2((&mut again).into(), 64) };
    assert_eq!(result, failure as u32);
}

#[test]
fn wrong_accesses_end_the_kernel_and_the_context() {
    fails(Failure::IllegalAddress, "ld.global.b32 %r2, [%d1+64];");
    fails(Failure::IllegalAddress, "ld.global.b64 %d2, [%d1+64];");
    fails(Failure::IllegalAddress, "st.global.b32 [%d1+-4], %r1;");
    fails(
        Failure::IllegalAddress,
        "mov.b64 %d2, 0; ld.b32 %r2, [%d2];",
    );
    fails(Failure::MisalignedAddress, "ld.global.b32 %r2, [%d1+2];");
    fails(
        Failure::MisalignedAddress,
        "ld.global.v2.b32 {%r2, %r3}, [%d1+4];",
    );
    fails(Failure::IllegalAddress, "ld.shared.b32 %r2, [s+16];");
    fails(Failure::IllegalAddress, "st.shared.b32 [s+4096], 1;");
    fails(
        Failure::IllegalAddress,
        "shl.b32 %r2, %r1, 2; mov.b32 %r3, s; add.s32 %r3, %r3, %r2; st.shared.b32 [%r3], 1;",
    );
}

#[test]
fn waits_without_an_end_are_failures() {
    fails(
        Failure::LaunchTimeout,
        "setp.lt.u32 %p0, %r1, 32; @%p0 bra X; bar.sync 1; X: bar.sync 0;",
    );
    fails(
        Failure::LaunchTimeout,
        "setp.lt.u32 %p0, %r1, 9; @%p0 bra X; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; X: bar.sync 0;",
    );
    fails(
        Failure::IllegalInstruction,
        "and.b32 %r2, %r1, 1; setp.eq.u32 %p0, %r2, 0; @%p0 exit;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [s];",
    );
}

#[test]
fn launches_beyond_limits_are_refused() {
    let bench = Bench::load(
        ".visible .entry f() .maxntid 128 { .shared .align 4 .b8 s[1024]; .reg .b32 %r; mov.b32 %r, s; ret; }",
    );
    let f = bench.function(c"f");
    let run = |grid, block, dynamic| bench.launch(f, grid, block, dynamic, &[]).0;
    let bad = Failure::InvalidValue as u32;
    assert_eq!(run([1; 3], [128, 1, 1], 0), 0);
    assert_eq!(run([1; 3], [129, 1, 1], 0), bad);
    assert_eq!(run([1; 3], [0, 1, 1], 0), bad);
    assert_eq!(run([1, 65536, 1], [1; 3], 0), bad);
    assert_eq!(run([0, 1, 1], [1; 3], 0), bad);
    // 48 KiB with the static memory; more only after opting in, and never more than 227 KiB.
    assert_eq!(run([1; 3], [1; 3], 47 << 10), 0);
    assert_eq!(run([1; 3], [1; 3], (47 << 10) + 1), bad);
    // SAFETY: a handle, which the function checks.
    let allow = |bytes| unsafe { cuFuncSetAttribute(f, 8, bytes) };
    assert_eq!(allow(226 << 10), 0);
    assert_eq!(run([1; 3], [1; 3], 226 << 10), 0);
    assert_eq!(allow((226 << 10) + 1), bad);

    let attribute = |number| {
        let mut value = 0;
        // SAFETY: a handle, which the function checks, and a valid result pointer.
        let result = unsafe { cuFuncGetAttribute((&mut value).into(), number, f) };
        assert_eq!(result, 0);
        value
    };

    assert_eq!((attribute(0), attribute(1), attribute(3)), (128, 1024, 0));
}

#[test]
fn a_race_in_shared_memory_is_a_failure() {
    let store = "shl.b32 %r2, %r1, 2; and.b32 %r2, %r2, 15; mov.b32 %r3, s; add.s32 %r3, %r3, %r2;";
    fails(
        Failure::LaunchFailed,
        &format!("{store} st.shared.b32 [%r3], %r1;"),
    );
    fails(
        Failure::LaunchFailed,
        "setp.eq.u32 %p0, %r1, 0; @%p0 st.shared.b32 [s], %r1; setp.eq.u32 %p1, %r1, 40; @%p1 ld.shared.b32 %r2, [s];",
    );
}

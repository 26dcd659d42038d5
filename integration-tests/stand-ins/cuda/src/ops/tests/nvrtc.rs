//! PTX compiled by NVRTC: all kernels of the workspace decode, and some run correctly. Without
//! NVRTC these tests are skipped with a message, or fail if `ZERO_REQUIRE_NVRTC` is set.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

use super::Bench;
use crate::api::tests::own_device;
use crate::driver::device::current;
use crate::ptx::module::load;

/// The newest virtual architecture of NVRTC 13.
const ARCH: &CStr = c"--gpu-architecture=compute_121";

fn nvrtc(test: &str) -> Option<Library> {
    let names = std::env::var("ZERO_NVRTC").map_or(
        vec!["libnvrtc.so.13".into(), "libnvrtc.so".into()],
        |path| vec![path],
    );
    // SAFETY: loading NVRTC runs its initialisers only.
    let found = names
        .iter()
        .find_map(|name: &String| unsafe { Library::new(name) }.ok());
    if found.is_none() {
        assert!(
            std::env::var_os("ZERO_REQUIRE_NVRTC").is_none(),
            "no NVRTC at {names:?}"
        );
        crate::error::say!("SKIPPED {test}: no NVRTC at {names:?}");
    }
    found
}

/// A symbol of NVRTC as a function of this type.
macro_rules! symbol {
    ($library:expr, $name:literal as $type:ty) => {{
        // SAFETY: the signature of NVRTC's header.
        *unsafe { $library.get::<$type>($name) }.unwrap()
    }};
}

/// Compiles to PTX.
fn compile(library: &Library, source: &str, options: &[&CStr]) -> String {
    type Program = *mut c_void;
    type Names = *const *const c_char;
    let create = symbol!(
        library,
        b"nvrtcCreateProgram"
            as unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                Names,
                Names,
            ) -> c_int
    );

    let compile = symbol!(
        library,
        b"nvrtcCompileProgram" as unsafe extern "C" fn(Program, c_int, Names) -> c_int
    );
    let size = symbol!(
        library,
        b"nvrtcGetPTXSize" as unsafe extern "C" fn(Program, *mut usize) -> c_int
    );
    let get = symbol!(
        library,
        b"nvrtcGetPTX" as unsafe extern "C" fn(Program, *mut c_char) -> c_int
    );
    let log_size = symbol!(
        library,
        b"nvrtcGetProgramLogSize" as unsafe extern "C" fn(Program, *mut usize) -> c_int
    );
    let log = symbol!(
        library,
        b"nvrtcGetProgramLog" as unsafe extern "C" fn(Program, *mut c_char) -> c_int
    );
    let destroy = symbol!(
        library,
        b"nvrtcDestroyProgram" as unsafe extern "C" fn(*mut Program) -> c_int
    );
    let text = CString::new(source).unwrap();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    let none = std::ptr::null();

    // SAFETY: zero-terminated text and name, and no headers.
    let result = unsafe {
        create(
            &raw mut program,
            text.as_ptr(),
            c"test.cu".as_ptr(),
            0,
            none,
            none,
        )
    };

    assert_eq!(result, 0);
    // SAFETY: a live program, and the options with their count.
    let code = unsafe { compile(program, options.len() as c_int, options.as_ptr()) };
    let text = |size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
                get: unsafe extern "C" fn(Program, *mut c_char) -> c_int| {
        let mut bytes = 0;
        // SAFETY: a live program and a place for a number.
        assert_eq!(unsafe { size(program, &raw mut bytes) }, 0);
        let mut held = vec![0u8; bytes];
        // SAFETY: a live program and a buffer of the size that it returned.
        assert_eq!(unsafe { get(program, held.as_mut_ptr().cast()) }, 0);
        String::from_utf8(held)
            .unwrap()
            .trim_end_matches('\0')
            .to_owned()
    };

    assert_eq!(code, 0, "{}", text(log_size, log));
    let ptx = text(size, get);
    // SAFETY: a live program, destroyed once.
    unsafe { destroy(&raw mut program) };
    ptx
}

const EXACT: [&CStr; 3] = [ARCH, c"--std=c++17", c"--fmad=false"];

#[test]
fn all_kernels_of_the_workspace_decode() {
    let Some(library) = nvrtc("all_kernels_of_the_workspace_decode") else {
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let prelude = read(&root.join("zero-kernels/cuda/prelude.cuh"));
    own_device();

    for folder in [
        "zero-kernels/cuda",
        "integration-tests/models/src/cuda/kernels",
    ] {
        let mut files: Vec<_> = std::fs::read_dir(root.join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        let headers = |except: &str| -> String {
            let other = |p: &&std::path::PathBuf| {
                p.extension().is_some_and(|e| e == "cuh") && !p.ends_with(except)
            };
            files.iter().filter(other).rev().map(|p| read(p)).collect()
        };
        for path in files
            .iter()
            .filter(|p| p.extension().is_some_and(|e| e == "cu"))
        {
            // The transformer's kernels are compiled once for each type of storage.
            let storage = if folder == "zero-kernels/cuda" {
                ""
            } else {
                "#define STORAGE bf16\n"
            };
            let source = format!(
                "{prelude}\n{storage}{}\n{}",
                headers("prelude.cuh"),
                read(path)
            );
            let ptx = compile(&library, &source, &EXACT);
            let loaded = load(current().unwrap(), &ptx)
                .unwrap_or_else(|error| panic!("{path:?}: {error:?}"));
            let entries = ptx.matches(".entry").count();
            assert!(entries > 0 && loaded.kernels.len() == entries, "{path:?}");
        }
    }
}

/// Runs `out[i] = f(in[i])` as CUDA computes it.
fn map(
    library: &Library,
    number: &str,
    expression: &str,
    options: &[&CStr],
    input: &[f64],
) -> Vec<f64> {
    let source = format!(
        "extern \"C\" __global__ void f(const double* in, double* out, unsigned long long n) {{
            unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
            if (i < n) {{ {number} x = ({number})in[i]; out[i] = {expression}; }}
        }}"
    );
    let bench = Bench::load(&compile(library, &source, options));
    let from = bench.upload(input);
    let to = bench.allocate(input.len() * 8);
    let args = [from, to, input.len() as u64];
    let grid = [input.len().div_ceil(128) as u32, 1, 1];
    assert_eq!(
        bench.launch(bench.function(c"f"), grid, [128, 1, 1], 0, &args),
        (0, 0),
        "{expression}"
    );

    bench
        .u64s(to, input.len())
        .into_iter()
        .map(f64::from_bits)
        .collect()
}

/// The expected function.
type Function = fn(f64) -> f64;

#[test]
fn mathematical_functions_come_out_right() {
    let Some(library) = nvrtc("mathematical_functions_come_out_right") else {
        return;
    };
    // Large arguments use the slow path of sine and cosine, through local memory.
    let numbers: Vec<f64> = (-300..300)
        .map(|i| f64::from(i) * 0.07 + 0.013)
        .chain([1e5, -7.7e6, 3.3e20, 1e-30])
        .collect();
    let positive: Vec<f64> = numbers.iter().map(|x| x.abs()).collect();

    // Each with the maximum error of CUDA's manual, in f32 ulps, plus a margin.
    let cases: [(&str, Function, f64, &[f64]); 9] = [
        ("expf(x)", f64::exp, 2.0, &numbers[..600]),
        ("logf(x)", f64::ln, 2.0, &positive),
        ("tanhf(x)", f64::tanh, 2.0, &numbers),
        ("sinf(x)", f64::sin, 2.0, &numbers),
        ("cosf(x)", f64::cos, 2.0, &numbers),
        ("powf(x, 1.5f)", |x| x.powf(1.5), 8.0, &positive[..600]),
        ("sqrtf(x)", f64::sqrt, 0.5, &positive),
        ("1.0f / x", |x| 1.0 / x, 0.5, &numbers),
        ("cbrtf(x)", f64::cbrt, 2.0, &numbers),
    ];

    for (expression, f, ulps, input) in cases {
        for (&x, got) in input.iter().zip(map(
            &library,
            "float",
            expression,
            &[ARCH, c"--fmad=true"],
            input,
        )) {
            let want = f(f64::from(x as f32));
            let place = f64::from((want.abs() as f32).next_up()) - f64::from(want.abs() as f32);
            let place = place.max(f64::from(f32::MIN_POSITIVE) * 2f64.powi(-23));
            assert!(
                (got - want).abs() <= (ulps + 0.01) * place,
                "{expression} of {x}: {got}, and not {want}"
            );
        }
    }

    let double: [(&str, Function, &[f64]); 5] = [
        ("exp(x)", f64::exp, &numbers[..600]),
        ("log(x)", f64::ln, &positive),
        ("sin(x)", f64::sin, &numbers),
        ("rsqrt(x)", |x| 1.0 / x.sqrt(), &positive),
        ("fmod(x, 0.75)", |x| x % 0.75, &numbers[..600]),
    ];

    for (expression, f, input) in double {
        for (&x, got) in input
            .iter()
            .zip(map(&library, "double", expression, &[ARCH], input))
        {
            let want = f(x);
            assert!(
                (got - want).abs() <= want.abs() * 1e-15,
                "{expression} of {x}: {got}, and not {want}"
            );
        }
    }

    let fast = map(
        &library,
        "float",
        "expf(x) + __sinf(x) / x + rsqrtf(fabsf(x))",
        &[ARCH, c"--use_fast_math"],
        &numbers[..600],
    );

    for (&x, got) in numbers.iter().zip(fast) {
        let want = x.exp() + x.sin() / x + 1.0 / x.abs().sqrt();
        assert!(
            (got - want).abs() <= want.abs() * 1e-4,
            "{x}: {got}, and not {want}"
        );
    }
}

#[test]
fn a_block_reduces_and_a_grid_adds() {
    let Some(library) = nvrtc("a_block_reduces_and_a_grid_adds") else {
        return;
    };
    let source = r#"
        __device__ __noinline__ float warp_sum(float x) {
            for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
            return x;
        }
        extern "C" __global__ void sum(const float* in, float* out, unsigned long long n) {
            __shared__ float parts[32];
            extern __shared__ int counts[];
            float mine = 0;
            for (unsigned long long i = threadIdx.x; i < n; i += blockDim.x) mine += in[i];
            float warp = warp_sum(mine);
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = warp;
            if (threadIdx.x == 0) counts[0] = 0;
            __syncthreads();
            if (threadIdx.x < 32) {
                float all = warp_sum(threadIdx.x < (blockDim.x + 31) / 32 ? parts[threadIdx.x] : 0.0f);
                if (threadIdx.x == 0) atomicAdd(out, all);
            }
            atomicAdd(&counts[0], 1);
            int odd = __syncthreads_count(threadIdx.x & 1);
            unsigned same = __match_any_sync(__activemask(), threadIdx.x / 8);
            if (threadIdx.x == 0) { atomicAdd(out + 1, (float)counts[0]); atomicMax((int*)out + 2, odd); out[3] = __popc(same); }
        }"#;
    let bench = Bench::load(&compile(&library, source, &EXACT));
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let input = bench.upload(&values);
    let output = bench.upload(&[0u32; 4]);

    let result = bench.launch(
        bench.function(c"sum"),
        [7, 1, 1],
        [224, 1, 1],
        64,
        &[input, output, 1000],
    );

    assert_eq!(result, (0, 0));
    let found = bench.u32s(output, 4);
    assert_eq!(f32::from_bits(found[0]), 7.0 * 499_500.0);
    assert_eq!(
        (f32::from_bits(found[1]), found[2], f32::from_bits(found[3])),
        (7.0 * 224.0, 112, 8.0)
    );
}

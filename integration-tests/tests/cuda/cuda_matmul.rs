//! Products by cuBLASLt against fp64: transposition, strides, accumulation, biases and GELU.

use integration_tests::cuda::OpError;
use integration_tests::cuda::matmul::{Epilogue, LibraryError, Matmul, Matrix, Product, WORKSPACE_BYTES};
use zero_alloc::device::DType;

use crate::fp64;
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};

fn matmul(gpu: &Gpu) -> Matmul {
    Matmul::new(&gpu.device, gpu.fresh(WORKSPACE_BYTES / 4, DType::F32)).unwrap()
}

#[test]
#[ignore = "needs a CUDA device"]
fn products_of_all_transpositions() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let (m, n, k) = (24, 40, 56);
    for dtype in FLOATS {
        let (a, b) = (values(m * k, 1), values(k * n, 2));
        let (a64, b64) = (rounded(&a, dtype), rounded(&b, dtype));
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            // A transposed factor is stored as [k, m] or [n, k].
            let left = if ta { fp64::transpose(&a64, m) } else { a64.clone() };
            let right = if tb { fp64::transpose(&b64, k) } else { b64.clone() };
            let want = fp64::matmul(&left, &right, k, n);
            let (left, right) = (gpu.put(&a, dtype), gpu.put(&b, dtype));
            let left = if ta { Matrix::new(left, m).t() } else { Matrix::new(left, k) };
            let right = if tb { Matrix::new(right, k).t() } else { Matrix::new(right, n) };
            let y = gpu.fresh(m * n, dtype);
            let out = Matrix::new(y, n);
            matmul.run(&gpu.stream, &Product { left, right, out, add: None, epilogue: Epilogue::None }).unwrap();
            close(&gpu.get(y), &want, tolerance(dtype), &format!("{dtype} {ta} {tb}"));

            // Added to existing fp32 values: the gradient of a weight.
            let sum = gpu.floats(&vec![3.0; m * n]).erase();
            let out = Matrix::new(sum, n);
            let product = Product { left, right, out, add: Some(out), epilogue: Epilogue::None };
            matmul.run(&gpu.stream, &product).unwrap();
            let want: Vec<f64> = want.iter().map(|v| v + 3.0).collect();
            close(&gpu.get(sum), &want, 2e-6, &format!("{dtype} {ta} {tb}, added"));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_further_apart_than_they_are_long() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let (m, n, k, stride) = (16, 50, 32, 64);
    let (a, b) = (values(m * k, 1), values(n * k, 2));
    let want = fp64::matmul(&rounded(&a, DType::Bf16), &fp64::transpose(&rounded(&b, DType::Bf16), k), k, n);
    let (left, right) = (gpu.put(&a, DType::Bf16), gpu.put(&b, DType::Bf16));
    let y = gpu.put(&vec![9.0; m * stride], DType::Bf16);
    let (left, right, out) = (Matrix::new(left, k), Matrix::new(right, k).t(), Matrix::with_stride(y, n, stride));
    matmul.run(&gpu.stream, &Product { left, right, out, add: None, epilogue: Epilogue::None }).unwrap();
    let got = gpu.get(y);
    let real: Vec<f32> = got.chunks(stride).flat_map(|r| r[..n].to_vec()).collect();
    close(&real, &want, tolerance(DType::Bf16), "the columns that count");
    assert!(got.chunks(stride).all(|r| r[n..].iter().all(|v| *v == 9.0)), "elements between rows are unchanged");
}

#[test]
#[ignore = "needs a CUDA device"]
fn biases_residuals_and_gelu_in_the_same_pass() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let (m, n, k) = (24, 40, 56);
    for dtype in FLOATS {
        let (a, b, bias, x) = (values(m * k, 1), values(k * n, 2), values(n, 3), values(m * n, 4));
        let [a64, b64, bias64, x64] = [&a, &b, &bias, &x].map(|v| rounded(v, dtype));
        let product = fp64::matmul(&a64, &b64, k, n);
        let biased: Vec<f64> = product.iter().enumerate().map(|(i, v)| v + bias64[i % n]).collect();
        let (left, right) = (Matrix::new(gpu.put(&a, dtype), k), Matrix::new(gpu.put(&b, dtype), n));
        let (bias, x) = (gpu.put(&bias, dtype), gpu.put(&x, dtype));
        let y = gpu.fresh(m * n, dtype);
        let plain = Product { left, right, out: Matrix::new(y, n), add: None, epilogue: Epilogue::Bias(bias) };
        matmul.run(&gpu.stream, &plain).unwrap();
        close(&gpu.get(y), &biased, tolerance(dtype), &format!("{dtype}: bias"));
        matmul.run(&gpu.stream, &Product { add: Some(Matrix::new(x, n)), ..plain }).unwrap();
        let want: Vec<f64> = biased.iter().zip(&x64).map(|(y, x)| y + x).collect();
        close(&gpu.get(y), &want, tolerance(dtype), &format!("{dtype}: bias and residual"));

        if dtype == DType::F32 {
            // The model does not use it, since the accuracy of the library's GELU is not specified.
            continue;
        }
        let input = gpu.fresh(m * n, dtype);
        let forward = Product { epilogue: Epilogue::BiasGelu { bias, input }, ..plain };
        if !matmul.supports(&forward).unwrap() {
            let error = matmul.run(&gpu.stream, &forward).unwrap_err();
            assert!(matches!(error, OpError::Library(LibraryError::NoAlgorithm { .. })), "{error}");
            continue;
        }
        matmul.run(&gpu.stream, &forward).unwrap();
        close(&gpu.get(input), &biased, tolerance(dtype), &format!("{dtype}: GELU's input"));
        let want: Vec<f64> = biased.iter().map(|v| fp64::gelu(*v)[0]).collect();
        close(&gpu.get(y), &want, tolerance(dtype), &format!("{dtype}: GELU"));
        let seen: Vec<f64> = gpu.get(input).iter().map(|v| f64::from(*v)).collect();
        let want: Vec<f64> = product.iter().zip(&seen).map(|(p, v)| p * fp64::gelu(*v)[1]).collect();
        matmul.run(&gpu.stream, &Product { epilogue: Epilogue::GeluBackward { input }, ..plain }).unwrap();
        close(&gpu.get(y), &want, tolerance(dtype), &format!("{dtype}: GELU backward"));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn sums_are_fp32_until_they_are_stored() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    // Few results of long sums, which the library tends to split among blocks.
    let (m, n, k) = (64, 64, 8192);
    for (dtype, large) in [(DType::Bf16, 256.0), (DType::F16, 2048.0)] {
        // large + 1 has one bit more than the 16-bit type holds; the last term subtracts `large`.
        let term = |i: usize| [large, 1.0].get(i).copied().unwrap_or(if i == k - 1 { -large } else { 0.0 });
        let b: Vec<f32> = (0..k * n).map(|i| term(i / n)).collect();
        let (left, right) = (gpu.put(&vec![1.0; m * k], dtype), gpu.put(&b, dtype));
        let (left, right, y) = (Matrix::new(left, k), Matrix::new(right, n), gpu.fresh(m * n, dtype));
        let out = Matrix::new(y, n);
        matmul.run(&gpu.stream, &Product { left, right, out, add: None, epilogue: Epilogue::None }).unwrap();
        let wrong = gpu.get(y).into_iter().find(|sum| *sum != 1.0);
        assert_eq!(wrong, None, "{dtype}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn product_runs_on_any_thread_at_any_alignment() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let (m, n, k) = (24, 40, 56);
    let (a, b, biases) = (values(m * k, 1), values(k * n, 2), values(n + 16, 3));
    let [a64, b64, bias64] = [&a, &b, &biases].map(|v| rounded(v, DType::Bf16));
    let product = fp64::matmul(&a64, &b64, k, n);
    let [a, b, biases] = [&a, &b, &biases].map(|v| gpu.put(v, DType::Bf16));
    let y = gpu.fresh(m * n, DType::Bf16);
    // Aligned to 256, 32 and 16 bytes, with the same shapes.
    for start in [0, 16, 8] {
        let epilogue = Epilogue::Bias(biases.slice(start..start + n));
        let (left, right, out) = (Matrix::new(a, k), Matrix::new(b, n), Matrix::new(y, n));
        let product_of_bias = Product { left, right, out, add: None, epilogue };
        // A new thread has no context.
        std::thread::scope(|scope| {
            scope.spawn(|| matmul.run(&gpu.stream, &product_of_bias)).join().unwrap().unwrap();
        });
        let want: Vec<f64> = product.iter().enumerate().map(|(i, v)| v + bias64[start + i % n]).collect();
        close(&gpu.get(y), &want, tolerance(DType::Bf16), &format!("bias from {start} on"));
    }
}

/// A unit's flat parameter starts at multiples of 32 bytes at some stages, and at larger ones at others.
#[test]
#[ignore = "needs a CUDA device"]
fn bits_are_the_same_at_all_places_that_units_have() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let (m, n, k) = (24, 40, 56);
    let right = Matrix::new(gpu.put(&values(k * n, 2), DType::Bf16), n);
    let at = |start: usize| {
        let a = [vec![0.0; start], values(m * k, 1)].concat();
        let left = Matrix::new(gpu.put(&a, DType::Bf16).slice(start..a.len()), k);
        let sum = gpu.zeros(m * n).erase();
        let out = Matrix::new(sum, n);
        matmul.run(&gpu.stream, &Product { left, right, out, add: Some(out), epilogue: Epilogue::None }).unwrap();
        gpu.get(sum)
    };
    assert!(at(0) == at(16));
}

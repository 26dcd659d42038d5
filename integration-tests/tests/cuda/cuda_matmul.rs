//! Products by cuBLASLt against fp64: transposition, strides, sums onto what is there, biases and GELU.

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
            // Where transposed, memory holds [k, m] and [n, k].
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

            // In fp32, onto what is there: the gradient of a weight.
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
    assert!(got.chunks(stride).all(|r| r[n..].iter().all(|v| *v == 9.0)), "what lies between rows is left alone");
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

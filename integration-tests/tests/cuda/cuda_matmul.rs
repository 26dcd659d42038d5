//! Products by cuBLASLt against fp64: transposition, strides, accumulation, biases and GELU.

use std::path::{Path, PathBuf};
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::cuda::CudaStream;
use zero_alloc::device::{AnySlice, DType};
use zero_kernels::cuda::CudaKernels;
use zero_kernels::{Kernels, NewtonSchulz, OrthogonaliseArgs, reference};
use zero_models::cuda::OpError;
use zero_models::cuda::matmul::{
    CublasLtProducts, Epilogue, LibraryError, Matmul, Matrix, Product, Timing,
};

use crate::fp64;
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};

fn matmul(gpu: &Gpu) -> Matmul {
    Matmul::new(&gpu.device, gpu.fresh(1 << 20, DType::F32)).unwrap()
}

fn run(gpu: &Gpu, matmul: &Matmul, product: Product) {
    matmul.run(&gpu.stream, &product).unwrap();
}

/// `values` on the device, in rows of `cols`.
fn matrix(gpu: &Gpu, values: &[f32], cols: usize, dtype: DType) -> Matrix {
    Matrix::new(gpu.put(values, dtype), cols)
}

/// Rows with a bias.
fn biased(product: &[f64], bias: &[f64]) -> Vec<f64> {
    let bias = bias.iter().cycle();
    product.iter().zip(bias).map(|(v, bias)| v + bias).collect()
}

fn check(gpu: &Gpu, got: AnySlice, want: &[f64], tolerance: f64, what: &str) {
    close(&gpu.get(got), want, tolerance, what);
}

/// Products that choose the candidate with this index and keep the choice in `folder`.
fn timed(gpu: &Gpu, folder: &Path, candidate: usize) -> Matmul {
    matmul(gpu).with_timing(Some(Timing::at(folder, &gpu.pool).prefer(candidate)))
}

/// Computes `1 + left right` in fp32, in place, from the same values each time.
fn added(gpu: &Gpu, matmul: &Matmul) -> Vec<u32> {
    try_added(gpu, matmul).unwrap()
}

fn try_added(gpu: &Gpu, matmul: &Matmul) -> Result<Vec<u32>, OpError> {
    let m = 24;
    let n = 40;
    let k = 320;
    let left = matrix(gpu, &values(m * k, 1), k, DType::Bf16);
    let right = matrix(gpu, &values(k * n, 2), n, DType::Bf16);
    let sum = gpu.floats(&vec![1.0; m * n]).erase();
    let product = Product::new(left, right, Matrix::new(sum, n)).onto_out();
    matmul.run(&gpu.stream, &product)?;
    Ok(gpu.get(sum).into_iter().map(f32::to_bits).collect())
}

/// The files of a folder.
fn files(folder: &Path) -> Vec<(PathBuf, String)> {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    files
        .map(|path| (path.clone(), std::fs::read_to_string(path).unwrap()))
        .collect()
}

#[test]
#[ignore = "needs a CUDA device"]
fn chosen_algorithm_is_used_and_kept() {
    let gpu = Gpu::open();
    let mut bits = Vec::new();
    for candidate in 0..3 {
        let folder = tempfile::tempdir().unwrap();
        let chosen = added(&gpu, &timed(&gpu, folder.path(), candidate));
        let kept = files(folder.path());
        assert_eq!(kept.len(), 1);
        assert!(
            kept[0].1.contains(gpu.device.name())
                && kept[0].1.contains("[24, 320] x [320, 40], bf16 to fp32")
        );
        // A later process uses the kept choice, although it would choose another one, and leaves
        // the file as it is.
        assert!(
            added(&gpu, &timed(&gpu, folder.path(), candidate + 1)) == chosen,
            "{candidate}"
        );
        assert_eq!(files(folder.path()), kept);
        if candidate == 0 {
            assert!(
                added(&gpu, &matmul(&gpu)) == chosen,
                "the library's first choice"
            );
        }
        // A damaged file is measured anew and replaced.
        std::fs::write(&kept[0].0, &kept[0].1[..100]).unwrap();
        assert!(
            added(&gpu, &timed(&gpu, folder.path(), candidate)) == chosen,
            "{candidate}"
        );
        assert_eq!(files(folder.path()), kept);
        bits.push(chosen);
    }

    // The stand-in's candidates differ in the order of their sums.
    assert!(gpu.is_real() || (bits[0] != bits[1] && bits[1] != bits[2] && bits[0] != bits[2]));
}

#[test]
#[ignore = "needs a CUDA device"]
fn choice_that_cannot_be_kept_is_the_first() {
    let gpu = Gpu::open();
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(added(&gpu, &timed(&gpu, file.path(), 1)) == added(&gpu, &matmul(&gpu)));
}

#[test]
#[ignore = "needs a CUDA device"]
fn choice_without_memory_to_measure_is_the_first_and_kept() {
    let gpu = Gpu::open();
    let folder = tempfile::tempdir().unwrap();
    let full = Pool::new(gpu.device.clone(), 0);
    let unmeasured = matmul(&gpu).with_timing(Some(Timing::at(folder.path(), &full).prefer(1)));
    let first = added(&gpu, &matmul(&gpu));
    assert!(added(&gpu, &unmeasured) == first);
    let kept = files(folder.path());
    assert!(
        kept.len() == 1 && kept[0].1.contains("no memory"),
        "{kept:?}"
    );
    assert!(
        added(&gpu, &timed(&gpu, folder.path(), 1)) == first,
        "also with memory"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn wait_for_a_locked_choice_has_a_limit() {
    let gpu = Gpu::open();
    let folder = tempfile::tempdir().unwrap();
    let chosen = added(&gpu, &timed(&gpu, folder.path(), 1));
    let path = files(folder.path()).remove(0).0;
    let measuring = std::fs::File::create(&path).unwrap();
    measuring.lock().unwrap();
    let limit = Duration::from_millis(20);
    let late = matmul(&gpu).with_timing(Some(
        Timing::at(folder.path(), &gpu.pool)
            .prefer(1)
            .lock_limit(limit),
    ));
    let error = try_added(&gpu, &late).unwrap_err();
    assert!(
        matches!(&error, OpError::ChoiceLocked { limit: got, .. } if *got == limit),
        "{error}"
    );
    assert!(
        error.to_string().contains(path.to_str().unwrap()),
        "{error}"
    );
    measuring.unlock().unwrap();
    assert!(added(&gpu, &late) == chosen, "free again");
}

#[test]
#[ignore = "needs a CUDA device"]
fn nothing_is_measured_in_a_recording() {
    let gpu = Gpu::open();
    let folder = tempfile::tempdir().unwrap();
    let matmul = timed(&gpu, folder.path(), 1);
    let [left, right, out] = [1, 2, 3].map(|seed| matrix(&gpu, &values(64, seed), 8, DType::Bf16));
    let product = Product::new(left, right, out);

    let mut ran = Ok(());
    let enqueue = || {
        ran = matmul.run(&gpu.stream, &product);
        Ok(())
    };

    drop(gpu.stream.capture(enqueue).unwrap());
    ran.unwrap();
    assert!(folder.path().read_dir().unwrap().next().is_none());
    run(&gpu, &matmul, product);
    assert_eq!(files(folder.path()).len(), 1, "measured by the next run");
}

/// A product that reads nothing that it writes is measured on its own result.
#[test]
#[ignore = "needs a CUDA device"]
fn fused_or_apart_is_measured_and_kept() {
    let gpu = Gpu::open();
    let folder = tempfile::tempdir().unwrap();
    let m = 56;
    let n = 40;
    let k = 24;
    let left = matrix(&gpu, &values(m * k, 1), k, DType::Bf16).t();
    let right = matrix(&gpu, &values(m * n, 2), n, DType::Bf16);
    let dw = gpu.fresh(k * n, DType::Bf16);
    let db = gpu.fresh(n, DType::Bf16);
    let fused = Product::new(left, right, Matrix::new(dw, n)).with(Epilogue::BiasGradient(db));
    let plain = fused.with(Epilogue::None);

    let mut runs = 0;
    let mut faster = |matmul: &Matmul| {
        let apart = |stream: &CudaStream| {
            runs += 1;
            matmul.run(stream, &plain)
        };
        (matmul.is_faster(&gpu.stream, &fused, apart).unwrap(), runs)
    };

    if !matmul(&gpu).supports(&fused).unwrap() {
        return;
    }
    assert_eq!(faster(&matmul(&gpu)), (false, 0), "nothing is measured");
    let first = timed(&gpu, folder.path(), 1);
    let (answer, runs) = faster(&first);
    assert!(answer && runs > 1);
    assert_eq!(faster(&first), (true, runs), "known");
    assert_eq!(faster(&timed(&gpu, folder.path(), 0)), (true, runs), "kept");
    assert!(!faster(&timed(&gpu, tempfile::tempdir().unwrap().path(), 0)).0);
}

#[test]
#[ignore = "needs a CUDA device"]
fn products_of_all_transpositions() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let m = 24;
    let n = 40;
    let k = 56;

    for dtype in FLOATS {
        let a = values(m * k, 1);
        let b = values(k * n, 2);
        let a64 = rounded(&a, dtype);
        let b64 = rounded(&b, dtype);
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            // A transposed factor is stored as [k, m] or [n, k].
            let factor = |values: &[f32], exact: &[f64], cols, rows, transposed| {
                if transposed {
                    let exact = fp64::transpose(exact, rows);
                    (matrix(&gpu, values, rows, dtype).t(), exact)
                } else {
                    (matrix(&gpu, values, cols, dtype), exact.to_vec())
                }
            };
            let (left, left64) = factor(&a, &a64, k, m, ta);
            let (right, right64) = factor(&b, &b64, n, k, tb);
            let want = fp64::matmul(&left64, &right64, k, n);
            let what = format!("{dtype} {ta} {tb}");
            let y = gpu.fresh(m * n, dtype);
            run(&gpu, &matmul, Product::new(left, right, Matrix::new(y, n)));
            check(&gpu, y, &want, tolerance(dtype), &what);

            // Added to existing fp32 values: the gradient of a weight.
            let sum = gpu.floats(&vec![3.0; m * n]).erase();
            let product = Product::new(left, right, Matrix::new(sum, n)).onto_out();
            run(&gpu, &matmul, product);
            let want: Vec<f64> = want.iter().map(|v| v + 3.0).collect();
            check(&gpu, sum, &want, 2e-6, &format!("{what}, added"));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn rows_further_apart_than_they_are_long() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let m = 16;
    let n = 50;
    let k = 32;
    let stride = 64;
    let a = values(m * k, 1);
    let b = values(n * k, 2);
    let want = fp64::matmul(
        &rounded(&a, DType::Bf16),
        &fp64::transpose(&rounded(&b, DType::Bf16), k),
        k,
        n,
    );
    let y = gpu.put(&vec![9.0; m * stride], DType::Bf16);
    let left = matrix(&gpu, &a, k, DType::Bf16);
    let right = matrix(&gpu, &b, k, DType::Bf16).t();
    let out = Matrix::with_stride(y, n, stride);

    run(&gpu, &matmul, Product::new(left, right, out));

    let got = gpu.get(y);
    let real: Vec<f32> = got.chunks(stride).flat_map(|r| r[..n].to_vec()).collect();
    let limit = tolerance(DType::Bf16);
    close(&real, &want, limit, "the columns that count");
    assert!(
        got.chunks(stride).all(|r| r[n..].iter().all(|v| *v == 9.0)),
        "elements between rows are unchanged"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn biases_residuals_and_gelu_in_the_same_pass() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let m = 24;
    let n = 40;
    let k = 56;

    for dtype in FLOATS {
        let a = values(m * k, 1);
        let b = values(k * n, 2);
        let bias = values(n, 3);
        let x = values(m * n, 4);
        let [a64, b64, bias64, x64] = [&a, &b, &bias, &x].map(|v| rounded(v, dtype));
        let product = fp64::matmul(&a64, &b64, k, n);
        let with_bias = biased(&product, &bias64);
        let check = |got, want: &[f64], what: &str| {
            check(
                &gpu,
                got,
                want,
                tolerance(dtype),
                &format!("{dtype}: {what}"),
            );
        };
        let left = matrix(&gpu, &a, k, dtype);
        let right = matrix(&gpu, &b, n, dtype);
        let bias = gpu.put(&bias, dtype);
        let y = gpu.fresh(m * n, dtype);
        let plain = Product::new(left, right, Matrix::new(y, n)).with(Epilogue::Bias(bias));
        run(&gpu, &matmul, plain);
        check(y, &with_bias, "bias");
        let residual = Product {
            add: Some(matrix(&gpu, &x, n, dtype)),
            ..plain
        };
        run(&gpu, &matmul, residual);
        check(y, &biased(&with_bias, &x64), "bias and residual");

        if dtype == DType::F32 {
            // The model does not use it, since the accuracy of the library's GELU is not specified.
            continue;
        }
        let input = gpu.fresh(m * n, dtype);
        let forward = plain.with(Epilogue::BiasGelu { bias, input });
        if !matmul.supports(&forward).unwrap() {
            let error = matmul.run(&gpu.stream, &forward).unwrap_err();
            assert!(
                matches!(error, OpError::Library(LibraryError::NoAlgorithm { .. })),
                "{error}"
            );
            continue;
        }
        run(&gpu, &matmul, forward);
        check(input, &with_bias, "GELU's input");
        let want: Vec<f64> = with_bias.iter().map(|v| fp64::gelu(*v)[0]).collect();
        check(y, &want, "GELU");
        let slopes = gpu.get(input).into_iter().map(|v| fp64::gelu(v.into())[1]);
        let want: Vec<f64> = product.iter().zip(slopes).map(|(p, s)| p * s).collect();
        run(&gpu, &matmul, plain.with(Epilogue::GeluBackward { input }));
        check(y, &want, "GELU backward");
    }
}

/// The gradients of a weight and of its bias.
#[test]
#[ignore = "needs a CUDA device"]
fn bias_gradient_beside_a_weight_gradient() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let m = 56;
    let n = 40;
    let k = 24;

    for (dtype, out) in [
        (DType::Bf16, DType::Bf16),
        (DType::F16, DType::F16),
        (DType::Bf16, DType::F32),
    ] {
        let x = values(m * k, 1);
        let dy = values(m * n, 2);
        let x64 = rounded(&x, dtype);
        let dy64 = rounded(&dy, dtype);
        let sums: Vec<f64> = (0..n)
            .map(|j| dy64.iter().skip(j).step_by(n).sum())
            .collect();
        let dw = gpu.fresh(k * n, out);
        let db = gpu.fresh(n, out);
        let left = matrix(&gpu, &x, k, dtype).t();
        let right = matrix(&gpu, &dy, n, dtype);
        let gradient = Matrix::new(dw, n);
        let product = Product::new(left, right, gradient).with(Epilogue::BiasGradient(db));
        if !matmul.supports(&product).unwrap() {
            assert!(gpu.is_real(), "the stand-in supports it");
            continue;
        }
        run(&gpu, &matmul, product);
        let name = format!("{dtype} to {out}");
        let want = fp64::matmul(&fp64::transpose(&x64, k), &dy64, m, n);
        check(&gpu, dw, &want, tolerance(out), &name);
        check(&gpu, db, &sums, tolerance(out), &name);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn sums_are_fp32_until_they_are_stored() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    // Few results of long sums, which the library tends to split among blocks.
    let m = 64;
    let n = 64;
    let k = 8192;

    for (dtype, large) in [(DType::Bf16, 256.0), (DType::F16, 2048.0)] {
        // large + 1 has one bit more than the 16-bit type holds; the last term subtracts `large`.
        let term = |i: usize| match i {
            0 => large,
            1 => 1.0,
            _ if i == k - 1 => -large,
            _ => 0.0,
        };
        let b: Vec<f32> = (0..k * n).map(|i| term(i / n)).collect();
        let left = matrix(&gpu, &vec![1.0; m * k], k, dtype);
        let right = matrix(&gpu, &b, n, dtype);
        let y = gpu.fresh(m * n, dtype);
        run(&gpu, &matmul, Product::new(left, right, Matrix::new(y, n)));
        let wrong = gpu.get(y).into_iter().find(|sum| *sum != 1.0);
        assert_eq!(wrong, None, "{dtype}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn product_runs_on_any_thread_at_any_alignment() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let m = 24;
    let n = 40;
    let k = 56;
    let a = values(m * k, 1);
    let b = values(k * n, 2);
    let biases = values(n + 16, 3);
    let [a64, b64, bias64] = [&a, &b, &biases].map(|v| rounded(v, DType::Bf16));
    let product = fp64::matmul(&a64, &b64, k, n);
    let [a, b, biases] = [&a, &b, &biases].map(|v| gpu.put(v, DType::Bf16));
    let y = gpu.fresh(m * n, DType::Bf16);

    // Aligned to 256, 32 and 16 bytes, with the same shapes.
    for start in [0, 16, 8] {
        let epilogue = Epilogue::Bias(biases.slice(start..start + n));
        let left = Matrix::new(a, k);
        let right = Matrix::new(b, n);
        let out = Matrix::new(y, n);
        let product_of_bias = Product::new(left, right, out).with(epilogue);
        // A new thread has no context.
        std::thread::scope(|scope| {
            scope
                .spawn(|| run(&gpu, &matmul, product_of_bias))
                .join()
                .unwrap();
        });
        let want = biased(&product, &bias64[start..start + n]);
        let what = format!("bias from {start} on");
        check(&gpu, y, &want, tolerance(DType::Bf16), &what);
    }
}

/// A unit's flat parameter starts at multiples of 32 bytes at some stages, and at larger ones at
/// others.
#[test]
#[ignore = "needs a CUDA device"]
fn bits_are_the_same_at_all_places_that_units_have() {
    let gpu = Gpu::open();
    let matmul = matmul(&gpu);
    let m = 24;
    let n = 40;
    let k = 56;
    let right = matrix(&gpu, &values(k * n, 2), n, DType::Bf16);

    let at = |start: usize| {
        let a = [vec![0.0; start], values(m * k, 1)].concat();
        let left = Matrix::new(gpu.put(&a, DType::Bf16).slice(start..a.len()), k);
        let sum = gpu.zeros(m * n).erase();
        let out = Matrix::new(sum, n);
        run(&gpu, &matmul, Product::new(left, right, out).onto_out());
        gpu.get(sum)
    };

    assert!(at(0) == at(16));
}

/// Newton-Schulz iterations by the library's products: within the rounding of bf16 of those in
/// fp64.
#[test]
#[ignore = "needs a CUDA device"]
fn newton_schulz_is_near_fp64() {
    let gpu = Gpu::open();
    let products = CublasLtProducts::load(&gpu.device).unwrap();
    let kernels = CudaKernels::new(&gpu.device).unwrap();
    let kernels = kernels.with_products(products);
    for (rows, cols) in [(48, 64), (64, 48), (32, 32), (33, 70)] {
        let rule = NewtonSchulz::default();
        let mut expected = values(rows * cols, 3);
        let matrix = gpu.floats(&expected);
        let scratch = kernels.orthogonalise_scratch_elems(rows, cols);
        let args = OrthogonaliseArgs {
            values: matrix,
            rows,
            cols,
            row_stride: cols,
            scratch: gpu.fresh(scratch, DType::F32).typed().unwrap(),
            rule,
            scale: 0.5,
        };
        kernels.orthogonalise(&gpu.stream, args).unwrap();
        reference::orthogonalise(&mut expected, [rows, cols], rule, 0.5);
        let got = gpu.get(matrix.erase());
        let norm = |values: Vec<f32>| values.iter().map(|x| x * x).sum::<f32>().sqrt();
        let differences = got.iter().zip(&expected).map(|(a, b)| a - b);
        let error = norm(differences.collect()) / norm(expected.clone());
        assert!(error < 0.03, "{rows} x {cols}: {error} of the norm");
    }
}

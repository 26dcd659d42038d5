//! Newton-Schulz on CUDA with plain products: the bits of a plain loop that rounds to bf16 where
//! the device does, at any stride and alignment.

use std::sync::Arc;

use half::bf16;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_alloc::device::{AnySlice, Device, DeviceSlice};
use zero_kernels::cuda::{CudaKernels, MatrixProduct, MatrixProducts};
use zero_kernels::{KernelError, Kernels, NewtonSchulz, OrthogonaliseArgs, reference};

use crate::Rig;
use crate::common::{assert_same, values};
use crate::rig::LIMIT;

/// Sums in fp64, so that their order does not matter.
#[derive(Debug)]
struct PlainProducts(CudaDevice);

fn element(of: &[bf16], [row, col]: [usize; 2], [rows, cols]: [usize; 2], transposed: bool) -> f64 {
    let at = match transposed {
        false => row * cols + col,
        true => col * rows + row,
    };
    f64::from(of[at])
}

/// `scale left right + add_scale add`.
fn product(
    [m, n, k]: [usize; 3],
    [left, right]: [&[bf16]; 2],
    [of_left, of_right]: [bool; 2],
    scale: f32,
    add: Option<(&[bf16], f32)>,
) -> Vec<bf16> {
    let result = |i: usize, j: usize| {
        let terms = (0..k).map(|t| {
            element(left, [i, t], [m, k], of_left) * element(right, [t, j], [k, n], of_right)
        });
        let added = add.map_or(0.0, |(add, scale)| {
            f64::from(scale) * f64::from(add[i * n + j])
        });
        bf16::from_f64(f64::from(scale) * terms.sum::<f64>() + added)
    };
    (0..m * n).map(|at| result(at / n, at % n)).collect()
}

impl PlainProducts {
    fn read(
        &self,
        stream: &CudaStream,
        slice: DeviceSlice<bf16>,
    ) -> Result<Vec<bf16>, KernelError> {
        let mut values = vec![bf16::ZERO; slice.len()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.0.download(stream, slice.erase(), bytes, LIMIT)?;
        Ok(values)
    }
}

// SAFETY: copies of the arguments' memory on the stream.
unsafe impl MatrixProducts for PlainProducts {
    fn workspace_bytes(&self) -> usize {
        1000
    }

    fn enqueue(
        &self,
        stream: &CudaStream,
        of: &MatrixProduct,
        workspace: AnySlice,
    ) -> Result<(), KernelError> {
        assert_eq!(workspace.len(), self.workspace_bytes());
        assert_eq!(workspace.as_ptr().addr() % 256, 0);
        let left = self.read(stream, of.left)?;
        let right = self.read(stream, of.right)?;
        let add = of.add.map(|add| self.read(stream, add)).transpose()?;
        let add = add.as_ref().map(|add| (&add[..], of.add_scale));
        let out = product(of.sizes, [&left, &right], of.transposed, of.scale, add);
        let bytes = bytemuck::cast_slice(&out);
        Ok(self.0.upload(stream, bytes, of.out.erase(), LIMIT)?)
    }
}

/// The operation with the roundings of the device.
fn plain(matrix: &[f32], [rows, cols]: [usize; 2], rule: NewtonSchulz, scale: f32) -> Vec<f32> {
    let mut x: Vec<bf16> = matrix.iter().map(|x| bf16::from_f32(*x)).collect();
    let squares = x.iter().map(|x| f64::from(*x).powi(2));
    let norm = squares.sum::<f64>().sqrt().max(rule.eps);
    let finite = x.iter().all(|x| x.is_finite());
    for x in &mut x {
        *x = match finite {
            true => bf16::from_f32((f64::from(*x) / norm) as f32),
            false => bf16::NAN,
        };
    }
    let short = rows.min(cols);
    let wide = rows <= cols;
    let [a, b, c] = rule.coefficients.map(|coefficient| coefficient as f32);
    for _ in 0..rule.steps {
        let sizes = [short, short, rows.max(cols)];
        let gram = product(sizes, [&x, &x], [!wide, wide], 1.0, None);
        let square = [&gram[..], &gram];
        let polynomial = product([short; 3], square, [false; 2], c, Some((&gram, b)));
        let factors = match wide {
            true => [&polynomial[..], &x],
            false => [&x, &polynomial[..]],
        };
        x = product([rows, cols, short], factors, [false; 2], 1.0, Some((&x, a)));
    }
    x.iter().map(|x| x.to_f32() * scale).collect()
}

fn with_products(rig: &Rig<CudaDevice>) -> CudaKernels {
    let products = Arc::new(PlainProducts(rig.device.clone()));
    CudaKernels::new(&rig.device)
        .unwrap()
        .with_products(products)
}

/// The result for a matrix whose rows are `gap` elements apart, from element `from` of its memory.
fn on_cuda(
    rig: &Rig<CudaDevice>,
    values: &[f32],
    [rows, cols]: [usize; 2],
    [gap, from]: [usize; 2],
    (rule, scale): (NewtonSchulz, f32),
) -> Vec<f32> {
    let kernels = with_products(rig);
    let row_stride = cols + gap;
    // Nothing else may be read or written.
    let mut apart = vec![f32::NAN; (rows - 1) * row_stride + cols];
    for (to, row) in apart.chunks_mut(row_stride).zip(values.chunks(cols)) {
        to[..cols].copy_from_slice(row);
    }
    let matrix = rig.buffer(&apart, from);
    let elems = kernels.orthogonalise_scratch_elems(rows, cols);
    let scratch = rig.poisoned::<f32>(elems, from);
    let args = OrthogonaliseArgs {
        values: matrix.slice(),
        rows,
        cols,
        row_stride,
        scratch: scratch.slice(),
        rule,
        scale,
    };
    kernels.orthogonalise(&rig.stream, args).unwrap();
    scratch.read();
    let result = matrix.read();
    let of_row = |row: &[f32]| row[..cols].to_vec();
    for between in result.chunks(row_stride).filter_map(|row| row.get(cols..)) {
        assert!(between.iter().all(|x| x.is_nan()));
    }
    result.chunks(row_stride).flat_map(of_row).collect()
}

pub fn bits_are_those_of_a_plain_loop(rig: &Rig<CudaDevice>) {
    let rule = NewtonSchulz::default();
    let shapes = [
        [1, 1],
        [1, 9],
        [9, 1],
        [16, 24],
        [24, 16],
        [7, 33],
        [40, 40],
    ];
    for (nth, shape) in shapes.into_iter().enumerate() {
        let values = values::<f32>(shape[0] * shape[1], nth as u64, false);
        for (steps, scale) in [(0, 1.0), (1, 0.5), (5, 3.0)] {
            let rule = NewtonSchulz { steps, ..rule };
            let expected = plain(&values, shape, rule, scale);
            for place in [[0, 0], [8, 4], [3, 1]] {
                let ours = on_cuda(rig, &values, shape, place, (rule, scale));
                assert_same(
                    &format!("{shape:?}, {steps} steps, {place:?}"),
                    &ours,
                    &expected,
                );
            }
        }
        // 15 products, each rounded to bf16's 8 bits.
        let mut exact = values.clone();
        reference::orthogonalise(&mut exact, shape, rule, 1.0);
        let ours = on_cuda(rig, &values, shape, [0, 0], (rule, 1.0));
        let norm = |values: Vec<f32>| values.iter().map(|x| x * x).sum::<f32>().sqrt();
        let differences = ours.iter().zip(&exact).map(|(a, b)| a - b);
        let error = norm(differences.collect()) / norm(exact.clone());
        assert!(error < 0.03, "{shape:?}: {error} from fp64");
    }
}

/// A matrix with an element that is not finite becomes NaN, and one of zeros stays one.
pub fn extremes(rig: &Rig<CudaDevice>) {
    let rule = NewtonSchulz::default();
    let run = |values: &[f32]| on_cuda(rig, values, [4, 6], [1, 0], (rule, 1.0));
    assert_eq!(run(&[0.0; 24]), [0.0; 24]);
    for special in [f32::NAN, f32::INFINITY, f32::MAX] {
        let mut values = [1.0; 24];
        values[13] = special;
        assert!(run(&values).iter().all(|x| x.is_nan()), "{special}");
    }
    for scale in [1e-30, 1e30] {
        let values = values::<f32>(24, 1, false)
            .iter()
            .map(|x| x * scale)
            .collect::<Vec<_>>();
        assert_same("a scale", &run(&values), &plain(&values, [4, 6], rule, 1.0));
    }
}

pub fn refused_without_products(rig: &Rig<CudaDevice>) {
    let matrix = rig.buffer(&[1f32; 6], 0);
    let with = with_products(rig);
    let without = CudaKernels::new(&rig.device).unwrap();
    let scratch = rig.poisoned::<f32>(with.orthogonalise_scratch_elems(2, 3), 0);
    let run = |kernels: &CudaKernels, scratch: DeviceSlice<f32>| {
        let args = OrthogonaliseArgs {
            values: matrix.slice(),
            rows: 2,
            cols: 3,
            row_stride: 3,
            scratch,
            rule: NewtonSchulz::default(),
            scale: 1.0,
        };
        kernels
            .orthogonalise(&rig.stream, args)
            .map_err(|error| error.to_string())
    };
    let all = scratch.slice();
    assert!(with.can_orthogonalise().is_ok() && without.can_orthogonalise().is_err());
    let error = run(&without, all).unwrap_err();
    assert!(error.contains("CudaKernels::with_products"), "{error}");
    let error = run(&with, all.slice(1..all.len())).unwrap_err();
    assert!(
        error.contains("orthogonalise: scratch: expected"),
        "{error}"
    );
}

//! The test oracles: each operation as a plain loop with the signature of its [`host`](crate::host)
//! version. Conversions are those of crate `half`.

use half::{bf16, f16};
use zero_alloc::device::DType;

use crate::adam::AdamSlices;
use crate::check::same_len;
use crate::{
    AdamHyper, AdamScalars, Float, GradStats, KernelError, NewtonSchulz, Segments, StepScalars,
};

fn widen<T: Float>(x: T) -> f32 {
    let bytes = bytemuck::bytes_of(&x);
    match T::DTYPE {
        DType::Bf16 => bytemuck::pod_read_unaligned::<bf16>(bytes).to_f32(),
        DType::F16 => bytemuck::pod_read_unaligned::<f16>(bytes).to_f32(),
        DType::F32 => bytemuck::pod_read_unaligned::<f32>(bytes),
        other => unreachable!("{other} is no `Float`, a sealed trait"),
    }
}

fn narrow<T: Float>(x: f32) -> T {
    match T::DTYPE {
        DType::Bf16 => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&bf16::from_f32(x))),
        DType::F16 => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&f16::from_f32(x))),
        DType::F32 => bytemuck::pod_read_unaligned(bytemuck::bytes_of(&x)),
        other => unreachable!("{other} is no `Float`, a sealed trait"),
    }
}

/// See [`crate::adam::adam`]: PyTorch's AdamW and Adam, element by element.
///
/// # Errors
/// The slices' lengths differ.
pub fn adam<W: Float, M: Float, G: Float, P: Float>(
    mut slices: AdamSlices<'_, W, M, G, P>,
    scalars: &AdamScalars,
    hyper: &AdamHyper,
) -> Result<(), KernelError> {
    let n = slices.checked_len()?;
    if scalars.skip != 0 {
        return Ok(());
    }
    let weight_decay = hyper.weight_decay as f32;

    for i in 0..n {
        let mut w = widen(slices.weights[i]);
        let mut m = widen(slices.first_moment[i]);
        let mut v = widen(slices.second_moment[i]);
        let mut g = widen(slices.grad[i]) * scalars.grad_scale;
        if hyper.decoupled {
            w *= 1.0 - scalars.lr * weight_decay;
        } else {
            g = weight_decay.mul_add(w, g);
        }
        m = scalars.one_minus_beta1.mul_add(g - m, m);
        v = (scalars.one_minus_beta2 * g).mul_add(g, v * scalars.beta2);
        w -= scalars.step_size * m / (v.sqrt() / scalars.bias_correction2_sqrt + hyper.eps as f32);
        slices.weights[i] = narrow(w);
        slices.first_moment[i] = narrow(m);
        slices.second_moment[i] = narrow(v);
        if let Some(p) = &mut slices.param_out {
            p[i] = narrow(w);
        }
    }

    Ok(())
}

/// PyTorch's `lerp`.
fn lerp(start: f32, end: f32, weight: f32) -> f32 {
    if weight < 0.5 {
        weight.mul_add(end - start, start)
    } else {
        (weight - 1.0).mul_add(end - start, end)
    }
}

/// The first phase of [`Muon`](crate::Muon): updates the momentum and writes the direction.
///
/// # Errors
/// The lengths differ.
pub fn muon_direction<G: Float>(
    direction: &mut [f32],
    momentum: &mut [f32],
    grad: &[G],
    scalars: &StepScalars,
    nesterov: bool,
) -> Result<(), KernelError> {
    same_len("muon: momentum", direction.len(), momentum.len())?;
    same_len("muon: grad", direction.len(), grad.len())?;
    let [_, to_momentum, to_direction, ..] = scalars.of_rule;
    for i in 0..direction.len() {
        let g = widen(grad[i]) * scalars.grad_scale;
        momentum[i] = lerp(momentum[i], g, to_momentum);
        direction[i] = if nesterov {
            lerp(g, momentum[i], to_direction)
        } else {
            momentum[i]
        };
    }
    Ok(())
}

/// The last phase of [`Muon`](crate::Muon): decays the weights and subtracts the update.
///
/// # Errors
/// The lengths differ.
pub fn muon_apply<P: Float>(
    weights: &mut [f32],
    param_out: Option<&mut [P]>,
    update: &[f32],
    scalars: &StepScalars,
    weight_decay: f32,
) -> Result<(), KernelError> {
    same_len("muon_apply: grad", weights.len(), update.len())?;
    let lr = scalars.of_rule[0];
    for i in 0..weights.len() {
        weights[i] *= 1.0 - lr * weight_decay;
        weights[i] = (-lr).mul_add(update[i], weights[i]);
    }
    match param_out {
        Some(param) => cast(weights, param, 1.0),
        None => Ok(()),
    }
}

/// See [`Kernels::orthogonalise`](crate::Kernels::orthogonalise), of a `[rows, cols]` matrix without
/// gaps: in fp64, so equal to within the rounding of fp32 only.
///
/// # Panics
/// `matrix` does not have `rows * cols` elements.
pub fn orthogonalise(matrix: &mut [f32], [rows, cols]: [usize; 2], rule: NewtonSchulz, scale: f32) {
    assert_eq!(matrix.len(), rows * cols, "elements of the matrix");
    let short = rows.min(cols);
    let long = rows.max(cols);
    let at = |i: usize, j: usize| match rows <= cols {
        true => i * cols + j,
        false => j * cols + i,
    };
    let norm = matrix.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let norm = match norm.sqrt() {
        norm if norm < rule.eps => rule.eps,
        norm => norm,
    };
    let [a, b, c] = rule.coefficients;

    let table = |cols, of: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f64>> {
        let row = |i| (0..cols).map(|j| of(i, j)).collect();
        (0..short).map(row).collect()
    };
    let mut x = table(long, &|i, j| f64::from(matrix[at(i, j)]) / norm);
    for _ in 0..rule.steps {
        let gram = table(short, &|i, j| (0..long).map(|k| x[i][k] * x[j][k]).sum());
        let square = |i: usize, j: usize| (0..short).map(|k| gram[i][k] * gram[k][j]).sum::<f64>();
        let polynomial = table(short, &|i, j| b * gram[i][j] + c * square(i, j));
        let product = |i: usize, j| (0..short).map(|k| polynomial[i][k] * x[k][j]).sum::<f64>();
        x = table(long, &|i, j| a * x[i][j] + product(i, j));
    }
    for (i, row) in x.iter().enumerate() {
        for (j, x) in row.iter().enumerate() {
            matrix[at(i, j)] = (x * f64::from(scale)) as f32;
        }
    }
}

/// See [`crate::host::cast`].
///
/// # Errors
/// The lengths differ.
pub fn cast<S: Float, D: Float>(src: &[S], dst: &mut [D], scale: f32) -> Result<(), KernelError> {
    same_len("cast: dst", src.len(), dst.len())?;
    for i in 0..src.len() {
        dst[i] = narrow(widen(src[i]) * scale);
    }
    Ok(())
}

/// See [`Kernels::cast_rows`](crate::Kernels::cast_rows); each matrix with its stride.
///
/// # Panics
/// A matrix has fewer elements than `rows` and `cols` need.
pub fn cast_rows<S: Float, D: Float>(
    (src, src_stride): (&[S], usize),
    (dst, dst_stride): (&mut [D], usize),
    [rows, cols]: [usize; 2],
    scale: f32,
) {
    for row in 0..rows {
        for col in 0..cols {
            dst[row * dst_stride + col] = narrow(widen(src[row * src_stride + col]) * scale);
        }
    }
}

/// See [`Kernels::pack`](crate::Kernels::pack), of parts of one dtype.
///
/// # Errors
/// `dst` does not have the length of the segments.
pub fn pack<S: Float, D: Float>(
    parts: &[(&[S], usize)],
    segments: Segments,
    dst: &mut [D],
) -> Result<(), KernelError> {
    same_len("pack: dst", segments.len * segments.count, dst.len())?;
    for (i, dst) in dst.iter_mut().enumerate() {
        let elem = segments.start + i / segments.len * segments.stride + i % segments.len;
        let part = parts
            .iter()
            .find(|(part, at)| (*at..at + part.len()).contains(&elem));
        *dst = narrow(part.map_or(0.0, |(part, at)| widen(part[elem - at])));
    }
    Ok(())
}

/// See [`crate::host::accumulate`].
///
/// # Errors
/// The lengths differ.
pub fn accumulate<G: Float>(grad: &[G], acc: &mut [f32]) -> Result<(), KernelError> {
    same_len("accumulate: acc", grad.len(), acc.len())?;
    for i in 0..grad.len() {
        acc[i] += widen(grad[i]);
    }
    Ok(())
}

/// See [`crate::host::grad_stats`]: the same sum in plain order, so equal to within fp64 rounding
/// only.
pub fn grad_stats<G: Float>(grad: &[G]) -> GradStats {
    let mut stats = GradStats::default();
    for &g in grad {
        let g = widen(g);
        if g.is_finite() {
            stats.sum_sq += f64::from(g) * f64::from(g);
        } else {
            stats.nonfinite += 1;
        }
    }
    stats
}

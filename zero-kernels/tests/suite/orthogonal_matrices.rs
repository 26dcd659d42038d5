//! Newton-Schulz on the host: against the loop in fp64, equal bits for all threads, strides and
//! alignments, its singular values, and three steps of `torch.optim.Muon` with products in fp32
//! (tests/data/torch_muon.safetensors, by benches/peers/muon.py).

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use proptest::prelude::*;
use safetensors::SafeTensors;
use zero_alloc::device::{Device, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_kernels::host::{FloatSlice, FloatSliceMut, HostKernels, UpdateSlices, WeightSlices};
use zero_kernels::{
    KernelError, Kernels, MatrixScale, Muon, NewtonSchulz, OrthogonaliseArgs, Rounding, StepPoint,
    StepScalars, UpdateArgs, UpdateRule, Weights, reference,
};

use crate::common::Random;

const LIMIT: Duration = Duration::from_secs(60);

/// The rounding of fp32 in an element of the result: of each of the 15 products two units in the
/// last place of 1, the size of a singular value.
const ROUNDING: f32 = 15.0 * 2.0 / (1 << 24) as f32;

fn stream() -> HostStream {
    HostDevice::new().create_stream("test").unwrap()
}

fn kernels(threads: usize) -> HostKernels {
    HostKernels::new(threads).unwrap()
}

fn typed<T>(memory: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: each caller keeps its memory until the stream is drained.
    unsafe { DeviceSlice::from_raw_parts(memory.as_mut_ptr(), memory.len(), DeviceId::HOST) }
}

/// Values of about a normal distribution.
fn normal(random: &mut Random) -> f32 {
    let uniform = |random: &mut Random| (random.next() >> 40) as f32 / (1 << 24) as f32 - 0.5;
    (0..12).map(|_| uniform(random)).sum()
}

fn matrix(elems: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..elems).map(|_| normal(&mut random)).collect()
}

/// Elements between rows, which nothing may change.
const BETWEEN: f32 = f32::from_bits(0x7fc0_1234);

/// The result for a matrix with `gap` elements between its rows, which starts at element `from` of
/// an allocation, and that nothing else is written.
fn on_host(
    threads: usize,
    values: &[f32],
    [rows, cols]: [usize; 2],
    [gap, from]: [usize; 2],
    rule: NewtonSchulz,
    scale: f32,
) -> Vec<f32> {
    let row_stride = cols + gap;
    let mut memory = vec![BETWEEN; from + rows * row_stride + 1];
    for (row, values) in values.chunks(cols.max(1)).enumerate() {
        memory[from + row * row_stride..][..cols].copy_from_slice(values);
    }
    let elems = match values.len() {
        0 => 0,
        _ => (rows - 1) * row_stride + cols,
    };

    let kernels = kernels(threads);
    let scratch_elems = Kernels::<HostDevice>::orthogonalise_scratch_elems(&kernels, rows, cols);
    let mut scratch = vec![f32::NAN; from + scratch_elems];
    let stream = stream();
    let args = OrthogonaliseArgs {
        values: typed(&mut memory[from..from + elems]),
        rows,
        cols,
        row_stride,
        scratch: typed(&mut scratch[from..]),
        rule,
        scale,
    };
    kernels.orthogonalise(&stream, args).unwrap();
    stream.synchronize(LIMIT).unwrap();

    let is_own = |at: usize| {
        let in_range = (from..from + elems).contains(&at);
        in_range && (at - from) % row_stride < cols
    };
    let others = (0..memory.len()).filter(|at| !is_own(*at));
    assert!(
        others
            .into_iter()
            .all(|at| memory[at].to_bits() == BETWEEN.to_bits()),
        "an element of no row was written"
    );
    let own = (0..memory.len()).filter(|at| is_own(*at));
    own.map(|at| memory[at]).collect()
}

/// A matrix without gaps on one thread.
fn plain(values: &[f32], shape: [usize; 2]) -> Vec<f32> {
    on_host(1, values, shape, [0, 0], NewtonSchulz::default(), 1.0)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max)
}

/// Shapes of one panel and several, of which the last is not whole, and padded ones.
const SHAPES: [[usize; 2]; 8] = [
    [1, 1],
    [1, 9],
    [9, 1],
    [5, 7],
    [100, 60],
    [97, 193],
    [200, 96],
    [256, 300],
];

#[test]
fn the_loop_in_fp64_agrees() {
    for (nth, shape) in SHAPES.into_iter().enumerate() {
        let values = matrix(shape[0] * shape[1], nth as u64);
        let rule = NewtonSchulz::default();
        let mut expected = values.clone();
        reference::orthogonalise(&mut expected, shape, rule, 0.5);
        let ours = on_host(2, &values, shape, [3, 1], rule, 0.5);
        let distance = distance(&ours, &expected);
        println!("{shape:?}: {distance:e}");
        assert!(distance <= 0.5 * ROUNDING, "{shape:?}: {distance:e}");
    }
}

#[test]
fn threads_strides_and_alignment_change_no_bit() {
    let rule = NewtonSchulz::default();
    for (nth, shape) in SHAPES.into_iter().enumerate() {
        let values = matrix(shape[0] * shape[1], nth as u64);
        let expected = bits(&plain(&values, shape));
        for threads in [1, 2, 3] {
            for place in [[0, 1], [1, 0], [5, 3], [64, 7]] {
                let ours = on_host(threads, &values, shape, place, rule, 1.0);
                assert_eq!(
                    bits(&ours),
                    expected,
                    "{shape:?}, {threads} threads, {place:?}"
                );
            }
        }
    }
}

/// Its own adjoint, where faer has other products.
#[test]
fn a_transposed_matrix_has_the_transposed_result() {
    let [rows, cols] = [60, 130];
    let transposed = |values: &[f32], rows: usize, cols: usize| -> Vec<f32> {
        let at = |i: usize| values[i % rows * cols + i / rows];
        (0..rows * cols).map(at).collect()
    };
    let values = matrix(rows * cols, 1);
    let wide = plain(&values, [rows, cols]);
    let tall = plain(&transposed(&values, rows, cols), [cols, rows]);
    assert!(distance(&transposed(&wide, rows, cols), &tall) <= ROUNDING);
}

#[test]
fn special_matrices() {
    let rule = NewtonSchulz::default();
    for shape in [[6, 9], [9, 6]] {
        let values = matrix(54, 1);
        assert_eq!(plain(&[0.0; 54], shape), [0.0; 54]);
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = values.clone();
            values[13] = special;
            let ours = on_host(2, &values, shape, [2, 0], rule, 1.0);
            assert!(ours.iter().all(|x| x.is_nan()), "{special}");
        }
        // Norms beyond fp32's range, and small ones: not below eps, where the result would be
        // smaller.
        let expected = plain(&values, shape);
        for scale in [1e38, 1e-5] {
            let greatest = values.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
            let scaled: Vec<f32> = values.iter().map(|x| x / greatest * scale).collect();
            assert!(
                distance(&plain(&scaled, shape), &expected) <= ROUNDING,
                "{scale}"
            );
        }
        // Below eps the matrix is divided by eps: here 1e-12 of it.
        let tiny: Vec<f32> = values.iter().map(|x| x * 1e-19).collect();
        let mut expected = tiny.clone();
        reference::orthogonalise(&mut expected, shape, rule, 1.0);
        let greatest = expected.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
        assert!(greatest < 1e-8 && distance(&plain(&tiny, shape), &expected) <= 1e-6 * greatest);
    }
    for empty in [[0, 5], [5, 0], [0, 0]] {
        assert!(on_host(1, &[], empty, [0, 0], rule, 1.0).is_empty());
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let mut values = vec![0.0; 23];
    let mut scratch = vec![0.0; 100];
    let stream = stream();
    let good = OrthogonaliseArgs {
        values: typed(&mut values),
        rows: 3,
        cols: 5,
        row_stride: 9,
        scratch: typed(&mut scratch),
        rule: NewtonSchulz::default(),
        scale: 1.0,
    };
    let refused = |args: OrthogonaliseArgs| {
        let error: KernelError = kernels(1).orthogonalise(&stream, args).unwrap_err();
        error.to_string()
    };
    kernels(1).orthogonalise(&stream, good).unwrap();
    stream.synchronize(LIMIT).unwrap();
    assert_eq!(
        refused(OrthogonaliseArgs {
            row_stride: 4,
            ..good
        }),
        "orthogonalise: row_stride: expected 5 elements, got 4"
    );
    assert_eq!(
        refused(OrthogonaliseArgs { rows: 4, ..good }),
        "orthogonalise: values: expected 32 elements, got 23"
    );
    assert_eq!(
        refused(OrthogonaliseArgs {
            scratch: good.scratch.slice(0..32),
            ..good
        }),
        "orthogonalise: scratch: expected 33 elements, got 32"
    );
    assert_eq!(
        refused(OrthogonaliseArgs {
            scratch: good.values,
            rows: 1,
            values: good.values.slice(0..5),
            ..good
        }),
        "orthogonalise: values and orthogonalise: scratch overlap"
    );
    let huge = OrthogonaliseArgs {
        rows: usize::MAX,
        row_stride: usize::MAX,
        ..good
    };
    assert!(refused(huge).starts_with("orthogonalise: values: expected"));
}

#[test]
fn hyperparameters_outside_their_range_are_refused() {
    let refused = |muon: Muon| muon.check().unwrap_err().setting;
    let muon = Muon::default();
    assert_eq!(muon.check(), Ok(()));
    for momentum in [1.0, -0.1, f64::NAN] {
        assert_eq!(refused(Muon { momentum, ..muon }), "momentum");
    }
    for ns_steps in [0, 100] {
        assert_eq!(refused(Muon { ns_steps, ..muon }), "ns_steps");
    }
    for weight_decay in [-1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(
            refused(Muon {
                weight_decay,
                ..muon
            }),
            "weight_decay"
        );
    }
}

#[test]
fn arrays_of_other_phases_are_refused() {
    let half = [bf16::ONE; 4];
    let mut arrays = [[0.0; 4]; 3];
    let [master, param, momentum] = &mut arrays;
    let direction = UpdateSlices {
        weights: WeightSlices::Fp32 {
            master,
            param_out: Some(FloatSliceMut::F32(param)),
        },
        slots: vec![momentum.as_mut_slice()],
        grad: FloatSlice::Bf16(&half),
        scalars: StepScalars::default(),
        weight_decay: 0.0,
    };
    assert_eq!(
        Muon::default().update(direction).unwrap_err().to_string(),
        "muon: a direction is written in fp32: pass `Weights::Fp32` without `param_out`"
    );
    let [master, ..] = &mut arrays;
    let update = UpdateSlices {
        weights: WeightSlices::Fp32 {
            master,
            param_out: None,
        },
        slots: Vec::new(),
        grad: FloatSlice::Bf16(&half),
        scalars: StepScalars::default(),
        weight_decay: 0.0,
    };
    let apply = Muon::default().matrix_rule().unwrap().apply;
    assert_eq!(
        apply.update(update).unwrap_err().to_string(),
        "muon_apply: the orthogonalised update is in fp32: pass it so, in place of a gradient"
    );
}

/// The singular values of a matrix with its shorter side first: the roots of the eigenvalues of its
/// Gram matrix, by Jacobi's rotations in fp64.
fn singular_values(x: &[f32], [short, long]: [usize; 2]) -> Vec<f64> {
    let row = |i: usize| &x[i * long..][..long];
    let dot = |i, j| {
        row(i)
            .iter()
            .zip(row(j))
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    let mut gram: Vec<Vec<f64>> = (0..short)
        .map(|i| (0..short).map(|j| dot(i, j)).collect())
        .collect();
    for _sweep in 0..12 {
        for p in 0..short {
            for q in p + 1..short {
                let angle = 0.5 * (2.0 * gram[p][q]).atan2(gram[q][q] - gram[p][p]);
                let (sin, cos) = angle.sin_cos();
                for row in &mut gram {
                    (row[p], row[q]) = (cos * row[p] - sin * row[q], sin * row[p] + cos * row[q]);
                }
                let of_p = gram[p].clone();
                let of_q = gram[q].clone();
                for (k, (of_p, of_q)) in of_p.into_iter().zip(of_q).enumerate() {
                    gram[p][k] = cos * of_p - sin * of_q;
                    gram[q][k] = sin * of_p + cos * of_q;
                }
            }
        }
    }
    (0..short).map(|i| gram[i][i].max(0.0).sqrt()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    /// Random matrices of twice as many columns as rows, whose condition is below 10: of their
    /// normalised singular values the least is above 0.01, from where five iterations get to
    /// 0.6.
    #[test]
    fn singular_values_are_near_1(short in 1_usize..24, more in 0_usize..9, seed: u64, gap in 0_usize..5) {
        let long = 2 * short + more;
        let values = matrix(short * long, seed);
        let before = singular_values(&values, [short, long]);
        let least = before.iter().copied().fold(f64::MAX, f64::min);
        let norm = before.iter().map(|x| x * x).sum::<f64>().sqrt();
        prop_assume!(least / norm > 0.01);

        let rule = NewtonSchulz::default();
        let ours = on_host(1, &values, [short, long], [0, 0], rule, 1.0);
        for value in singular_values(&ours, [short, long]) {
            prop_assert!((0.6..=1.3).contains(&value), "{value}");
        }
        let apart = on_host(2, &values, [short, long], [gap, gap], rule, 1.0);
        prop_assert_eq!(bits(&apart), bits(&ours));
    }
}

fn torch(name: &str) -> Vec<f32> {
    let file = include_bytes!("../data/torch_muon.safetensors");
    let file = SafeTensors::deserialize(file).unwrap();
    bytemuck::pod_collect_to_vec(file.tensor(name).unwrap().data())
}

/// Three steps. The momentum is equal bit for bit, the weights within the rounding of the update.
fn check_torch(name: &str, [rows, cols]: [usize; 2], lr: f64, muon: Muon) {
    let stream = stream();
    let kernels = kernels(2);
    let matrix_rule = muon.matrix_rule().unwrap();
    let rule: Arc<dyn UpdateRule> = Arc::new(muon);
    let factor = matrix_rule.adjust.factor(rows, cols) as f32;
    let mut weights = torch(&format!("{name}.param0"));
    let mut momentum = vec![0.0; weights.len()];
    let mut direction = vec![0.0; weights.len()];
    let mut scratch =
        vec![0.0; Kernels::<HostDevice>::orthogonalise_scratch_elems(&kernels, rows, cols)];

    for step in 0..3 {
        let mut grad = torch(&format!("{name}.grad{step}"));
        let at = StepPoint {
            t: step + 1,
            lr,
            betas: None,
        };
        let mut scalars = [StepScalars::new(1.0, rule.scalars(&at))];
        let args = UpdateArgs {
            weights: Weights::Fp32 {
                master: typed(&mut direction),
                param_out: None,
            },
            slots: vec![typed(&mut momentum).into()],
            grad: typed(&mut grad).erase(),
            scalars: typed(&mut scalars),
            weight_decay: muon.weight_decay,
            rounding: Rounding::Nearest,
        };
        let to_matrix = OrthogonaliseArgs {
            values: typed(&mut direction),
            rows,
            cols,
            row_stride: cols,
            scratch: typed(&mut scratch),
            rule: matrix_rule.newton_schulz,
            scale: factor,
        };
        let to_weights = UpdateArgs {
            weights: Weights::Fp32 {
                master: typed(&mut weights),
                param_out: None,
            },
            slots: Vec::new(),
            grad: typed(&mut direction).erase(),
            ..args.clone()
        };
        kernels.update(&stream, &rule, args).unwrap();
        kernels.orthogonalise(&stream, to_matrix).unwrap();
        kernels
            .update(&stream, &matrix_rule.apply, to_weights)
            .unwrap();
        stream.synchronize(LIMIT).unwrap();

        let theirs = torch(&format!("{name}.param{}", step + 1));
        let distance = distance(&weights, &theirs);
        println!("{name}, step {step}: {distance:e}");
        let of_weights = theirs.iter().fold(0.0, |a: f32, b| a.max(b.abs())) * f32::EPSILON;
        let most = (step + 1) as f32 * (lr as f32 * factor * ROUNDING + of_weights);
        assert!(
            distance <= most,
            "{name}, step {step}: {distance:e}, at most {most:e}"
        );
    }
    assert_eq!(
        bits(&momentum),
        bits(&torch(&format!("{name}.momentum"))),
        "{name}"
    );
}

#[test]
fn torch_agrees() {
    let wide = Muon {
        adjust: MatrixScale::MatchRmsAdamw,
        ..Muon::default()
    };
    check_torch("wide", [12, 20], 0.02, wide);
    let tall = Muon {
        momentum: 0.4,
        weight_decay: 0.0,
        ns_steps: 3,
        ..Muon::default()
    };
    check_torch("tall", [24, 10], 0.05, tall);
    let square = Muon {
        nesterov: false,
        weight_decay: 0.3,
        ..Muon::default()
    };
    check_torch("square", [16, 16], 0.02, square);
}

//! Attention, forward and backward, against fp64 on the same inputs: on tensor cores and on CUDA
//! cores, with grouped heads, windows, documents and rotated queries and keys.

use zero_alloc::device::DType;
use zero_models::cuda::SumOut;
use zero_models::cuda::attention::{self, Attention, Gradients, Masks, Shape};
use zero_models::cuda::dropout::Dropout;
use zero_models::cuda::rope::Angles;
use zero_models::ops::Span;
use zero_models::ops::dropout::Draws;

use crate::cuda_dropout::{SITE, draws, keys};
use crate::fp64;
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};

/// All heads have their own keys, and a query sees all keys before it.
fn shape([batch, seq, heads, d]: [usize; 4]) -> Shape {
    Shape {
        batch,
        seq,
        heads,
        kv_heads: heads,
        d,
        window: seq,
    }
}

/// The table of angles `[seq, d]`.
pub(crate) fn table(seq: usize, d: usize) -> Vec<f32> {
    let angle = |position: usize, i: usize| position as f64 / 50f64.powf(i as f64 / d as f64);
    let row = |position: usize| {
        let cos = (0..d / 2).map(move |i| angle(position, i).cos() as f32);
        cos.chain((0..d / 2).map(move |i| angle(position, i).sin() as f32))
    };
    (0..seq).flat_map(row).collect()
}

/// Starts of documents whose lengths repeat from 1 on, up to `most`.
pub(crate) fn documents(batch: usize, seq: usize, most: usize) -> Vec<u32> {
    let mut starts = Vec::new();
    for b in 0..batch {
        let mut start = 0;
        let mut len = 1 + b;
        while start < seq {
            let end = seq.min(start + len);
            starts.extend((start..end).map(|_| start as u32));
            start = end;
            len = len % most + 7;
        }
    }
    starts
}

/// What the cases differ in beside the shape.
#[derive(Clone, Copy, Default)]
struct Case {
    flash: bool,
    /// The longest document.
    documents: Option<usize>,
    rotated: bool,
    /// The probability with which probabilities are dropped.
    dropout: f32,
}

/// The factors of the probabilities `[batch, heads, seq, seq]` on the host; empty if nothing is
/// dropped.
fn factors(draws: &Draws, shape: Shape, probability: f32) -> Vec<f32> {
    let Shape {
        batch, seq, heads, ..
    } = shape;
    let Some(dropout) = draws.dropout(probability, SITE) else {
        return Vec::new();
    };
    let mut all = vec![f32::NAN; batch * heads * seq * seq];
    for (row, out) in all.chunks_mut(seq).enumerate() {
        let line = row % (heads * seq);
        dropout.factors(out, row / (heads * seq), line, 0);
    }
    all
}

fn check_attention(gpu: &Gpu, dtype: DType, shape: Shape, case: Case) {
    let ops = gpu.kernels(dtype);
    let attention = if case.flash {
        Attention::new(&ops, shape)
    } else {
        Attention::plain(&ops, shape)
    }
    .unwrap();
    assert_eq!(attention.is_flash(), case.flash, "{shape:?}");
    let cores = if case.flash { " on tensor cores" } else { "" };
    let what = format!(
        "{dtype} {shape:?}{cores}, documents {:?}, dropout {}",
        case.documents, case.dropout
    );
    let Shape { batch, seq, d, .. } = shape;
    let width = shape.width();
    let elems = batch * seq * shape.heads * d;
    // Large scores, so that a wrong maximum or mask is visible.
    let qkv: Vec<f32> = values(batch * seq * width, 1)
        .iter()
        .map(|v| 2.0 * v)
        .collect();
    let dout = values(elems, 2);
    let starts = case
        .documents
        .map_or(vec![], |most| documents(batch, seq, most));
    let draws = draws(batch);
    let [want, mut want_dqkv] = fp64::attention(
        &rounded(&qkv, dtype),
        &rounded(&dout, dtype),
        shape,
        &starts,
        &factors(&draws, shape, case.dropout),
    );
    let angles = table(seq, d);
    if case.rotated {
        let start = |row: usize| starts.get(row).map_or(0, |&start| start as usize);
        let positions: Vec<usize> = (0..batch * seq).map(|row| row % seq - start(row)).collect();
        let sizes = [width, shape.heads + shape.kv_heads, d];
        fp64::rotate(&mut want_dqkv, &angles, &positions, sizes, -1.0);
    }

    let qkv = gpu.put(&qkv, dtype);
    let dout = gpu.put(&dout, dtype);
    let out = gpu.fresh(elems, dtype);
    let lse = gpu.floats(&vec![f32::NAN; elems / d]);
    let delta = gpu.floats(&vec![f32::NAN; elems / d]);
    let masks = Masks {
        starts: (!starts.is_empty()).then(|| gpu.words(&starts)),
        dropout: Dropout::new(keys(gpu, &draws), case.dropout, SITE),
    };
    attention
        .forward(&ops, &gpu.stream, out, lse, qkv, masks)
        .unwrap();
    // Probabilities are rounded to 16 bits for the tensor cores.
    let tolerance = tolerance(dtype);
    close(&gpu.get(out), &want, tolerance, &format!("{what}: out"));
    let dqkv = gpu.fresh(batch * seq * width, dtype);
    let dbias = gpu.zeros(width);
    let workspace = attention::workspace_elems(batch, seq, width);
    let workspace = gpu.floats(&vec![f32::NAN; workspace]);
    let grads = Gradients {
        dqkv,
        dbias: Some(SumOut::Add(dbias)),
        angles: case.rotated.then(|| Angles {
            table: gpu.floats(&angles),
            starts: masks.starts,
            span: Span::whole(shape.seq),
        }),
        masks,
    };
    attention
        .backward(
            &ops,
            &gpu.stream,
            grads,
            dout,
            qkv,
            out,
            lse,
            delta,
            workspace,
        )
        .unwrap();

    let got = gpu.get(dqkv);
    // The sums are those of the stored elements.
    let column_sum = |j: usize| {
        let column = got.iter().skip(j).step_by(width);
        column.map(|v| f64::from(*v)).sum::<f64>()
    };
    let want_dbias: Vec<f64> = (0..width).map(column_sum).collect();
    let got_dbias = gpu.get(dbias.erase());
    close(&got_dbias, &want_dbias, 4e-6, &format!("{what}: dbias"));

    let q = shape.heads * d;
    let kv = shape.kv_heads * d;
    for (name, part) in [("dq", 0..q), ("dk", q..q + kv), ("dv", q + kv..width)] {
        let of = |i: usize| part.contains(&(i % width));
        let picked = (0..got.len()).filter(|&i| of(i));
        let (got, want): (Vec<f32>, Vec<f64>) = picked.map(|i| (got[i], want_dqkv[i])).unzip();
        // The probability of a single key is always 1, so the exact gradients of q and k are 0.
        if seq > 1 || name == "dv" {
            close(&got, &want, 2.0 * tolerance, &format!("{what}: {name}"));
        } else {
            let most = got.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            assert!(
                f64::from(most) < 10.0 * tolerance,
                "{what}: {name} is {most}, not 0"
            );
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn attention_on_tensor_cores() {
    let gpu = Gpu::open();
    let flash = Case {
        flash: true,
        ..Case::default()
    };
    for dtype in [DType::Bf16, DType::F16] {
        // One row, less than a tile, slightly more than a tile, and several tiles with a remainder.
        for sizes in [
            [2, 1, 2, 64],
            [1, 50, 1, 32],
            [1, 130, 2, 64],
            [1, 70, 1, 128],
            [2, 300, 1, 32],
        ] {
            check_attention(&gpu, dtype, shape(sizes), flash);
        }
    }

    if gpu.is_real() {
        check_attention(&gpu, DType::Bf16, shape([2, 1024, 3, 64]), flash);
        check_attention(&gpu, DType::Bf16, shape([1, 1000, 2, 128]), flash);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn attention_on_cuda_cores() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        for sizes in [
            [2, 1, 2, 3],
            [1, 31, 2, 16],
            [1, 70, 1, 64],
            [1, 33, 1, 100],
        ] {
            check_attention(&gpu, dtype, shape(sizes), Case::default());
        }
    }

    check_attention(&gpu, DType::F32, shape([1, 40, 1, 256]), Case::default());
}

/// Windows and documents that begin and end within tiles, and leave whole tiles out.
#[test]
#[ignore = "needs a CUDA device"]
fn grouped_windowed_and_packed_attention() {
    let gpu = Gpu::open();
    for (sizes, kv_heads, window, documents) in [
        ([1, 70, 4, 32], 2, 70, None),
        ([1, 200, 2, 32], 1, 20, None),
        ([2, 150, 1, 32], 1, 150, Some(90)),
        ([1, 140, 2, 64], 1, 33, Some(60)),
        ([1, 40, 2, 128], 1, 7, Some(20)),
    ] {
        let shape = Shape {
            kv_heads,
            window,
            ..shape(sizes)
        };
        for flash in [true, false] {
            let case = Case {
                flash,
                documents,
                rotated: true,
                ..Case::default()
            };
            check_attention(&gpu, DType::Bf16, shape, case);
        }
    }

    let odd = Shape {
        kv_heads: 1,
        window: 9,
        ..shape([2, 45, 3, 6])
    };
    let case = Case {
        documents: Some(30),
        rotated: true,
        ..Case::default()
    };
    check_attention(&gpu, DType::F32, odd, case);
}

/// The masks are the host's, forward and in both backward kernels, with tiles left out and rows
/// behind the last.
#[test]
#[ignore = "needs a CUDA device"]
fn attention_with_dropout() {
    let gpu = Gpu::open();
    for (sizes, kv_heads, window, documents) in [
        ([1, 70, 4, 32], 2, 70, None),
        ([2, 100, 1, 64], 1, 100, Some(60)),
        ([1, 150, 1, 32], 1, 33, None),
        ([2, 40, 2, 128], 1, 40, None),
    ] {
        let shape = Shape {
            kv_heads,
            window,
            ..shape(sizes)
        };
        for (flash, dtype) in [
            (true, DType::Bf16),
            (true, DType::F16),
            (false, DType::Bf16),
            (false, DType::F32),
        ] {
            let case = Case {
                flash,
                documents,
                dropout: 0.3,
                ..Case::default()
            };
            check_attention(&gpu, dtype, shape, case);
        }
    }
}

//! The operations of ranks that share sequences: the copies around an all-to-all against the host's,
//! and operations on a part of the tokens, or of the heads, against those on all.

use zero_alloc::device::DType;
use zero_models::cuda::attention::{Attention, Masks, Shape};
use zero_models::cuda::dropout::{self, Dropout};
use zero_models::cuda::embedding::{self, TokenLists};
use zero_models::cuda::rope::{self, Angles};
use zero_models::cuda::sequence::{self, PackStep};
use zero_models::ops::sequence::HeadExchange;
use zero_models::ops::{Heads, Span};

use crate::cuda_attention::{documents, table};
use crate::cuda_dropout::{SITE, draws, keys};
use crate::cuda_ops::token_lists;
use crate::gpu::{FLOATS, Gpu, close, rounded, tolerance, values};

fn exchanges() -> Vec<HeadExchange> {
    // Heads of keys for each rank, one for several ranks, and none; vectors, and odd heads.
    let cases = [
        [2, 4, 4, 8],
        [4, 8, 2, 16],
        [4, 4, 1, 3],
        [2, 6, 0, 8],
        [1, 2, 1, 5],
    ];
    let exchange = |[ranks, heads, kv_heads, d]: [usize; 4]| HeadExchange {
        ranks,
        batch: 3,
        seq: 5 * ranks,
        heads,
        kv_heads,
        d,
    };
    cases.map(exchange).to_vec()
}

#[test]
#[ignore = "needs a CUDA device"]
fn exchanges_have_the_host_s_bits() {
    let gpu = Gpu::open();
    for dtype in FLOATS {
        let ops = gpu.kernels(dtype);
        for exchange in exchanges() {
            let elems = exchange.elems();
            let tokens = exchange.tokens_elems();
            for step in PackStep::ALL {
                let [out_elems, x_elems] = match step {
                    PackStep::PackTokens => [elems, tokens],
                    PackStep::UnpackTokens => [tokens, elems],
                    _ => [elems, elems],
                };
                let x = values(x_elems, 1);
                let stored: Vec<f32> = rounded(&x, dtype).iter().map(|x| *x as f32).collect();
                let mut want = vec![f32::NAN; out_elems];
                let on_host = match step {
                    PackStep::PackTokens => HeadExchange::pack_tokens,
                    PackStep::UnpackHeads => HeadExchange::unpack_heads,
                    PackStep::PackHeads => HeadExchange::pack_heads,
                    PackStep::UnpackTokens => HeadExchange::unpack_tokens,
                };
                on_host(exchange, &mut want, &stored);

                let out = gpu.fresh(out_elems, dtype);
                let x = gpu.put(&x, dtype);
                sequence::run(&ops, &gpu.stream, step, out, x, exchange).unwrap();
                // A sum is rounded once.
                let want: Vec<f32> = rounded(&want, dtype).iter().map(|x| *x as f32).collect();
                assert_eq!(gpu.get(out), want, "{dtype} {step:?} {exchange:?}");
            }
        }
    }
}

/// The rows of `span` of `[batch, seq, n]`.
fn part<T: Clone>(all: &[T], seq: usize, n: usize, span: Span) -> Vec<T> {
    let rows = span.first * n..(span.first + span.tokens) * n;
    let sequences = all.chunks_exact(seq * n);
    sequences
        .flat_map(|all| all[rows.clone()].to_vec())
        .collect()
}

/// The parts of `ranks` ranks of sequences of `seq` tokens.
fn spans(seq: usize, ranks: usize) -> impl Iterator<Item = Span> {
    let tokens = seq / ranks;
    (0..ranks).map(move |rank| Span {
        tokens,
        first: rank * tokens,
    })
}

/// Embedding, rotation and dropout of a part of the tokens have the bits of all. The positions'
/// gradients of all parts sum to that of all.
#[test]
#[ignore = "needs a CUDA device"]
fn parts_of_tokens() {
    let gpu = Gpu::open();
    let stream = &gpu.stream;
    let [batch, seq, n] = [3, 24, 16];
    let rows = batch * seq;
    for (dtype, packed) in [(DType::F32, true), (DType::Bf16, false)] {
        let ops = gpu.kernels(dtype);
        let what = format!("{dtype}, documents: {packed}");
        let tokens: Vec<u32> = (0..rows).map(|i| (i * i % 11) as u32).collect();
        let starts = documents(batch, seq, 9);
        let keys = keys(&gpu, &draws(batch));
        let wte = gpu.put(&values(11 * n, 1), dtype);
        let wpe = gpu.put(&values(seq * n, 2), dtype);
        let dx = values(rows * n, 3);
        let heads = Heads {
            queries: 1,
            keys: 1,
            d: 8,
        };
        let width = heads.width();
        let qkv = values(rows * width, 4);
        let angles = gpu.floats(&table(seq, heads.d));

        // The outputs of a span: embedded tokens, rotated heads, and a residual addition.
        let of = |span: Span| {
            let dropout = Dropout::new(keys, 0.4, SITE).unwrap();
            let dropout = dropout.from_line(span.first);
            let documents = packed.then(|| gpu.words(&part(&starts, seq, 1, span)));
            let rows_of = embedding::BatchLayout {
                batch,
                span,
                documents,
                dropout: Some(dropout),
            };
            let tokens = part(&tokens, seq, 1, span);
            let lists = token_lists(&gpu, &tokens);
            let x = gpu.fresh(tokens.len() * n, dtype);
            embedding::forward(&ops, stream, x, lists.tokens, wte, Some(wpe), rows_of).unwrap();

            let qkv = gpu.put(&part(&qkv, seq, width, span), dtype);
            let angles = Angles {
                table: angles,
                starts: documents,
                span,
            };
            rope::forward(&ops, stream, qkv, angles, heads).unwrap();
            let dx = gpu.put(&part(&dx, seq, n, span), dtype);
            let y = gpu.put(&part(&values(rows * n, 5), seq, n, span), dtype);
            dropout::add_residual(&ops, stream, y, y, Some(dx), n, Some(dropout)).unwrap();
            (rows_of, lists, dx, [(x, n), (qkv, width), (y, n)])
        };

        let sums = || [11 * n, seq * n].map(|elems| gpu.zeros(elems));
        let add = |sums: [_; 2], rows_of, lists: &TokenLists, dx| {
            let [dwte, dwpe] = sums;
            embedding::backward_tokens(&ops, stream, dwte, lists, dx, None, rows_of).unwrap();
            embedding::backward_positions(&ops, stream, dwpe, dx, rows_of).unwrap();
        };
        let (rows_of, lists, dx_whole, whole) = of(Span::whole(seq));
        let want = sums();
        add(want, rows_of, &lists, dx_whole);
        for ranks in [2, 4] {
            let got = sums();
            for span in spans(seq, ranks) {
                let (rows_of, lists, dx, outputs) = of(span);
                add(got, rows_of, &lists, dx);
                for ((out, width), (all, _)) in outputs.into_iter().zip(whole) {
                    let want = part(&gpu.get(all), seq, width, span);
                    assert_eq!(gpu.get(out), want, "{what}, {span:?}");
                }
            }
            for (got, want) in got.into_iter().zip(want) {
                let want = gpu.get(want.erase());
                let want: Vec<f64> = want.iter().map(|x| f64::from(*x)).collect();
                close(&gpu.get(got.erase()), &want, 2e-6, &what);
            }
        }
    }
}

/// Attention of a part of the heads has the numbers of all heads, with their dropout.
#[test]
#[ignore = "needs a CUDA device"]
fn parts_of_heads() {
    let gpu = Gpu::open();
    let [batch, seq, heads, d] = [2, 40, 4, 32];
    let shape = Shape {
        batch,
        seq,
        heads,
        kv_heads: heads,
        d,
        window: seq,
    };
    for dtype in [DType::F32, DType::Bf16] {
        let ops = gpu.kernels(dtype);
        let keys = keys(&gpu, &draws(batch));
        // [batch, seq] of 3 x 4 heads.
        let all = values(batch * seq * shape.width(), 1);
        let of = |first: usize, count: usize| {
            let rows = all.chunks_exact(shape.width());
            let qkv: Vec<f32> = rows
                .flat_map(|row| {
                    let part = |from: usize| row[from * d..(from + count) * d].to_vec();
                    [0, heads, 2 * heads]
                        .map(|kind| part(kind + first))
                        .concat()
                })
                .collect();
            let shape = Shape {
                heads: count,
                kv_heads: count,
                ..shape
            };
            let attention = Attention::new(&ops, shape).unwrap();
            let out = gpu.fresh(batch * seq * count * d, dtype);
            let lse = gpu.floats(&vec![f32::NAN; batch * seq * count]);
            let dropout = Dropout::new(keys, 0.3, SITE).unwrap();
            let masks = Masks {
                starts: None,
                dropout: Some(dropout.from_line(first * seq)),
            };
            let qkv = gpu.put(&qkv, dtype);
            attention
                .forward(&ops, &gpu.stream, out, lse, qkv, masks)
                .unwrap();
            gpu.get(out)
        };
        let whole = of(0, heads);
        for first in [0, 2] {
            let rows = whole.chunks_exact(heads * d);
            let want: Vec<f64> = rows
                .flat_map(|row| row[first * d..(first + 2) * d].to_vec())
                .map(f64::from)
                .collect();
            let what = format!("{dtype}, heads from {first}");
            close(&of(first, 2), &want, tolerance(dtype), &what);
        }
    }
}

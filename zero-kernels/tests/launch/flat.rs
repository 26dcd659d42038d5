//! Cast and accumulate against the plain loops, and grad_stats against the host's functions, bit
//! for bit.

use half::{bf16, f16};
use zero_alloc::device::Device;
use zero_kernels::{Float, GradStats, MatrixRows, Segments, host, reference};

use crate::Rig;
use crate::adam::from;
use crate::common::{assert_same, values};

fn check_cast<D: Device, S: Float, T: Float>(rig: &Rig<D>) {
    for (i, len) in rig.lengths().into_iter().enumerate() {
        for scale in [1.0, 0.125, 3.7e4] {
            let src = values::<S>(len, 5, true);
            let on_src = rig.buffer(&src, from(i, 0));
            let dst = rig.poisoned::<T>(len, from(i, 1));
            rig.kernels
                .cast(&rig.stream, on_src.any(), dst.any(), scale)
                .unwrap();
            let mut expected = vec![T::from_f32(f32::NAN); len];
            reference::cast(&src, &mut expected, scale).unwrap();
            assert_same(
                &format!("cast {} to {}", S::DTYPE, T::DTYPE),
                &dst.read(),
                &expected,
            );
            assert_same("the source", &on_src.read(), &src);
        }
    }
}

pub fn cast_from_fp32<D: Device>(rig: &Rig<D>) {
    check_cast::<D, f32, f32>(rig);
    check_cast::<D, f32, bf16>(rig);
    check_cast::<D, f32, f16>(rig);
}

pub fn cast_from_bf16<D: Device>(rig: &Rig<D>) {
    check_cast::<D, bf16, f32>(rig);
    check_cast::<D, bf16, bf16>(rig);
    check_cast::<D, bf16, f16>(rig);
}

pub fn cast_from_fp16<D: Device>(rig: &Rig<D>) {
    check_cast::<D, f16, f32>(rig);
    check_cast::<D, f16, bf16>(rig);
    check_cast::<D, f16, f16>(rig);
}

fn check_cast_rows<D: Device, S: Float, T: Float>(rig: &Rig<D>) {
    let shapes: [[usize; 2]; 7] = [[0, 3], [3, 0], [1, 1], [3, 8], [5, 17], [4, 64], [3, 2049]];
    // Miri is slow.
    let shapes = &shapes[..if cfg!(miri) { 5 } else { 7 }];
    for (i, &shape) in shapes.iter().enumerate() {
        let [rows, cols] = shape;
        let strides = [cols + [0, 8, 3][i % 3], cols + [8, 0, 5][i % 3]];
        let [src_elems, dst_elems] = strides.map(|stride| match cols {
            0 => 0,
            _ => rows.saturating_sub(1) * stride + cols * rows.min(1),
        });
        let src = values::<S>(src_elems, 5, true);
        let on_src = rig.buffer(&src, from(i, 0));
        let dst = rig.poisoned::<T>(dst_elems, from(i, 1));
        let [from, to] = [(on_src.any(), strides[0]), (dst.any(), strides[1])]
            .map(|(data, stride)| MatrixRows { data, stride });
        let mut expected = dst.read();
        let kernels = &rig.kernels;
        kernels
            .cast_rows(&rig.stream, from, to, shape, 3.7)
            .unwrap();
        let into = (&mut expected[..], strides[1]);
        reference::cast_rows((&src, strides[0]), into, shape, 3.7);
        let what = format!("{shape:?} from {} to {}", S::DTYPE, T::DTYPE);
        assert_same(&what, &dst.read(), &expected);
        assert_same("the source", &on_src.read(), &src);
    }
}

pub fn cast_rows_of_every_type<D: Device>(rig: &Rig<D>) {
    check_cast_rows::<D, f32, f32>(rig);
    check_cast_rows::<D, f32, bf16>(rig);
    check_cast_rows::<D, f32, f16>(rig);
    check_cast_rows::<D, bf16, f32>(rig);
    check_cast_rows::<D, bf16, bf16>(rig);
    check_cast_rows::<D, bf16, f16>(rig);
    check_cast_rows::<D, f16, f32>(rig);
    check_cast_rows::<D, f16, bf16>(rig);
    check_cast_rows::<D, f16, f16>(rig);
}

/// Widens every 16-bit pattern, and narrows fp32 values around every rounding point of both types.
pub fn every_rounding_point<D: Device>(rig: &Rig<D>) {
    let step = if rig.most_elems < 1 << 16 { 61 } else { 1 };
    let highs = || (0..=u16::MAX).step_by(step);
    let halves: Vec<f16> = highs().map(f16::from_bits).collect();
    let src = rig.buffer(&halves, 0);
    let dst = rig.poisoned::<f32>(halves.len(), 0);
    rig.kernels
        .cast(&rig.stream, src.any(), dst.any(), 1.0)
        .unwrap();
    assert_same(
        "fp16 widened",
        &dst.read(),
        &halves.iter().map(|h| h.to_f32()).collect::<Vec<_>>(),
    );

    for low in [
        0u32, 1, 0xfff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff,
    ] {
        let wide: Vec<f32> = highs()
            .map(|high| f32::from_bits((u32::from(high) << 16) | low))
            .collect();
        let src = rig.buffer(&wide, 0);
        let b = rig.poisoned::<bf16>(wide.len(), 0);
        let h = rig.poisoned::<f16>(wide.len(), 0);
        rig.kernels
            .cast(&rig.stream, src.any(), b.any(), 1.0)
            .unwrap();
        rig.kernels
            .cast(&rig.stream, src.any(), h.any(), 1.0)
            .unwrap();
        assert_same(
            "bf16",
            &b.read(),
            &wide.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(),
        );
        assert_same(
            "fp16",
            &h.read(),
            &wide.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(),
        );
    }
}

fn check_accumulate<D: Device, G: Float>(rig: &Rig<D>) {
    for (i, len) in rig.lengths().into_iter().enumerate() {
        let grad = values::<G>(len, 6, true);
        let mut acc = values::<f32>(len, 7, true);
        let on_grad = rig.buffer(&grad, from(i, 0));
        let on_acc = rig.buffer(&acc, from(i, 1));
        rig.kernels
            .accumulate(&rig.stream, on_grad.any(), on_acc.slice())
            .unwrap();
        reference::accumulate(&grad, &mut acc).unwrap();
        assert_same("accumulate", &on_acc.read(), &acc);
    }
}

pub fn accumulate_from_every_type<D: Device>(rig: &Rig<D>) {
    check_accumulate::<D, f32>(rig);
    check_accumulate::<D, bf16>(rig);
    check_accumulate::<D, f16>(rig);
}

fn check_stats<D: Device, G: Float>(rig: &Rig<D>) {
    // Lengths around a strip (4096), several chunks (32768), and more chunks than the 256 lanes
    // that add them.
    let long = if cfg!(miri) {
        &[][..]
    } else {
        &[4095, 4096, 4097, 70_001, 257 * 32_768 + 5]
    };

    for (i, len) in rig
        .lengths()
        .into_iter()
        .chain(long.iter().copied())
        .enumerate()
    {
        let grad = values::<G>(len, 8, true);
        let on_grad = rig.buffer(&grad, from(i, 1));
        let scratch = rig.poisoned::<f64>(rig.kernels.stats_scratch_elems(&[len]), 0);
        let out = rig.poisoned::<GradStats>(1, 0);
        rig.kernels
            .grad_stats(&rig.stream, &[on_grad.any()], scratch.slice(), out.slice())
            .unwrap();
        let expected = host::grad_stats(&grad);
        let ours = out.read()[0];
        assert_eq!(
            (ours.sum_sq.to_bits(), ours.nonfinite),
            (expected.sum_sq.to_bits(), expected.nonfinite),
            "{len}"
        );
        scratch.read();
    }
}

pub fn grad_stats_of_every_type<D: Device>(rig: &Rig<D>) {
    check_stats::<D, f32>(rig);
    check_stats::<D, bf16>(rig);
    check_stats::<D, f16>(rig);
}

/// More gradients than a launch serves, empty ones among them, and of two dtypes: each has the bits
/// that it has alone.
pub fn grad_stats_of_many<D: Device>(rig: &Rig<D>) {
    let count = if cfg!(miri) { 5 } else { 131 };
    let most = if cfg!(miri) { 400 } else { 33_003 };
    let values = values::<f32>(most, 9, true);
    let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let wide = rig.buffer(&values, 1);
    let halves = rig.buffer(&narrow, 3);
    let range = |i: usize| match i {
        1 => 0..if cfg!(miri) { 40 } else { most },
        _ => i..i + (i * 37) % 200,
    };

    let is_wide = |i: usize| i + 2 < count;
    let grads: Vec<_> = (0..count)
        .map(|i| {
            if is_wide(i) {
                wide.any().slice(range(i))
            } else {
                halves.any().slice(range(i))
            }
        })
        .collect();

    let lens: Vec<usize> = (0..count).map(|i| range(i).len()).collect();
    let scratch = rig.poisoned::<f64>(rig.kernels.stats_scratch_elems(&lens), 0);
    let out = rig.poisoned::<GradStats>(count, 0);
    rig.kernels
        .grad_stats(&rig.stream, &grads, scratch.slice(), out.slice())
        .unwrap();

    for (i, ours) in out.read().iter().enumerate() {
        let expected = if is_wide(i) {
            host::grad_stats(&values[range(i)])
        } else {
            host::grad_stats(&narrow[range(i)])
        };
        assert_eq!(
            (ours.sum_sq.to_bits(), ours.nonfinite),
            (expected.sum_sq.to_bits(), expected.nonfinite),
            "{i}"
        );
    }

    scratch.read();
    rig.kernels
        .grad_stats(&rig.stream, &[], scratch.slice(), out.slice().slice(0..0))
        .unwrap();
}

/// Segments of every alignment, across parts and gaps.
fn check_pack<D: Device, S: Float, T: Float>(rig: &Rig<D>) {
    let most = if cfg!(miri) { 60 } else { 5000 };
    let src = values::<S>(most, 11, true);
    let on_device = rig.buffer(&src, 1);
    // (start in the unit, start of its values, elements); the unit has gaps before, between and
    // behind parts.
    let parts = [
        (3, 7, 5),
        (8, 16, 0),
        (8, 15, most / 2),
        (most / 2 + 20, 31, 17),
    ];
    let one = [(0, 7, most - 7)];

    for parts in [&parts[..], &one[..], &[]] {
        let slices: Vec<_> = parts
            .iter()
            .map(|&(at, from, len)| (on_device.any().slice(from..from + len), at))
            .collect();
        let plain: Vec<_> = parts
            .iter()
            .map(|&(at, from, len)| (&src[from..from + len], at))
            .collect();
        for (start, len, stride, count) in [
            (0, most / 4, most / 4, 4),
            (8, most / 8, most / 4, 3),
            (5, 3, 7, 6),
            (0, 0, 9, 4),
            (2, most, 0, 1),
        ] {
            let segments = Segments {
                start,
                len,
                stride,
                count,
            };
            let dst = rig.poisoned::<T>(len * count, start);
            rig.kernels
                .pack(&rig.stream, &slices, segments, dst.any())
                .unwrap();
            let mut expected = vec![T::from_f32(f32::NAN); len * count];
            reference::pack(&plain, segments, &mut expected).unwrap();
            assert_same(
                &format!("pack {} to {}: {segments:?}", S::DTYPE, T::DTYPE),
                &dst.read(),
                &expected,
            );
        }
    }
}

pub fn pack_of_every_type<D: Device>(rig: &Rig<D>) {
    check_pack::<D, f32, f32>(rig);
    check_pack::<D, f16, bf16>(rig);
    // The memory that is accessed does not depend on the types.
    if cfg!(miri) {
        return;
    }
    check_pack::<D, f32, bf16>(rig);
    check_pack::<D, f32, f16>(rig);
    check_pack::<D, bf16, f32>(rig);
    check_pack::<D, bf16, bf16>(rig);
    check_pack::<D, bf16, f16>(rig);
    check_pack::<D, f16, f32>(rig);
    check_pack::<D, f16, f16>(rig);
}

/// More parts than a launch has room for, and parts of several dtypes.
pub fn pack_of_many_parts<D: Device>(rig: &Rig<D>) {
    let count = if cfg!(miri) { 9 } else { 300 };
    let values = values::<f32>(2 * count, 12, true);
    let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    let wide = rig.buffer(&values, 1);
    let narrow = rig.buffer(&halves, 0);
    let is_wide = |i: usize| i < 140 || i.is_multiple_of(50);
    let slice =
        |i: usize| if is_wide(i) { wide.any() } else { narrow.any() }.slice(2 * i..2 * i + 2);
    // Two elements of every three.
    let parts: Vec<_> = (0..count).map(|i| (slice(i), 3 * i + 1)).collect();
    let dst = rig.poisoned::<f32>(3 * count, 0);
    let segments = Segments {
        start: 1,
        len: count,
        stride: count,
        count: 3,
    };

    rig.kernels
        .pack(&rig.stream, &parts, segments, dst.any())
        .unwrap();
    let rounded = |elem: usize| match (elem / 3, elem % 3) {
        (_, 2) => 0.0,
        (i, j) if is_wide(i) => values[2 * i + j],
        (i, j) => halves[2 * i + j].to_f32(),
    };

    assert_same(
        "pack",
        &dst.read(),
        &(0..3 * count).map(rounded).collect::<Vec<_>>(),
    );
}

pub fn grad_stats_of_extremes<D: Device>(rig: &Rig<D>) {
    for value in [f32::MAX, f32::from_bits(1), f32::NAN] {
        let grad = rig.buffer(&[value; 33], 0);
        let scratch = rig.poisoned::<f64>(rig.kernels.stats_scratch_elems(&[33]), 0);
        let out = rig.poisoned::<GradStats>(1, 0);
        rig.kernels
            .grad_stats(&rig.stream, &[grad.any()], scratch.slice(), out.slice())
            .unwrap();
        assert_eq!(out.read()[0], host::grad_stats(&[value; 33]));
    }
}

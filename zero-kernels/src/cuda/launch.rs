//! Launches as values: the kernel, grid and parameters of each operation. No code here needs a
//! device, so tests compare the launches with the compiled kernels.

use std::ffi::c_void;

use zero_alloc::device::{AnySlice, DType, DeviceId, DeviceSlice};

use super::span::{GROUP_ELEMS, Span, THREADS, grid};
use crate::host::stats_order::CHUNK_ELEMS;
use crate::rule::{entries, float_index};
use crate::step::RankStats;
use crate::{
    AdvanceArgs, Codec, GradStats, KernelError, MatrixRows, Segments, UpdateArgs, UpdateRule,
    Weights, check,
};

/// The most ranges of one launch (`RANGES` of cuda/prelude.cuh). Their addresses are kernel
/// parameters, 3 KiB: the statistics of 128 units take two launches, with the bits of one unit
/// after the other. Why not a table in device memory: it would need an upload, and a recorded graph
/// would read whatever the table has when it is replayed.
pub(super) const RANGES: usize = 128;

/// `Range` of cuda/prelude.cuh.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(super) struct Range {
    address: u64,
    len: u64,
    first: u64,
}

/// `Ranges` of cuda/prelude.cuh.
#[derive(Clone, Debug, PartialEq)]
#[repr(C)]
pub(super) struct Ranges {
    count: u64,
    of: [Range; RANGES],
}

impl Ranges {
    /// At most [`RANGES`] slices, each with its `first`.
    fn param(slices: impl IntoIterator<Item = (AnySlice, u64)>) -> Param {
        let mut ranges = Self {
            count: 0,
            of: [Range::default(); RANGES],
        };
        for (to, (slice, first)) in ranges.of.iter_mut().zip(slices) {
            *to = Range {
                address: slice.as_ptr() as u64,
                len: slice.len() as u64,
                first,
            };
            ranges.count += 1;
        }
        Param::Ranges(Box::new(ranges))
    }
}

/// `Segments` of cuda/pack.cu.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(super) struct PackSegments {
    start: u64,
    len: u64,
    stride: u64,
    count: u64,
    from: u64,
    until: u64,
}

/// A kernel's parameter.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Param {
    Address(u64),
    U64(u64),
    F32(f32),
    F64(f64),
    Span(Span),
    Words(Vec<u32>),
    Ranges(Box<Ranges>),
    Segments(PackSegments),
}

impl Param {
    /// A pointer to the value, as the driver reads it.
    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        match self {
            Self::Address(x) | Self::U64(x) => std::ptr::from_mut(x).cast(),
            Self::F32(x) => std::ptr::from_mut(x).cast(),
            Self::F64(x) => std::ptr::from_mut(x).cast(),
            Self::Span(x) => std::ptr::from_mut(x).cast(),
            Self::Words(x) => x.as_mut_ptr().cast(),
            Self::Ranges(x) => std::ptr::from_mut(&mut **x).cast(),
            Self::Segments(x) => std::ptr::from_mut(x).cast(),
        }
    }

    pub(super) fn size_bytes(&self) -> usize {
        match self {
            Self::Address(_) | Self::U64(_) | Self::F64(_) => 8,
            Self::F32(_) => 4,
            Self::Span(_) => size_of::<Span>(),
            Self::Words(x) => size_of_val(x.as_slice()),
            Self::Ranges(_) => size_of::<Ranges>(),
            Self::Segments(_) => size_of::<PackSegments>(),
        }
    }
}

impl From<AnySlice> for Param {
    fn from(slice: AnySlice) -> Self {
        Self::Address(slice.as_ptr() as u64)
    }
}

impl<T> From<DeviceSlice<T>> for Param {
    fn from(slice: DeviceSlice<T>) -> Self {
        Self::Address(slice.as_ptr() as u64)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Launch {
    /// The source file.
    pub(super) source: &'static str,
    /// The kernel in it.
    pub(super) entry: &'static str,
    /// Blocks; 0 for an empty range, which is not launched.
    pub(super) blocks: u32,
    /// Threads of a block.
    pub(super) threads: u32,
    /// The kernel's parameters, in order.
    pub(super) params: Vec<Param>,
}

impl Launch {
    /// A launch over a flat range; the span is the kernel's last parameter.
    pub(super) fn flat(
        source: &'static str,
        entry: &'static str,
        span: Span,
        mut params: Vec<Param>,
    ) -> Self {
        params.push(Param::Span(span));
        Self {
            source,
            entry,
            blocks: span.blocks(),
            threads: THREADS,
            params,
        }
    }

    /// A launch of one thread of step.cu.
    fn of_step(entry: &'static str, params: Vec<Param>) -> Self {
        Self {
            source: "step.cu",
            entry,
            blocks: 1,
            threads: 1,
            params,
        }
    }
}

/// The index of a dtype in `entries!`.
pub(super) fn index(what: &'static str, dtype: DType) -> Result<usize, KernelError> {
    float_index(dtype).ok_or(KernelError::Unsupported { what, dtype })
}

/// The parameters are in the order that `rule.rs` documents.
pub(super) fn update(
    device: DeviceId,
    rule: &dyn UpdateRule,
    args: &UpdateArgs,
) -> Result<Launch, KernelError> {
    check::update(device, rule, args)?;
    let form = args.form();
    let kernel = rule.cuda_kernel(&form, args.weight_decay);
    // The kernel of another form would read other parameters.
    let kernel = kernel.filter(|kernel| kernel.form == form);
    let kernel = kernel.ok_or(KernelError::NoKernel {
        rule: rule.name(),
        grad: form.grad,
    })?;

    let (mut streams, param_out) = match args.weights {
        Weights::Fp32 { master, param_out } => (vec![master.erase()], param_out),
        Weights::Remainder { param, remainder } => {
            // SAFETY: the same memory as two-byte elements; only its address and length are used.
            let remainder = unsafe {
                let at = remainder.as_ptr().cast();
                AnySlice::from_raw_parts(at, remainder.len(), DType::F16, device)
            };
            (vec![param.erase(), remainder], None)
        }
    };
    let slots = args.slots.iter().map(|slot| slot.memory);
    let others = [args.grad].into_iter().chain(param_out);
    let arrays = streams
        .iter()
        .copied()
        .chain(slots.clone())
        .chain(others.clone());
    let mut params: Vec<Param> = arrays.map(Param::from).collect();
    params.push(args.scalars.into());
    params.push(Param::Words(kernel.constants));

    let in_blocks = |codec: &Codec| matches!(codec, Codec::Blocks(_));
    let span = match form.slots.iter().any(in_blocks) {
        true => {
            streams.extend(others);
            Span::from_start(&streams)
        }
        false => {
            streams.extend(slots.chain(others));
            Span::of(&streams)
        }
    };
    Ok(Launch::flat(kernel.source, kernel.entry, span, params))
}

pub(super) fn cast(
    device: DeviceId,
    src: AnySlice,
    dst: AnySlice,
    scale: f32,
) -> Result<Launch, KernelError> {
    check::cast(device, src, dst)?;
    let names = [
        entries!("cast_f32"),
        entries!("cast_bf16"),
        entries!("cast_f16"),
    ];
    let entry = names[index("cast: src", src.dtype())?][index("cast: dst", dst.dtype())?];
    Ok(Launch::flat(
        "cast.cu",
        entry,
        Span::of(&[src, dst]),
        vec![src.into(), dst.into(), Param::F32(scale)],
    ))
}

pub(super) fn cast_rows(
    device: DeviceId,
    src: MatrixRows,
    dst: MatrixRows,
    [rows, cols]: [usize; 2],
    scale: f32,
) -> Result<Launch, KernelError> {
    check::cast_rows(device, src, dst, [rows, cols])?;
    let names = [
        entries!("cast_rows_f32"),
        entries!("cast_rows_bf16"),
        entries!("cast_rows_f16"),
    ];
    let from = index("cast_rows: src", src.data.dtype())?;
    let to = index("cast_rows: dst", dst.data.dtype())?;
    let sizes = [rows, cols, src.stride, dst.stride].map(|n| Param::U64(n as u64));
    let mut params = vec![src.data.into(), dst.data.into(), Param::F32(scale)];
    params.extend(sizes);
    let threads = (cols as u64)
        .div_ceil(GROUP_ELEMS)
        .saturating_mul(rows as u64);
    Ok(Launch {
        source: "cast_rows.cu",
        entry: names[from][to],
        blocks: grid(threads.div_ceil(THREADS.into())),
        threads: THREADS,
        params,
    })
}

/// `x / max(norm(x), least)` in place; `stats` are those of x.
pub(super) fn normalise(
    x: DeviceSlice<half::bf16>,
    stats: DeviceSlice<GradStats>,
    least: f64,
) -> Launch {
    let span = Span::of(&[x.erase()]);
    let params = vec![x.into(), stats.into(), Param::F64(least)];
    Launch::flat("normalise.cu", "normalise_bf16", span, params)
}

/// Elements of a block of pack (`PACK_ELEMS` of cuda/pack.cu).
const PACK_ELEMS: u64 = 2048;

/// One launch for each [`RANGES`] parts of a dtype; the first also writes what is before its parts,
/// each what is behind them.
pub(super) fn pack(
    device: DeviceId,
    parts: &[(AnySlice, usize)],
    segments: Segments,
    dst: AnySlice,
) -> Result<Vec<Launch>, KernelError> {
    check::pack(device, parts, segments, dst)?;
    let names = [
        entries!("pack_f32"),
        entries!("pack_bf16"),
        entries!("pack_f16"),
    ];
    let to = index("pack: dst", dst.dtype())?;

    let [start, len, stride, count] = [
        segments.start,
        segments.len,
        segments.stride,
        segments.count,
    ]
    .map(|n| n as u64);

    let blocks = grid(len.div_ceil(PACK_ELEMS).saturating_mul(count));
    let mut runs: Vec<&[(AnySlice, usize)]> = runs(parts, |(part, _)| part.dtype()).collect();
    if runs.is_empty() {
        runs.push(&[]);
    }

    let launch = |(nth, run): (usize, &&[(AnySlice, usize)])| {
        let from = if nth == 0 { 0 } else { run[0].1 as u64 };
        let until = runs.get(nth + 1).map_or(u64::MAX, |next| next[0].1 as u64);
        let src = run
            .first()
            .map_or(Ok(0), |(part, _)| index("pack: part", part.dtype()))?;
        let segments = PackSegments {
            start,
            len,
            stride,
            count,
            from,
            until,
        };
        let ranges = Ranges::param(run.iter().map(|&(part, at)| (part, at as u64)));
        let params = vec![ranges, dst.into(), Param::Segments(segments)];
        Ok(Launch {
            source: "pack.cu",
            entry: names[src][to],
            blocks,
            threads: THREADS,
            params,
        })
    };

    runs.iter().enumerate().map(launch).collect()
}

/// The items cut into runs of one dtype, each of at most [`RANGES`].
fn runs<T>(items: &[T], dtype: impl Fn(&T) -> DType) -> impl Iterator<Item = &[T]> {
    items
        .chunk_by(move |a, b| dtype(a) == dtype(b))
        .flat_map(|run| run.chunks(RANGES))
}

pub(super) fn accumulate(
    device: DeviceId,
    grad: AnySlice,
    acc: DeviceSlice<f32>,
) -> Result<Launch, KernelError> {
    check::accumulate(device, grad, acc)?;
    let entry = entries!("accumulate")[index("accumulate: grad", grad.dtype())?];
    let span = Span::of(&[grad, acc.erase()]);
    Ok(Launch::flat(
        "accumulate.cu",
        entry,
        span,
        vec![grad.into(), acc.into()],
    ))
}

/// Chunks of gradients of these lengths: blocks of the first stage of grad_stats, each with an fp64
/// sum and a 32-bit count in scratch. `None` beyond 2^31 (over 70 thousand billion elements).
fn stats_chunks(lens: impl IntoIterator<Item = usize>) -> Option<u32> {
    let chunks = lens.into_iter().try_fold(0usize, |sum, len| {
        sum.checked_add(len.div_ceil(CHUNK_ELEMS))
    })?;
    Some(i32::try_from(chunks).ok()?.unsigned_abs())
}

/// See [`Kernels::stats_scratch_elems`](crate::Kernels::stats_scratch_elems).
pub(super) fn stats_scratch_elems(lens: &[usize]) -> usize {
    stats_chunks(lens.iter().copied())
        .map_or(usize::MAX, |chunks| (chunks as usize * (8 + 4)).div_ceil(8))
}

/// The two stages for each [`RANGES`] gradients of a dtype; the first has no blocks if there are no
/// elements.
pub(super) fn grad_stats(
    device: DeviceId,
    grads: &[AnySlice],
    scratch: DeviceSlice<f64>,
    out: DeviceSlice<GradStats>,
) -> Result<Vec<[Launch; 2]>, KernelError> {
    let lens: Vec<usize> = grads.iter().map(|grad| grad.len()).collect();
    check::grad_stats(device, grads, scratch, stats_scratch_elems(&lens), out)?;
    let mut end = 0;
    let stages = |run: &[AnySlice]| {
        let entry = entries!("grad_stats_chunks")[index("grad_stats: grad", run[0].dtype())?];
        let mut chunks = 0;
        let ranges = Ranges::param(run.iter().map(|&grad| {
            let first = chunks;
            // 0 is unreachable: the check above requires `usize::MAX` elements of scratch.
            chunks += stats_chunks([grad.len()]).unwrap_or(0);
            (grad, first.into())
        }));
        let counts = Param::Address(scratch.as_ptr() as u64 + u64::from(chunks) * 8);
        let launch = |entry, blocks, params| Launch {
            source: "grad_stats.cu",
            entry,
            blocks,
            threads: THREADS,
            params,
        };
        let out_of_run = out.slice(end..end + run.len());
        end += run.len();
        let first = vec![ranges.clone(), scratch.into(), counts.clone()];
        let second = vec![ranges, scratch.into(), counts, out_of_run.into()];
        let blocks = run.len() as u32;
        Ok([
            launch(entry, chunks, first),
            launch("grad_stats_combine", blocks, second),
        ])
    };

    runs(grads, |grad| grad.dtype()).map(stages).collect()
}

pub(super) fn rank_stats(
    device: DeviceId,
    units: DeviceSlice<GradStats>,
    loss: DeviceSlice<f64>,
    flags: DeviceSlice<u64>,
    out: DeviceSlice<RankStats>,
) -> Result<Launch, KernelError> {
    check::rank_stats(device, units, loss, flags, out)?;
    let params = vec![
        units.into(),
        Param::U64(units.len() as u64),
        loss.into(),
        flags.into(),
        out.into(),
    ];
    Ok(Launch::of_step("rank_stats", params))
}

pub(super) fn advance_step(device: DeviceId, args: &AdvanceArgs) -> Result<Launch, KernelError> {
    check::advance_step(device, args)?;
    let AdvanceArgs {
        ranks,
        config,
        rates,
        state,
        scalars,
        records,
    } = *args;

    let mut params = vec![ranks.into(), Param::U64(ranks.len() as u64), config.into()];
    // `check` found at least one element of scalars.
    params.extend([
        rates.into(),
        Param::U64((rates.len() / scalars.len()) as u64),
        state.into(),
    ]);
    params.extend([scalars.into(), Param::U64(scalars.len() as u64)]);
    params.extend([records.into(), Param::U64(records.len() as u64)]);

    Ok(Launch::of_step("advance_step", params))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::UpdateSlices;
    use crate::{
        AdamHyper, AverageCodecs, CudaKernel, RULE_SCALARS, Rounding, SettingError, Slot,
        StepPoint, UpdateForm,
    };

    fn at<T>(address: usize, len: usize) -> DeviceSlice<T> {
        // SAFETY: building a launch computes with addresses and accesses no memory.
        unsafe {
            DeviceSlice::from_raw_parts(
                std::ptr::without_provenance_mut(address),
                len,
                DeviceId::HOST,
            )
        }
    }

    fn args(len: usize) -> UpdateArgs {
        UpdateArgs {
            weights: Weights::Fp32 {
                master: at(0x1_0000, len),
                param_out: Some(at::<half::f16>(0x5_0000, len).erase()),
            },
            slots: vec![at(0x2_0000, len).into(), at(0x3_0000, len).into()],
            grad: at::<half::bf16>(0x4_0000, len).erase(),
            scalars: at(0x100, 1),
            weight_decay: 0.1,
            rounding: Rounding::Nearest,
        }
    }

    fn adam(args: &UpdateArgs) -> Result<Launch, KernelError> {
        update(DeviceId::HOST, &AdamHyper::default(), args)
    }

    #[test]
    fn adam_passes_its_streams_in_order() {
        let launch = adam(&args(5000)).unwrap();
        let mut params: Vec<Param> = [0x1_0000, 0x2_0000, 0x3_0000, 0x4_0000, 0x5_0000, 0x100]
            .map(Param::Address)
            .into();
        params.push(Param::Words(vec![1e-8f32.to_bits(), 0.1f32.to_bits(), 1]));
        params.push(Param::Span(Span {
            len: 5000,
            head: 0,
            wide: 0b11111,
        }));

        // 20 tiles of 256 elements, 8 a block.
        let expected = Launch {
            source: "adam.cu",
            entry: "adam_bf16_f16",
            blocks: 3,
            threads: 256,
            params,
        };

        assert_eq!(launch, expected);
        let without = UpdateArgs {
            weights: Weights::Fp32 {
                master: at(0x1_0000, 5000),
                param_out: None,
            },
            ..args(5000)
        };
        let without = adam(&without).unwrap();
        assert_eq!((without.entry, without.params.len()), ("adam_bf16", 7));
    }

    /// A rule that has no kernel, or returns that of arguments that it does not have.
    #[derive(Debug)]
    struct Borrowed(Option<UpdateForm>);

    impl UpdateRule for Borrowed {
        fn name(&self) -> &'static str {
            "borrowed"
        }

        fn settings(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn check(&self) -> Result<(), SettingError> {
            Ok(())
        }

        fn weight_decay(&self) -> f64 {
            0.0
        }

        fn slots(&self, averages: AverageCodecs) -> Vec<Slot> {
            let name = "momentum";
            let codec = averages.signed;
            vec![Slot { name, codec }]
        }

        fn scalars(&self, _: &StepPoint) -> [f32; RULE_SCALARS] {
            [0.0; RULE_SCALARS]
        }

        fn update(&self, _: UpdateSlices<'_>) -> Result<(), KernelError> {
            Ok(())
        }

        fn cuda_kernel(&self, _: &UpdateForm, weight_decay: f64) -> Option<CudaKernel> {
            AdamHyper::default().cuda_kernel(self.0.as_ref()?, weight_decay)
        }
    }

    #[test]
    fn kernels_of_other_arguments_are_refused() {
        let own = UpdateArgs {
            slots: vec![at(0x2_0000, 8).into()],
            ..args(8)
        };
        for rule in [Borrowed(None), Borrowed(Some(args(8).form()))] {
            let error = update(DeviceId::HOST, &rule, &own).unwrap_err();
            assert_eq!(
                error.to_string(),
                "the update rule borrowed has no CUDA kernel for a gradient of bf16: train on the host, or add the kernel"
            );
        }
    }

    #[test]
    fn empty_ranges_need_no_block() {
        assert_eq!(adam(&args(0)).unwrap().blocks, 0);
        let doubles: DeviceSlice<f64> = at(0x1000, 0);
        let unsupported = |what, dtype| Err(KernelError::Unsupported { what, dtype });
        assert_eq!(
            cast(DeviceId::HOST, doubles.erase(), doubles.erase(), 1.0),
            unsupported("cast: src", DType::F64)
        );
        let (src, dst): (DeviceSlice<f32>, DeviceSlice<half::bf16>) =
            (at(0x1000, 0), at(0x2000, 0));
        assert_eq!(
            cast(DeviceId::HOST, src.erase(), dst.erase(), 1.0)
                .unwrap()
                .blocks,
            0
        );
        assert_eq!(
            accumulate(DeviceId::HOST, dst.erase(), src).unwrap().blocks,
            0
        );
        // The second stage writes the zero statistics.
        let launches = grad_stats(DeviceId::HOST, &[src.erase()], doubles, at(0x3000, 1)).unwrap();
        let [[chunks, combine]] = &launches[..] else {
            panic!("{launches:?}")
        };
        assert_eq!(
            (chunks.blocks, combine.entry, combine.blocks),
            (0, "grad_stats_combine", 1)
        );
    }

    #[test]
    fn stats_scratch_has_sums_before_counts() {
        let (grad, scratch): (DeviceSlice<f32>, _) = (
            at(0x10_0000, 70_000),
            at(0x1000, stats_scratch_elems(&[70_000])),
        );
        let grads = [grad.erase()];
        let launches = grad_stats(DeviceId::HOST, &grads, scratch, at(0x100, 1)).unwrap();
        let [[chunks, combine]] = &launches[..] else {
            panic!("{launches:?}")
        };
        // 3 chunks: 24 bytes of sums, 12 of counts.
        assert_eq!(scratch.len(), 5);
        let sums = Param::Address(0x1000);
        let counts = Param::Address(0x1000 + 24);
        let ranges = Ranges::param([(grad.erase(), 0)]);
        assert_eq!(
            (chunks.blocks, &chunks.params),
            (3, &vec![ranges.clone(), sums.clone(), counts.clone()])
        );
        assert_eq!(
            combine.params,
            [ranges, sums, counts, Param::Address(0x100)]
        );
        let short = grad_stats(DeviceId::HOST, &grads, scratch.slice(0..4), at(0x100, 1));
        assert_eq!(
            short.unwrap_err().to_string(),
            "grad_stats: scratch: expected 5 elements, got 4"
        );

        assert_eq!(stats_chunks([0]), Some(0));
        assert_eq!(stats_chunks([32_769, 1]), Some(3));
        assert_eq!(stats_chunks([usize::MAX]), None);
        assert_eq!(stats_chunks([usize::MAX; 1 << 16]), None);
    }

    #[test]
    fn many_gradients_share_two_launches() {
        let grads: Vec<AnySlice> = (0..130)
            .map(|i| match i < 129 {
                true => at::<f32>(0x10_0000 + 0x1_0000 * i, 10_000).erase(),
                false => at::<half::bf16>(0x8000_0000, 40_000).erase(),
            })
            .collect();

        let launches = grad_stats(
            DeviceId::HOST,
            &grads,
            at(0x1_0000_0000, 1000),
            at(0x10, 130),
        )
        .unwrap();

        let found =
            |l: &[Launch; 2]| (l[0].entry, l[0].blocks, l[1].blocks, l[1].params[3].clone());
        let found: Vec<_> = launches.iter().map(found).collect();
        let out = |nth: u64| Param::Address(0x10 + 16 * nth);
        let f32s = "grad_stats_chunks_f32";

        assert_eq!(
            found,
            [
                (f32s, 128, 128, out(0)),
                (f32s, 1, 1, out(128)),
                ("grad_stats_chunks_bf16", 2, 1, out(129))
            ]
        );
    }

    #[test]
    fn a_bucket_is_packed_by_one_launch() {
        let segments = Segments {
            start: 100,
            len: 3000,
            stride: 10_000,
            count: 8,
        };

        let (part, dst): (DeviceSlice<f32>, _) = (
            at(0x10_0000, 80_000),
            at::<half::bf16>(0x100, 24_000).erase(),
        );
        let launches = pack(DeviceId::HOST, &[(part.erase(), 0)], segments, dst).unwrap();
        let [launch] = &launches[..] else {
            panic!("{launches:?}")
        };
        // Two blocks for each rank's segment.
        assert_eq!((launch.entry, launch.blocks), ("pack_f32_bf16", 16));
        let [start, len, stride, count] = [100, 3000, 10_000, 8];

        let all = PackSegments {
            start,
            len,
            stride,
            count,
            from: 0,
            until: u64::MAX,
        };

        assert_eq!(launch.params[2], Param::Segments(all));
        // A launch writes from its first part to that of the next.
        let parts = [
            (part.slice(0..10).erase(), 5),
            (at::<half::f16>(0x200_0000, 4).erase(), 30),
        ];
        let launches = pack(DeviceId::HOST, &parts, segments, dst).unwrap();
        let windows: Vec<_> = launches
            .iter()
            .map(|l| (l.entry, l.params[2].clone()))
            .collect();
        let first = Param::Segments(PackSegments { until: 30, ..all });
        let second = Param::Segments(PackSegments { from: 30, ..all });
        assert_eq!(
            windows,
            [("pack_f32_bf16", first), ("pack_f16_bf16", second)]
        );
    }
}

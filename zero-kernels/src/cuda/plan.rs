//! Operations as data: which kernel, on how many blocks, with which parameters. Nothing here needs a device.

use std::ffi::c_void;

use zero_alloc::device::{AnySlice, DType, DeviceSlice};

use super::entry;
use super::geometry::{Span, StatsPlan, THREADS};
use crate::kernels::{AdamConstants, DecideArgs, RemainderArgs};
use crate::step::RankStats;
use crate::{AdamArgs, AdamHyper, GradStats, KernelError, check};

/// A kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Param {
    /// A place in device memory.
    Address(u64),
    /// A 64-bit number.
    U64(u64),
    /// A number in fp32.
    F32(f32),
    /// How a range is cut.
    Span(Span),
    /// Constants of Adam.
    Adam(AdamConstants),
}

impl Param {
    /// The value, for the driver to read.
    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        match self {
            Self::Address(x) | Self::U64(x) => std::ptr::from_mut(x).cast(),
            Self::F32(x) => std::ptr::from_mut(x).cast(),
            Self::Span(x) => std::ptr::from_mut(x).cast(),
            Self::Adam(x) => std::ptr::from_mut(x).cast(),
        }
    }

    /// How many bytes the kernel's parameter has.
    pub fn size_bytes(&self) -> usize {
        match self {
            Self::Address(_) | Self::U64(_) => 8,
            Self::F32(_) => 4,
            Self::Span(_) => size_of::<Span>(),
            Self::Adam(_) => size_of::<AdamConstants>(),
        }
    }
}

fn at<T>(slice: DeviceSlice<T>) -> Param {
    Param::Address(slice.as_ptr() as u64)
}

fn any(slice: AnySlice) -> Param {
    Param::Address(slice.as_ptr() as u64)
}

/// One launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The source file.
    pub source: &'static str,
    /// The kernel in it.
    pub entry: &'static str,
    /// Blocks; never 0.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// The kernel's parameters, in its order.
    pub params: Vec<Param>,
}

impl Launch {
    /// A launch over a flat range; `None` if that is empty.
    fn flat(source: &'static str, entry: &'static str, span: Span, params: Vec<Param>) -> Option<Self> {
        let blocks = span.blocks();
        (blocks > 0).then_some(Self { source, entry, blocks, threads: THREADS, params })
    }

    fn single(source: &'static str, entry: &'static str, threads: u32, params: Vec<Param>) -> Self {
        Self { source, entry, blocks: 1, threads, params }
    }
}

/// See [`Kernels::adam`](crate::Kernels::adam). `None`: there is nothing to do.
///
/// # Errors
/// The arguments do not fit.
pub fn adam(args: &AdamArgs) -> Result<Option<Launch>, KernelError> {
    check::adam(args)?;
    let entry = entry::adam(args.grad.dtype(), args.param_out.map(AnySlice::dtype))?;
    let (master, m, v) = (args.master, args.first_moment, args.second_moment);
    let streams = [master.erase(), m.erase(), v.erase(), args.grad, args.param_out.unwrap_or(args.grad)];
    let span = Span::of(if args.param_out.is_some() { &streams } else { &streams[..4] });
    let mut params = vec![at(master), at(m), at(v), any(args.grad)];
    params.extend(args.param_out.map(any));
    params.extend([at(args.scalars), Param::Adam(args.hyper.constants()), Param::Span(span)]);
    Ok(Launch::flat("adam.cu", entry, span, params))
}

/// See [`Kernels::adam_remainder`](crate::Kernels::adam_remainder). `None`: there is nothing to do.
///
/// # Errors
/// The arguments do not fit.
pub fn adam_remainder(args: &RemainderArgs) -> Result<Option<Launch>, KernelError> {
    check::adam_remainder(args)?;
    let entry = entry::adam_remainder(args.grad.dtype())?;
    // SAFETY: the same memory as two-byte elements, for its address and length alone.
    let remainder =
        unsafe { AnySlice::from_raw_parts(args.remainder.as_ptr().cast(), args.remainder.len(), DType::F16) };
    let (m, v) = (args.first_moment, args.second_moment);
    let span = Span::of(&[args.param.erase(), remainder, m.erase(), v.erase(), args.grad]);
    let constants = Param::Adam(args.hyper.constants());
    let params = vec![
        at(args.param),
        at(args.remainder),
        at(m),
        at(v),
        any(args.grad),
        at(args.scalars),
        constants,
        Param::Span(span),
    ];
    Ok(Launch::flat("adam_remainder.cu", entry, span, params))
}

/// See [`Kernels::cast`](crate::Kernels::cast). `None`: there is nothing to do.
///
/// # Errors
/// The arguments do not fit.
pub fn cast(src: AnySlice, dst: AnySlice, scale: f32) -> Result<Option<Launch>, KernelError> {
    check::cast(src, dst)?;
    let entry = entry::cast(src.dtype(), dst.dtype())?;
    let span = Span::of(&[src, dst]);
    Ok(Launch::flat("cast.cu", entry, span, vec![any(src), any(dst), Param::F32(scale), Param::Span(span)]))
}

/// See [`Kernels::accumulate`](crate::Kernels::accumulate). `None`: there is nothing to do.
///
/// # Errors
/// The arguments do not fit.
pub fn accumulate(grad: AnySlice, acc: DeviceSlice<f32>) -> Result<Option<Launch>, KernelError> {
    check::accumulate(grad, acc)?;
    let entry = entry::accumulate(grad.dtype())?;
    let span = Span::of(&[grad, acc.erase()]);
    Ok(Launch::flat("accumulate.cu", entry, span, vec![any(grad), at(acc), Param::Span(span)]))
}

/// Elements of scratch for the statistics of `len` gradients.
pub fn stats_scratch_elems(len: usize) -> usize {
    let bytes = StatsPlan::new(len as u64).map_or(u64::MAX, |plan| plan.scratch_bytes);
    usize::try_from(bytes.div_ceil(8)).unwrap_or(usize::MAX)
}

/// See [`Kernels::grad_stats`](crate::Kernels::grad_stats): the two stages, the first of which is nothing for no
/// elements.
///
/// # Errors
/// The arguments do not fit.
pub fn grad_stats(
    grad: AnySlice,
    scratch: DeviceSlice<f64>,
    out: DeviceSlice<GradStats>,
) -> Result<(Option<Launch>, Launch), KernelError> {
    let entry = entry::stats(grad.dtype())?;
    check::grad_stats(grad, scratch, stats_scratch_elems(grad.len()), out)?;
    // More than 2^31 blocks do not fit any memory; then no scratch was long enough either.
    let plan = StatsPlan::new(grad.len() as u64).unwrap_or(StatsPlan { chunks: 0, scratch_bytes: 0 });
    let sums = scratch.as_ptr() as u64;
    let counts = Param::Address(sums + u64::from(plan.chunks) * 8);
    let params = vec![any(grad), Param::U64(grad.len() as u64), Param::Address(sums), counts];
    let first = Launch { source: "grad_stats.cu", entry, blocks: plan.chunks, threads: THREADS, params };
    let params = vec![Param::Address(sums), counts, Param::U64(plan.chunks.into()), at(out)];
    let second = Launch::single("grad_stats.cu", entry::STATS_COMBINE, THREADS, params);
    Ok(((plan.chunks > 0).then_some(first), second))
}

/// See [`Kernels::make_vote`](crate::Kernels::make_vote).
///
/// # Errors
/// The arguments do not fit.
pub fn make_vote(
    units: DeviceSlice<GradStats>,
    loss: DeviceSlice<f64>,
    flags: DeviceSlice<u64>,
    out: DeviceSlice<RankStats>,
) -> Result<Launch, KernelError> {
    check::make_vote(units, loss, flags, out)?;
    let params = vec![at(units), Param::U64(units.len() as u64), at(loss), at(flags), at(out)];
    Ok(Launch::single("step.cu", entry::MAKE_VOTE, 1, params))
}

/// See [`Kernels::decide_step`](crate::Kernels::decide_step).
///
/// # Errors
/// The arguments do not fit.
pub fn decide_step(args: &DecideArgs) -> Result<Launch, KernelError> {
    check::decide_step(args)?;
    let DecideArgs { votes, settings, rates, state, scalars, reports } = *args;
    let mut params = vec![at(votes), Param::U64(votes.len() as u64), at(settings)];
    params.extend([at(rates), Param::U64(rates.len() as u64), at(state), at(scalars)]);
    params.extend([at(reports), Param::U64(reports.len() as u64)]);
    Ok(Launch::single("step.cu", entry::DECIDE_STEP, 1, params))
}

/// What [`idle`] launches touch.
pub const IDLE_BYTES: usize = 1024;

/// Every kernel once, on empty ranges: to be run on [`IDLE_BYTES`] zeroes at `place`, which is all that they touch.
pub fn idle(place: u64) -> Vec<Launch> {
    // Places for single values, each further from the next than the largest of them.
    let slot = |nth: u64| Param::Address(place + nth * 128);
    let (none, zero) = (Param::Span(Span::default()), Param::U64(0));
    let hyper = AdamHyper { beta1: 0.0, beta2: 0.0, eps: 0.0, weight_decay: 0.0, decoupled: true };
    let constants = Param::Adam(hyper.constants());
    let mut launches = Vec::new();
    for source in super::SOURCES {
        for entry in entry::of_source(source.name) {
            let data = |count: usize| vec![slot(0); count];
            let params = match source.name {
                // One more stream where a parameter is written: its name has three parts.
                "adam.cu" => {
                    [data(if entry.matches('_').count() == 2 { 5 } else { 4 }), vec![slot(1), constants, none]]
                        .concat()
                }
                "adam_remainder.cu" => [data(5), vec![slot(1), constants, none]].concat(),
                "cast.cu" => [data(2), vec![Param::F32(1.0), none]].concat(),
                "accumulate.cu" => [data(2), vec![none]].concat(),
                _ => match entry {
                    entry::STATS_COMBINE => vec![slot(0), slot(0), zero, slot(1)],
                    entry::MAKE_VOTE => vec![slot(0), zero, slot(1), slot(1), slot(2)],
                    // A table without rates: the run is halted.
                    entry::DECIDE_STEP => {
                        vec![slot(0), zero, slot(1), slot(2), zero, slot(3), slot(4), slot(5), Param::U64(1)]
                    }
                    _ => vec![slot(0), zero, slot(1), slot(2)],
                },
            };
            let threads = if source.name == "step.cu" { 1 } else { THREADS };
            launches.push(Launch { source: source.name, entry, blocks: 1, threads, params });
        }
    }
    launches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepScalars;

    fn at<T>(place: usize, len: usize) -> DeviceSlice<T> {
        // SAFETY: planning computes with addresses and never follows them.
        unsafe { DeviceSlice::from_raw_parts(std::ptr::without_provenance_mut(place), len) }
    }

    const HYPER: AdamHyper = AdamHyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, decoupled: true };

    fn args(len: usize) -> AdamArgs {
        let scalars: DeviceSlice<StepScalars> = at(0x100, 1);
        let (first_moment, second_moment, grad) =
            (at(0x2_0000, len), at(0x3_0000, len), at::<half::bf16>(0x4_0000, len));
        let param_out = Some(at::<half::f16>(0x5_0000, len).erase());
        let grad = grad.erase();
        AdamArgs { master: at(0x1_0000, len), first_moment, second_moment, grad, param_out, scalars, hyper: HYPER }
    }

    #[test]
    fn adam_becomes_one_launch_with_its_streams_in_order() {
        let launch = adam(&args(5000)).unwrap().unwrap();
        let span = Span { len: 5000, head: 0, wide: 0b11111 };
        let place = Param::Address;
        let expected = Launch {
            source: "adam.cu",
            entry: "adam_bf16_f16",
            // 20 tiles of 256 elements, 8 a block.
            blocks: 3,
            threads: 256,
            params: vec![
                place(0x1_0000),
                place(0x2_0000),
                place(0x3_0000),
                place(0x4_0000),
                place(0x5_0000),
                place(0x100),
                Param::Adam(HYPER.constants()),
                Param::Span(span),
            ],
        };
        assert_eq!(launch, expected);
        let without = adam(&AdamArgs { param_out: None, ..args(5000) }).unwrap().unwrap();
        assert_eq!((without.entry, without.params.len()), ("adam_bf16", 7));
    }

    #[test]
    fn nothing_is_launched_for_no_elements_but_the_arguments_are_checked() {
        assert_eq!(adam(&args(0)), Ok(None));
        let none: DeviceSlice<f64> = at(0x1000, 0);
        let unsupported = |what| Err(KernelError::Unsupported { what, dtype: DType::F64 });
        assert_eq!(cast(none.erase(), none.erase(), 1.0), unsupported("cast: src"));
        let (src, dst): (DeviceSlice<f32>, DeviceSlice<half::bf16>) = (at(0x1000, 0), at(0x2000, 0));
        assert_eq!(cast(src.erase(), dst.erase(), 1.0), Ok(None));
        assert_eq!(accumulate(dst.erase(), src), Ok(None));
        // Statistics of nothing are zeroes, which somebody must write.
        let (chunks, combine) = grad_stats(src.erase(), none, at(0x3000, 1)).unwrap();
        assert_eq!((chunks, combine.entry, combine.blocks), (None, "grad_stats_combine", 1));
    }

    #[test]
    fn statistics_have_their_sums_before_their_counts_in_scratch() {
        let (grad, scratch): (DeviceSlice<f32>, _) = (at(0x10_0000, 70_000), at(0x1000, stats_scratch_elems(70_000)));
        let (chunks, combine) = grad_stats(grad.erase(), scratch, at(0x100, 1)).unwrap();
        // 3 chunks: 24 bytes of sums, 12 of counts.
        assert_eq!(scratch.len(), 5);
        let (sums, counts) = (Param::Address(0x1000), Param::Address(0x1000 + 24));
        let chunks = chunks.unwrap();
        assert_eq!((chunks.blocks, &chunks.params[2..]), (3, &[sums, counts][..]));
        assert_eq!(combine.params, [sums, counts, Param::U64(3), Param::Address(0x100)]);
        let short = grad_stats(grad.erase(), scratch.slice(0..4), at(0x100, 1)).unwrap_err();
        assert_eq!(short, KernelError::LengthMismatch { what: "grad_stats: scratch", expected: 5, got: 4 });
    }

    #[test]
    fn idle_launches_are_every_kernel_once_within_their_bytes() {
        let launches = idle(0x1000);
        let mut entries: Vec<_> = launches.iter().map(|l| l.entry).collect();
        let all: Vec<_> = crate::cuda::SOURCES.iter().flat_map(|s| s.entries()).collect();
        assert_eq!(entries, all);
        entries.sort_unstable();
        entries.dedup();
        assert_eq!(entries.len(), all.len());
        for launch in launches {
            assert_eq!(launch.blocks, 1);
            for param in launch.params {
                // The largest single value has 88 bytes.
                assert!(!matches!(param, Param::Address(a) if a < 0x1000 || a + 128 > 0x1000 + IDLE_BYTES as u64));
                assert!(!matches!(param, Param::Span(span) if span.len > 0));
            }
        }
    }
}

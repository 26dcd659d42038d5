//! What a launch refuses, on any device: lengths, alignment, overlap. Dtypes are refused where a launch is chosen.

use zero_alloc::device::{AnySlice, DeviceSlice};

use crate::kernels::{DecideArgs, RemainderArgs};
use crate::step::RankStats;
use crate::{AdamArgs, GradStats, KernelError};

pub(crate) fn same_len(what: &'static str, expected: usize, got: usize) -> Result<(), KernelError> {
    if expected == got { Ok(()) } else { Err(KernelError::LengthMismatch { what, expected, got }) }
}

fn at_least(what: &'static str, expected: usize, got: usize) -> Result<(), KernelError> {
    if expected <= got { Ok(()) } else { Err(KernelError::LengthMismatch { what, expected, got }) }
}

/// Where an argument lies.
#[derive(Clone, Copy)]
struct Extent {
    what: &'static str,
    start: usize,
    end: usize,
    align_bytes: usize,
}

impl Extent {
    fn any(what: &'static str, slice: AnySlice) -> Self {
        let start = slice.as_ptr() as usize;
        Self { what, start, end: start.saturating_add(slice.len_bytes()), align_bytes: slice.dtype().size_bytes() }
    }

    fn typed<T>(what: &'static str, slice: DeviceSlice<T>) -> Self {
        let start = slice.as_ptr() as usize;
        let bytes = slice.len().saturating_mul(size_of::<T>());
        Self { what, start, end: start.saturating_add(bytes), align_bytes: align_of::<T>() }
    }
}

/// Refuses misaligned arguments, and a written one that shares memory with another: `&mut` must be exclusive.
fn places(written: &[Extent], read: &[Extent]) -> Result<(), KernelError> {
    for e in written.iter().chain(read) {
        if e.start < e.end && !e.start.is_multiple_of(e.align_bytes) {
            let Extent { what, start: address, align_bytes, .. } = *e;
            return Err(KernelError::Misaligned { what, address, align_bytes });
        }
    }
    for (i, a) in written.iter().enumerate() {
        for b in written[i + 1..].iter().chain(read) {
            if a.start < b.end && b.start < a.end {
                return Err(KernelError::Overlap { first: a.what, second: b.what });
            }
        }
    }
    Ok(())
}

pub(crate) fn adam(args: &AdamArgs) -> Result<(), KernelError> {
    let n = args.master.len();
    same_len("adam: first_moment", n, args.first_moment.len())?;
    same_len("adam: second_moment", n, args.second_moment.len())?;
    same_len("adam: grad", n, args.grad.len())?;
    same_len("adam: param_out", n, args.param_out.map_or(n, AnySlice::len))?;
    same_len("adam: scalars", 1, args.scalars.len())?;
    let mut written = [Extent::typed("adam: master", args.master); 4];
    written[1] = Extent::typed("adam: first_moment", args.first_moment);
    written[2] = Extent::typed("adam: second_moment", args.second_moment);
    let written = match args.param_out {
        None => &written[..3],
        Some(param) => {
            written[3] = Extent::any("adam: param_out", param);
            &written[..]
        }
    };
    places(written, &[Extent::any("adam: grad", args.grad), Extent::typed("adam: scalars", args.scalars)])
}

pub(crate) fn adam_remainder(args: &RemainderArgs) -> Result<(), KernelError> {
    let n = args.param.len();
    same_len("adam_remainder: remainder", n, args.remainder.len())?;
    same_len("adam_remainder: first_moment", n, args.first_moment.len())?;
    same_len("adam_remainder: second_moment", n, args.second_moment.len())?;
    same_len("adam_remainder: grad", n, args.grad.len())?;
    same_len("adam_remainder: scalars", 1, args.scalars.len())?;
    let written = [
        Extent::typed("adam_remainder: param", args.param),
        Extent::typed("adam_remainder: remainder", args.remainder),
        Extent::typed("adam_remainder: first_moment", args.first_moment),
        Extent::typed("adam_remainder: second_moment", args.second_moment),
    ];
    let scalars = Extent::typed("adam_remainder: scalars", args.scalars);
    places(&written, &[Extent::any("adam_remainder: grad", args.grad), scalars])
}

pub(crate) fn cast(src: AnySlice, dst: AnySlice) -> Result<(), KernelError> {
    same_len("cast: dst", src.len(), dst.len())?;
    places(&[Extent::any("cast: dst", dst)], &[Extent::any("cast: src", src)])
}

pub(crate) fn accumulate(grad: AnySlice, acc: DeviceSlice<f32>) -> Result<(), KernelError> {
    same_len("accumulate: acc", grad.len(), acc.len())?;
    places(&[Extent::typed("accumulate: acc", acc)], &[Extent::any("accumulate: grad", grad)])
}

pub(crate) fn grad_stats(
    grad: AnySlice,
    scratch: DeviceSlice<f64>,
    scratch_elems: usize,
    out: DeviceSlice<GradStats>,
) -> Result<(), KernelError> {
    same_len("grad_stats: out", 1, out.len())?;
    at_least("grad_stats: scratch", scratch_elems, scratch.len())?;
    let written = [Extent::typed("grad_stats: out", out), Extent::typed("grad_stats: scratch", scratch)];
    places(&written, &[Extent::any("grad_stats: grad", grad)])
}

pub(crate) fn make_vote(
    units: DeviceSlice<GradStats>,
    loss: DeviceSlice<f64>,
    flags: DeviceSlice<u64>,
    out: DeviceSlice<RankStats>,
) -> Result<(), KernelError> {
    same_len("make_vote: loss", 1, loss.len())?;
    same_len("make_vote: flags", 1, flags.len())?;
    same_len("make_vote: out", 1, out.len())?;
    let read = [
        Extent::typed("make_vote: units", units),
        Extent::typed("make_vote: loss", loss),
        Extent::typed("make_vote: flags", flags),
    ];
    places(&[Extent::typed("make_vote: out", out)], &read)
}

pub(crate) fn decide_step(args: &DecideArgs) -> Result<(), KernelError> {
    at_least("decide_step: votes", 1, args.votes.len())?;
    same_len("decide_step: settings", 1, args.settings.len())?;
    same_len("decide_step: state", 1, args.state.len())?;
    same_len("decide_step: scalars", 1, args.scalars.len())?;
    at_least("decide_step: reports", 1, args.reports.len())?;
    let written = [
        Extent::typed("decide_step: state", args.state),
        Extent::typed("decide_step: scalars", args.scalars),
        Extent::typed("decide_step: reports", args.reports),
    ];
    let read = [
        Extent::typed("decide_step: votes", args.votes),
        Extent::typed("decide_step: settings", args.settings),
        Extent::typed("decide_step: rates", args.rates),
    ];
    places(&written, &read)
}

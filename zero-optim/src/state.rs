//! Host access to ranges of the state.

use std::ops::Range;
use std::time::Duration;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice};
use zero_kernels::{CodedSlice, Rounding, join, split};

use crate::format::StateKind;
use crate::pieces::{Access, Array, MasterSlice, PieceState, remainder_bytes};
use crate::{OptimError, ShardedOptimizer};

/// A range of a unit's state of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRange {
    /// The kind.
    pub kind: StateKind,
    /// The position of the unit in [`ShardedOptimizer::segments`].
    pub unit: usize,
    /// The elements, relative to the segment's start.
    pub elems: Range<usize>,
}

impl<D: Device> ShardedOptimizer<D> {
    /// Reads a range of the state as fp32 and waits for it, at most `limit` for each copy. The
    /// masters of fp32 training and of frozen elements are the parameters; the slots of frozen
    /// elements are 0. `param` are all slices of the unit's parameter, as in
    /// [`UnitSlices::param`](crate::UnitSlices::param); masters that have no memory are 0.
    ///
    /// # Errors
    /// No such kind, unit or range, another length of `out`, slices that do not match the segment, or the
    /// stream failed.
    pub fn read_state(
        &mut self,
        stream: &D::Stream,
        range: &StateRange,
        param: &[(AnySlice, usize)],
        out: &mut [f32],
        limit: Duration,
    ) -> Result<(), OptimError> {
        let array = self.array_of(range)?;
        let parts = self.state_parts(range, param, out.len())?;
        self.enter(stream)?;
        out.fill(0.0);
        for (at, memory) in parts {
            download(&self.device, stream, memory, &mut out[at], limit)?;
        }

        self.access_range(
            stream,
            (range, array),
            Access::Read(array),
            |device, at, values| match values {
                Values::Masters(slice) => Ok(download(
                    device,
                    stream,
                    slice.erase(),
                    &mut out[at],
                    limit,
                )?),
                Values::Slot(slot) => {
                    let mut bytes = vec![0; slot.coded.memory.len_bytes()];
                    device.download(stream, slot.coded.memory.bytes(), &mut bytes, limit)?;
                    let mut values = vec![0.0; slot.elems];
                    slot.coded.codec.decode(&bytes, &mut values)?;
                    out[at].copy_from_slice(&values[slot.part]);
                    Ok(())
                }
                Values::Remainders(rest, elems) => {
                    let mut bits = vec![0u16; rest.len()];
                    device.download(
                        stream,
                        remainder_bytes(rest),
                        bytemuck::cast_slice_mut(&mut bits),
                        limit,
                    )?;
                    for (of_rest, in_param) in param_parts(param, &elems) {
                        let mut params = vec![0u16; of_rest.len()];
                        device.download(
                            stream,
                            in_param,
                            bytemuck::cast_slice_mut(&mut params),
                            limit,
                        )?;
                        let out = &mut out[at.start + of_rest.start..at.start + of_rest.end];
                        for (out, (param, rest)) in
                            out.iter_mut().zip(params.into_iter().zip(&bits[of_rest]))
                        {
                            *out = join(bf16::from_bits(param), *rest as i16);
                        }
                    }
                    Ok(())
                }
            },
        )
    }

    /// Writes a range of the state and waits for it: the opposite of [`Self::read_state`]. Masters
    /// of frozen elements are rounded to the dtype of the parameters; slots of frozen elements are
    /// not stored. Slots in blocks are written in whole blocks. After writing masters call
    /// [`Self::write_params`].
    ///
    /// # Errors
    /// As [`Self::read_state`].
    pub fn write_state(
        &mut self,
        stream: &D::Stream,
        range: &StateRange,
        param: &[(AnySlice, usize)],
        values: &[f32],
        limit: Duration,
    ) -> Result<(), OptimError> {
        let array = self.array_of(range)?;
        let parts = self.state_parts(range, param, values.len())?;
        let name = self.segment(range.unit)?.name.clone();
        self.enter(stream)?;
        for (at, memory) in parts {
            upload(&self.device, stream, &values[at], memory, limit)?;
        }

        self.access_range(
            stream,
            (range, array),
            Access::Update,
            |device, at, of_piece| match of_piece {
                Values::Masters(slice) => {
                    Ok(upload(device, stream, &values[at], slice.erase(), limit)?)
                }
                Values::Slot(slot) => {
                    let CodedSlice { codec, .. } = slot.coded;
                    let Range { start, end } = slot.part;
                    let block_elems = codec.block_elems();
                    let is_whole = |at: usize| at.is_multiple_of(block_elems);
                    if !is_whole(start) || !is_whole(end) {
                        return Err(OptimError::PartOfBlock {
                            unit: name.clone(),
                            kind: range.kind.name(),
                            start: range.elems.start + at.start,
                            end: range.elems.start + at.end,
                            block_elems,
                        });
                    }
                    let mut bytes = vec![0; codec.bytes(at.len())];
                    codec.encode(&values[at], &mut bytes, Rounding::Nearest)?;
                    let memory = slot.coded.slice(slot.part).memory.bytes();
                    Ok(device.upload(stream, &bytes, memory, limit)?)
                }
                Values::Remainders(rest, elems) => {
                    let (params, bits): (Vec<u16>, Vec<u16>) = values[at]
                        .iter()
                        .map(|w| split(*w))
                        .map(|(param, rest)| (param.to_bits(), rest as u16))
                        .unzip();
                    device.upload(
                        stream,
                        bytemuck::cast_slice(&bits),
                        remainder_bytes(rest),
                        limit,
                    )?;
                    for (of_rest, in_param) in param_parts(param, &elems) {
                        device.upload(
                            stream,
                            bytemuck::cast_slice(&params[of_rest]),
                            in_param,
                            limit,
                        )?;
                    }
                    Ok(())
                }
            },
        )
    }

    /// Calls `run` for each part of a range that the state has, with the part's place in the range.
    fn access_range(
        &mut self,
        stream: &D::Stream,
        (range, array): (&StateRange, Array),
        access: Access,
        mut run: impl FnMut(&D, Range<usize>, Values) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let StateRange { unit, elems, .. } = range;
        self.check_state()?;
        // The masters of fp32 training are the parameters.
        if array == Array::Masters && self.param_dtype == DType::F32 {
            return Ok(());
        }
        // Neighbouring trained elements with the same arrays have neighbouring state.
        let mut runs: Vec<(Range<usize>, Range<usize>)> = Vec::new();

        for (elems, state, _) in self.groups.trained(*unit, elems.clone()) {
            let is_next = |(last, of_last): &&mut (Range<usize>, Range<usize>)| {
                last.end == elems.start && of_last.end == state.start
            };
            match runs.last_mut().filter(is_next) {
                Some((last, of_last)) => (last.end, of_last.end) = (elems.end, state.end),
                None => runs.push((elems, state)),
            }
        }

        for (of_unit, state) in runs {
            for overlap in self.state.within(&state) {
                let nth = match array {
                    Array::Masters => None,
                    Array::Slot(name) => match self.state.arrays_of(&overlap).slot(name) {
                        // The rule of these elements has no such slot.
                        None => continue,
                        nth => nth,
                    },
                };
                let held = self.state.acquire(stream, &overlap, access)?;
                let piece = &held.piece;
                let (of_state, of_piece) = piece.overlap(&state);
                let in_unit = of_unit.start + of_state.start..of_unit.start + of_state.end;
                let at = in_unit.start - elems.start..in_unit.end - elems.start;
                let values = match (nth, piece.masters) {
                    (Some(nth), _) => Values::Slot(slot_part(piece, nth, of_piece)),
                    (None, MasterSlice::Fp32(masters)) => Values::Masters(masters.slice(of_piece)),
                    (None, MasterSlice::Remainders(rest)) => {
                        Values::Remainders(rest.slice(of_piece), in_unit)
                    }
                    (None, MasterSlice::Params) => continue,
                };
                run(&self.device, at, values)?;
                held.release()?;
            }
        }

        Ok(())
    }

    /// The array of a range.
    fn array_of(&self, range: &StateRange) -> Result<Array, OptimError> {
        self.array(range.kind).ok_or_else(|| OptimError::NoState {
            kind: range.kind.name(),
            kinds: self.kinds().into_iter().map(StateKind::name).collect(),
        })
    }

    /// The parts of the range that are in the parameter, each with its place in the range.
    fn state_parts(
        &self,
        range: &StateRange,
        param: &[(AnySlice, usize)],
        values: usize,
    ) -> Result<Vec<(Range<usize>, AnySlice)>, OptimError> {
        let StateRange { kind, unit, elems } = range;
        let units = self.segments().len();
        let segment = self
            .segments()
            .get(*unit)
            .ok_or(OptimError::NoUnit { unit: *unit, units })?;
        let start = elems.start;
        let end = elems.end;
        let len = segment.len();
        let name = || segment.name.clone();

        if start > end || end > len {
            return Err(OptimError::StateRange {
                unit: name(),
                kind: kind.name(),
                start,
                end,
                len,
            });
        }

        if values != end - start {
            return Err(OptimError::SliceLen {
                unit: name(),
                what: kind.name(),
                expected: end - start,
                got: values,
            });
        }

        self.check_params(segment, param)?;
        let mut parts = Vec::new();
        if *kind == StateKind::Master {
            let frozen = self
                .pieces(*unit)
                .iter()
                .filter(|piece| piece.state.is_none());
            let in_params: Vec<_> = match self.param_dtype {
                DType::F32 => std::iter::once(0..len).collect(),
                _ => frozen.map(|piece| piece.elems.clone()).collect(),
            };
            for (&(slice, at), within) in param
                .iter()
                .flat_map(|slice| in_params.iter().map(move |r| (slice, r)))
            {
                let from = at.max(within.start).max(start);
                let to = (at + slice.len()).min(within.end).min(end);
                if from < to {
                    parts.push((from..to, slice.slice(from - at..to - at)));
                }
            }
        }

        parts
            .iter_mut()
            .for_each(|(at, _)| *at = at.start - start..at.end - start);
        Ok(parts)
    }
}

/// State in a piece.
enum Values {
    Masters(DeviceSlice<f32>),
    /// Remainders of the masters, and their elements of the unit.
    Remainders(DeviceSlice<i16>, Range<usize>),
    Slot(SlotPart),
}

/// A part of an array of `elems` elements: in blocks, those that hold it.
struct SlotPart {
    coded: CodedSlice,
    elems: usize,
    part: Range<usize>,
}

/// The elements `part` of a piece's slot, without the blocks that hold none of them.
fn slot_part(piece: &PieceState, nth: usize, part: Range<usize>) -> SlotPart {
    let coded = piece.slots[nth];
    let block_elems = coded.codec.block_elems();
    let start = part.start / block_elems * block_elems;
    let end = piece
        .state
        .len()
        .min(part.end.next_multiple_of(block_elems));
    SlotPart {
        coded: coded.slice(start..end),
        elems: end - start,
        part: part.start - start..part.end - start,
    }
}

/// The slices of the elements `range` of a unit's parameter, each with its place in the range.
fn param_parts(
    param: &[(AnySlice, usize)],
    range: &Range<usize>,
) -> impl Iterator<Item = (Range<usize>, AnySlice)> {
    param.iter().filter_map(move |&(slice, at)| {
        let from = range.start.max(at);
        let to = range.end.min(at + slice.len());
        (from < to).then(|| {
            (
                from - range.start..to - range.start,
                slice.slice(from - at..to - at),
            )
        })
    })
}

/// Downloads a slice as fp32.
pub(crate) fn download<D: Device>(
    device: &D,
    stream: &D::Stream,
    from: AnySlice,
    out: &mut [f32],
    limit: Duration,
) -> Result<(), DeviceError> {
    let widen = match from.dtype() {
        DType::Bf16 => |bits| bf16::from_bits(bits).to_f32(),
        DType::F16 => |bits| f16::from_bits(bits).to_f32(),
        _ => return device.download(stream, from, bytemuck::cast_slice_mut(out), limit),
    };
    let mut narrow = vec![0u16; from.len()];
    device.download(stream, from, bytemuck::cast_slice_mut(&mut narrow), limit)?;
    out.iter_mut()
        .zip(narrow)
        .for_each(|(out, bits)| *out = widen(bits));
    Ok(())
}

/// Uploads `values`, rounded to the dtype of the slice.
fn upload<D: Device>(
    device: &D,
    stream: &D::Stream,
    values: &[f32],
    to: AnySlice,
    limit: Duration,
) -> Result<(), DeviceError> {
    let narrow: fn(f32) -> u16 = match to.dtype() {
        DType::Bf16 => |x| bf16::from_f32(x).to_bits(),
        DType::F16 => |x| f16::from_f32(x).to_bits(),
        _ => return device.upload(stream, bytemuck::cast_slice(values), to, limit),
    };
    let narrow: Vec<u16> = values.iter().map(|x| narrow(*x)).collect();
    device.upload(stream, bytemuck::cast_slice(&narrow), to, limit)
}

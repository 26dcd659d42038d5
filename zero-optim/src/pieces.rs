//! Optimizer state, for launches on a range of it: in memory of the device, in host memory in
//! pieces, or in a file.
//!
//! | home | what a launch gets |
//! |---|---|
//! | memory of the device | any range of whole blocks: each array has a block of memory |
//! | host memory | a piece |
//! | a file on NVMe | a piece, in a buffer of a [`SwapRing`]: while one piece is updated, the next is read and the last is written |
//!
//! | buffer | bytes | purpose | when |
//! |---|---|---|---|
//! | masters, slots | all state | `Optimizer` | memory |
//! | buffers of the ring | `buffers` x the largest piece | `Workspace` | [`StateHome::Nvme`](crate::StateHome::Nvme) |
//!
//! Why a piece is read and written whole: masters and slots together are one list of requests and
//! one buffer, updated in place, 12 bytes an element of Adam each way (6 in the smaller formats).
//! DeepSpeed moves the gradient with them, 16 bytes; here the caller has it.

use std::ops::Range;
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
#[cfg(target_os = "linux")]
use zero_alloc::swap::{HeldPart, SwapAccess, SwapParts, SwapRing};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::{Codec, CodedSlice};

use crate::OptimError;
use crate::format::{PIECE_ALIGN_BYTES, StateArrays, StateHome};
use crate::groups::Resolved;

/// Elements of a piece if the settings have no sub-groups: 12 MB of masters and moments, which the
/// caches of a CPU hold from the read to the write. Four times as many are updated 1.15 times
/// slower.
const PIECE_ELEMS: usize = 1 << 20;

/// An array of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Array {
    Masters,
    /// The slot of this name, which some elements may not have.
    Slot(&'static str),
}

/// The access of operations to a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// They read one array; others have arbitrary values.
    Read(Array),
    /// They read and write all arrays.
    Update,
}

/// The masters of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MasterSlice {
    /// The parameters are the masters.
    Params,
    Fp32(DeviceSlice<f32>),
    /// The low bits of the masters, whose high bits are the bf16 parameters.
    Remainders(DeviceSlice<i16>),
}

impl MasterSlice {
    fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::Params => Self::Params,
            Self::Fp32(masters) => Self::Fp32(masters.slice(range)),
            Self::Remainders(rest) => Self::Remainders(rest.slice(range)),
        }
    }

    /// The masters in memory that stores them in this format.
    fn stored(codec: Option<Codec>, stored: AnySlice) -> Self {
        match codec {
            None => Self::Params,
            Some(Codec::Remainders) => Self::Remainders(of_type(stored)),
            Some(_) => Self::Fp32(of_type(stored)),
        }
    }
}

/// A range of the state in memory.
#[derive(Clone, Debug)]
pub(crate) struct PieceState {
    /// Its range of the state storage.
    pub(crate) state: Range<usize>,
    pub(crate) masters: MasterSlice,
    /// In the order of [`StateArrays::slots`].
    pub(crate) slots: Vec<CodedSlice>,
}

impl PieceState {
    /// The elements that `range` and the piece share: relative to the range, and to the piece.
    pub(crate) fn overlap(&self, range: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let both = intersection(range, &self.state);
        (
            both.start - range.start..both.end - range.start,
            both.start - self.state.start..both.end - self.state.start,
        )
    }

    /// The elements `range` of the piece.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        Self {
            state: self.state.start + range.start..self.state.start + range.end,
            masters: self.masters.slice(range.clone()),
            slots: self.slots.iter().map(|s| s.slice(range.clone())).collect(),
        }
    }
}

/// All state of an optimizer.
pub(crate) struct Pieces<D: Device> {
    /// The arrays that elements have, by the position in [`Resolved::arrays`].
    arrays: Vec<StateArrays>,
    /// In the order of the state storage.
    places: Vec<PieceRange>,
    home: Home<D>,
}

enum Home<D: Device> {
    /// Each array in a block of memory.
    Blocks(Vec<ArrayBlocks<D>>),
    /// Pieces, one after another.
    Memory(Block<D>),
    /// Each piece is a part of a file.
    #[cfg(target_os = "linux")]
    File(SwapRing<D>),
}

/// The memory of [`StateArrays`].
struct ArrayBlocks<D: Device> {
    /// `None`: the parameters are the masters.
    masters: Option<Block<D>>,
    slots: Vec<Block<D>>,
}

/// The place of a piece: elements with the same arrays.
#[derive(Debug)]
struct PieceRange {
    state: Range<usize>,
    /// The position of its arrays in [`Pieces::arrays`].
    arrays: usize,
    /// Its first byte in the block of [`Home::Memory`], or its first element in those of
    /// [`Home::Blocks`].
    at: usize,
}

/// A piece that overlaps a range of the state.
#[derive(Clone, Debug)]
pub(crate) struct Overlap {
    /// The piece's number.
    pub(crate) index: usize,
    /// The elements of both.
    both: Range<usize>,
}

impl<D: Device> Pieces<D> {
    /// State in memory of the device. Enqueues zeroing the slots, which launches use as they are
    /// stored.
    pub(crate) fn on_device(
        pool: &Pool<D>,
        stream: &D::Stream,
        groups: &Resolved,
    ) -> Result<Self, OptimError> {
        let mut places: Vec<PieceRange> = Vec::new();
        let mut ends = vec![0; groups.arrays.len()];
        for (state, arrays) in groups.state_runs() {
            let at = ends[arrays];
            ends[arrays] += state.len();
            match places.last_mut() {
                Some(last) if last.arrays == arrays => last.state.end = state.end,
                _ => places.push(PieceRange { state, arrays, at }),
            }
        }

        let mut blocks = Vec::new();
        for (arrays, elems) in groups.arrays.iter().zip(ends) {
            let allocate = |codec: Codec| {
                let dtype = codec.dtype();
                let len = codec.bytes(elems) / dtype.size_bytes();
                pool.allocate(len, dtype, Purpose::Optimizer, stream)
            };
            let masters = arrays.masters().map(allocate).transpose()?;
            let mut slots = Vec::new();
            for slot in arrays.slots() {
                let block = allocate(slot.codec)?;
                pool.device().fill_zero(stream, view(&block))?;
                slots.push(block);
            }
            blocks.push(ArrayBlocks { masters, slots });
        }
        Ok(Self {
            arrays: groups.arrays.clone(),
            places,
            home: Home::Blocks(blocks),
        })
    }

    /// The arrays that elements have.
    pub(crate) fn arrays(&self) -> &[StateArrays] {
        &self.arrays
    }

    /// The arrays of the elements of a piece.
    pub(crate) fn arrays_of(&self, overlap: &Overlap) -> &StateArrays {
        &self.arrays[self.places[overlap.index].arrays]
    }

    /// The format of the masters; `None`: the parameters are the masters.
    pub(crate) fn masters(&self) -> Option<Codec> {
        self.arrays.first().and_then(StateArrays::masters)
    }

    /// The kind of memory that the state is in.
    pub(crate) fn home(&self) -> &'static str {
        match &self.home {
            Home::Blocks { .. } => "memory of the device",
            Home::Memory(_) => "host memory",
            #[cfg(target_os = "linux")]
            Home::File(_) => "a file",
        }
    }

    pub(crate) fn has_remainders(&self) -> bool {
        self.masters() == Some(Codec::Remainders)
    }

    /// Whether any range is a piece.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self.home, Home::Blocks { .. })
    }

    /// A range of the state, if it is in one block of memory for each array.
    pub(crate) fn in_blocks(&self, state: Range<usize>) -> Option<PieceState> {
        match (&self.home, &self.places[..]) {
            (Home::Blocks(blocks), [place]) => {
                let arrays = &self.arrays[place.arrays];
                Some(of_blocks(arrays, &blocks[place.arrays], place, state))
            }
            _ => None,
        }
    }

    /// The blocks that operations of the optimizer's streams use.
    pub(crate) fn blocks(&mut self) -> impl Iterator<Item = &mut Block<D>> {
        let blocks: Vec<&mut Block<D>> = match &mut self.home {
            Home::Blocks(all) => all
                .iter_mut()
                .flat_map(|blocks| blocks.masters.iter_mut().chain(&mut blocks.slots))
                .collect(),
            Home::Memory(block) => vec![block],
            // The ring waits for its uses.
            #[cfg(target_os = "linux")]
            Home::File(_) => Vec::new(),
        };
        blocks.into_iter()
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn ring(&self) -> Option<&SwapRing<D>> {
        match &self.home {
            Home::File(ring) => Some(ring),
            Home::Blocks { .. } | Home::Memory(_) => None,
        }
    }

    /// Waits at most `limit` for reads and writes of a file.
    pub(crate) fn wait_for_transfers(&self, limit: Duration) -> Result<(), OptimError> {
        match &self.home {
            Home::Blocks { .. } | Home::Memory(_) => {
                let _nothing_to_wait_for = limit;
                Ok(())
            }
            #[cfg(target_os = "linux")]
            Home::File(ring) => Ok(ring.synchronize(limit)?),
        }
    }

    /// The pieces that have elements of `state`, in order.
    pub(crate) fn within(&self, state: &Range<usize>) -> Vec<Overlap> {
        let places = &self.places;
        let first = places.partition_point(|place| place.state.end <= state.start);
        let overlapping = places[first..]
            .iter()
            .take_while(|place| place.state.start < state.end);
        (first..)
            .zip(overlapping)
            .map(|(index, place)| Overlap {
                index,
                both: intersection(state, &place.state),
            })
            .collect()
    }

    /// A piece in memory, for operations on `stream`, which waits for it: all of it, or, to read or
    /// in memory of the device, the blocks with elements of the overlap.
    pub(crate) fn acquire(
        &mut self,
        stream: &D::Stream,
        overlap: &Overlap,
        access: Access,
    ) -> Result<HeldPiece<'_, D>, OptimError> {
        let place = &self.places[overlap.index];
        let arrays = &self.arrays[place.arrays];
        let range = place.with_blocks(&overlap.both, arrays.block_elems());
        let bytes = || match access {
            Access::Read(array) => part_bytes(arrays, &place.state, &range, array),
            Access::Update => 0..arrays.parts(place.state.len()).bytes,
        };

        let (memory, held) = match &mut self.home {
            Home::Blocks(blocks) => {
                return Ok(HeldPiece {
                    piece: of_blocks(arrays, &blocks[place.arrays], place, range),
                    held: None,
                    is_written: false,
                });
            }
            Home::Memory(block) => {
                let bytes = bytes();
                let memory = view(block).slice(place.at + bytes.start..place.at + bytes.end);
                (memory, None)
            }
            #[cfg(target_os = "linux")]
            Home::File(ring) => {
                let held = match access {
                    Access::Read(_) => ring.acquire_range(stream, overlap.index, bytes())?,
                    Access::Update => ring.acquire(stream, overlap.index, SwapAccess::Update)?,
                };
                // SAFETY: used by operations of `stream`, until the piece is released.
                (unsafe { held.bytes() }, Some(held))
            }
        };
        let piece = match access {
            Access::Read(array) => one_array(arrays, range, memory, array),
            Access::Update => all_arrays(arrays, place.state.clone(), memory),
        };
        Ok(HeldPiece {
            piece,
            held,
            is_written: access == Access::Update,
        })
    }
}

impl PieceRange {
    /// The elements of `range` with those of their blocks.
    fn with_blocks(&self, range: &Range<usize>, block_elems: usize) -> Range<usize> {
        let at = |elem: usize| elem - self.state.start;
        let start = at(range.start) / block_elems * block_elems;
        let end = at(range.end).next_multiple_of(block_elems);
        self.state.start + start..self.state.end.min(self.state.start + end)
    }
}

impl Pieces<HostDevice> {
    /// State of an optimizer of the host, in pieces, in this home.
    pub(crate) fn offloaded(
        pool: &Pool<HostDevice>,
        stream: &HostStream,
        groups: &Resolved,
        sub_group_elems: usize,
        home: &StateHome,
    ) -> Result<Self, OptimError> {
        let mut places = Vec::new();
        let mut bytes = 0;
        let bytes_of = |state: &Range<usize>, arrays: usize| {
            let arrays: &StateArrays = &groups.arrays[arrays];
            arrays.parts(state.len()).bytes
        };
        for (state, arrays) in cut(groups, sub_group_elems) {
            let at = bytes;
            bytes += bytes_of(&state, arrays);
            places.push(PieceRange { state, arrays, at });
        }

        let home = match home {
            StateHome::Memory => {
                let block = pool.allocate(bytes, DType::U8, Purpose::Optimizer, stream)?;
                pool.device().fill_zero(stream, view(&block))?;
                Home::Memory(block)
            }
            #[cfg(target_os = "linux")]
            StateHome::Nvme {
                dir,
                options,
                buffers,
            } => {
                let host = pool.device();
                let name = stream.name();
                let limit = options.limit;
                let bytes = |place: &PieceRange| bytes_of(&place.state, place.arrays);
                let bytes: Vec<_> = places.iter().map(bytes).collect();
                OptimError::check(*buffers > 0, "buffers", *buffers as f64, "at least 1")?;
                let parts = SwapParts::create(host, name, dir, &bytes, options.clone())?;
                Home::File(SwapRing::new(&parts, host, pool, name, *buffers, limit)?)
            }
        };

        Ok(Self {
            arrays: groups.arrays.clone(),
            places,
            home,
        })
    }
}

/// The ranges of the state storage that are pieces, in order, each with the position of its arrays.
fn cut(groups: &Resolved, sub_group_elems: usize) -> Vec<(Range<usize>, usize)> {
    let most = if sub_group_elems == usize::MAX {
        PIECE_ELEMS
    } else {
        sub_group_elems.clamp(1, usize::MAX / 2)
    };
    // A multiple of 2048 elements, so that full pieces have no padding, and whole blocks.
    let most = most.next_multiple_of(PIECE_ALIGN_BYTES / size_of::<u16>());

    let mut pieces = Vec::new();
    for (Range { start, end }, arrays) in groups.state_runs() {
        for start in (start..end).step_by(most) {
            pieces.push((start..end.min(start.saturating_add(most)), arrays));
        }
    }
    pieces
}

/// A piece of a file in a buffer.
#[cfg(target_os = "linux")]
type InFile<'a, D> = HeldPart<'a, D>;

/// Other systems keep nothing in files.
#[cfg(not(target_os = "linux"))]
struct InFile<'a, D>(std::convert::Infallible, std::marker::PhantomData<&'a D>);

#[cfg(not(target_os = "linux"))]
impl<D> InFile<'_, D> {
    fn write_back(self) -> Result<(), OptimError> {
        match self.0 {}
    }
}

/// A piece in memory, until it is released or dropped. What was written to it without
/// [`HeldPiece::release`] may be lost.
pub(crate) struct HeldPiece<'a, D: Device> {
    pub(crate) piece: PieceState,
    held: Option<InFile<'a, D>>,
    is_written: bool,
}

impl<D: Device> HeldPiece<'_, D> {
    /// Ends the operations on the piece, and keeps what they wrote.
    pub(crate) fn release(self) -> Result<(), OptimError> {
        match self.held {
            Some(held) if self.is_written => Ok(held.write_back()?),
            _ => Ok(()),
        }
    }
}

/// The arrays of a piece whose bytes are `memory`.
fn all_arrays(arrays: &StateArrays, state: Range<usize>, memory: AnySlice) -> PieceState {
    let parts = arrays.parts(state.len());
    let of_masters = memory.slice(parts.masters);
    let slots = arrays.slots().iter().zip(parts.slots);
    PieceState {
        state,
        masters: MasterSlice::stored(arrays.masters(), of_masters),
        slots: slots
            .map(|(slot, part)| coded(memory.slice(part), slot.codec))
            .collect(),
    }
}

/// The elements `state` of one array, whose bytes are `memory`.
fn one_array(
    arrays: &StateArrays,
    state: Range<usize>,
    memory: AnySlice,
    array: Array,
) -> PieceState {
    let slots = arrays.slots().iter();
    match array {
        Array::Masters => PieceState {
            state,
            masters: MasterSlice::stored(arrays.masters(), memory),
            slots: Vec::new(),
        },
        Array::Slot(_) => PieceState {
            state,
            masters: MasterSlice::Params,
            slots: slots.map(|slot| coded(memory, slot.codec)).collect(),
        },
    }
}

/// The bytes of the elements `range` of one array, from the start of the piece `state`; none if the
/// piece has no such array.
fn part_bytes(
    arrays: &StateArrays,
    state: &Range<usize>,
    range: &Range<usize>,
    array: Array,
) -> Range<usize> {
    let mut parts = arrays.parts(state.len());
    let (part, codec) = match array {
        Array::Masters => (parts.masters, arrays.masters()),
        Array::Slot(name) => match arrays.slot(name) {
            Some(nth) => (
                parts.slots.swap_remove(nth),
                Some(arrays.slots()[nth].codec),
            ),
            None => (0..0, None),
        },
    };
    let bytes = |elems| codec.map_or(0, |codec| codec.bytes(elems));
    let start = part.start + bytes(range.start - state.start);
    start..start + bytes(range.len())
}

/// The range `state` of a place in blocks of memory.
fn of_blocks<D: Device>(
    arrays: &StateArrays,
    blocks: &ArrayBlocks<D>,
    place: &PieceRange,
    state: Range<usize>,
) -> PieceState {
    let at = |elem: usize| place.at + elem - place.state.start;
    let range = at(state.start)..at(state.end);
    let masters = match &blocks.masters {
        None => MasterSlice::Params,
        Some(masters) => {
            MasterSlice::stored(arrays.masters(), view(masters).slice(range.clone()).bytes())
        }
    };
    let slots = arrays.slots().iter().zip(&blocks.slots);
    let slots =
        slots.map(|(slot, block)| CodedSlice::new(slot.codec, view(block)).slice(range.clone()));
    PieceState {
        masters,
        slots: slots.collect(),
        state,
    }
}

/// The elements of both ranges; none if they do not overlap.
fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Remainders as bytes.
pub(crate) fn remainder_bytes(remainders: DeviceSlice<i16>) -> AnySlice {
    // SAFETY: the same memory as bytes, for which the maker of `remainders` made the same promises.
    unsafe {
        AnySlice::from_raw_parts(
            remainders.as_ptr().cast(),
            2 * remainders.len(),
            DType::U8,
            remainders.device(),
        )
    }
}

/// The bytes as values that are stored in this format.
fn coded(bytes: AnySlice, codec: Codec) -> CodedSlice {
    let dtype = codec.dtype();
    let elems = bytes.len_bytes() / dtype.size_bytes();
    // SAFETY: the same memory, initialised, at a multiple of the element's size from the aligned
    // start of a block or buffer; the rest as for `bytes`.
    let memory = unsafe { AnySlice::from_raw_parts(bytes.as_ptr(), elems, dtype, bytes.device()) };
    CodedSlice::new(codec, memory)
}

/// The bytes as those of `T`.
fn of_type<T>(bytes: AnySlice) -> DeviceSlice<T> {
    let elems = bytes.len_bytes() / size_of::<T>();
    // SAFETY: the same memory, at a multiple of the element's size from the aligned start of a
    // block or buffer, of a type of which all values are valid: fp32, or remainders.
    unsafe { DeviceSlice::from_raw_parts(bytes.as_ptr().cast(), elems, bytes.device()) }
}

/// The block as a slice, for the optimizer's launches.
pub(crate) fn view<D: Device>(block: &Block<D>) -> AnySlice {
    // SAFETY: the optimizer owns the block, and uses it in methods with `&mut self` only, each
    // after `enter`: so its launches on all streams are in one order. Its drop records the last
    // stream, which is behind all others. Slices go to callers through unsafe methods only.
    unsafe { block.slice() }
}

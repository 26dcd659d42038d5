//! Optimizer state, for launches on a range of it: in memory of the device, in host memory in a
//! smaller format, or in a file.
//!
//! | home | what a launch gets |
//! |---|---|
//! | memory of the device | any range: each array has a block |
//! | host memory | a piece |
//! | a file on NVMe | a piece, in a buffer of a [`SwapRing`]: while one piece is updated, the next is read and the last is written |
//!
//! | buffer | bytes | purpose | when |
//! |---|---|---|---|
//! | masters, slots | all state | `Optimizer` | memory |
//! | buffers of the ring | `buffers` x the largest piece | `Workspace` | [`StateHome::Nvme`](crate::StateHome::Nvme) |
//! | slots in fp32 | 4 x the elements of the largest piece each | `Workspace` | slots that are decoded ([`Codec::is_decoded`](zero_kernels::Codec::is_decoded)) |
//!
//! Why a piece is read and written whole: masters and slots together are one list of requests and
//! one buffer, updated in place, 12 bytes an element of Adam each way (6 in the smaller formats).
//! DeepSpeed moves the gradient with them, 16 bytes; here the caller has it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
#[cfg(target_os = "linux")]
use zero_alloc::swap::{HeldPart, SwapAccess, SwapParts, SwapRing};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::{Codec, Kernels, Rounding};

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
    /// The slot at this position of [`StateArrays::slots`].
    Slot(usize),
}

/// The access of operations to a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// They read one array; others have arbitrary values.
    Read(Array),
    /// They read and write all arrays.
    Update {
        /// Selects the random bits of stochastic rounding; `None` rounds to nearest.
        seed: Option<u64>,
    },
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
    /// In fp32, in the order of [`StateArrays::slots`].
    pub(crate) slots: Vec<DeviceSlice<f32>>,
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
    kernels: Arc<dyn Kernels<D>>,
    arrays: StateArrays,
    /// In order; all state is one piece in memory of the device.
    places: Vec<PieceRange>,
    home: Home<D>,
    /// The slots of a piece in fp32, where they are kept in another format.
    decoded: Vec<Option<Block<D>>>,
}

enum Home<D: Device> {
    /// Each array in a block.
    Blocks {
        /// `None`: the parameters are the masters.
        masters: Option<Block<D>>,
        slots: Vec<Block<D>>,
    },
    /// Pieces, one after another.
    Memory(Block<D>),
    /// Each piece is a part of a file.
    #[cfg(target_os = "linux")]
    File(SwapRing<D>),
}

/// The place of a piece.
#[derive(Debug)]
struct PieceRange {
    state: Range<usize>,
    /// Its first byte in the block.
    at: usize,
}

/// A piece that overlaps a range of the state.
#[derive(Clone, Debug)]
pub(crate) struct Overlap {
    index: usize,
    /// The elements of both.
    both: Range<usize>,
}

impl<D: Device> Pieces<D> {
    /// State of `elems` elements in memory of the device. Enqueues zeroing the slots, which
    /// launches use as they are stored.
    pub(crate) fn on_device(
        pool: &Pool<D>,
        kernels: Arc<dyn Kernels<D>>,
        stream: &D::Stream,
        elems: usize,
        arrays: StateArrays,
    ) -> Result<Self, OptimError> {
        let allocate = |codec: Codec| {
            let dtype = codec.dtype();
            pool.allocate(elems, dtype, Purpose::Optimizer, stream)
        };
        let masters = arrays.masters().map(allocate).transpose()?;
        let mut slots = Vec::new();
        for slot in arrays.slots() {
            if slot.codec.is_decoded() {
                return Err(OptimError::SlotOnDevice { slot: slot.name });
            }
            let block = allocate(slot.codec)?;
            pool.device().fill_zero(stream, view(&block))?;
            slots.push(block);
        }
        Ok(Self {
            kernels,
            arrays,
            places: vec![PieceRange {
                state: 0..elems,
                at: 0,
            }],
            home: Home::Blocks { masters, slots },
            decoded: Vec::new(),
        })
    }

    pub(crate) fn arrays(&self) -> &StateArrays {
        &self.arrays
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
        self.arrays.masters() == Some(Codec::Remainders)
    }

    /// Whether any range is a piece.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self.home, Home::Blocks { .. })
    }

    /// A range of the state, if any range is a piece.
    pub(crate) fn in_blocks(&self, state: Range<usize>) -> Option<PieceState> {
        match &self.home {
            Home::Blocks { masters, slots } => {
                of_blocks(&self.arrays, masters.as_ref(), slots, state).ok()
            }
            _ => None,
        }
    }

    /// The blocks that operations of the optimizer's streams use.
    pub(crate) fn blocks(&mut self) -> impl Iterator<Item = &mut Block<D>> {
        let mut blocks: Vec<&mut Block<D>> = match &mut self.home {
            Home::Blocks { masters, slots } => masters.iter_mut().chain(slots).collect(),
            Home::Memory(block) => vec![block],
            // The ring waits for its uses.
            #[cfg(target_os = "linux")]
            Home::File(_) => Vec::new(),
        };
        blocks.extend(self.decoded.iter_mut().flatten());
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

    /// A piece in memory, for operations on `stream`, which waits for it.
    pub(crate) fn acquire(
        &mut self,
        stream: &D::Stream,
        overlap: &Overlap,
        access: Access,
    ) -> Result<HeldPiece<'_, D>, OptimError> {
        let decoder = Decoder {
            kernels: &self.kernels,
            stream,
            arrays: &self.arrays,
            decoded: &self.decoded,
        };
        let PieceRange { state, at } = &self.places[overlap.index];
        let bytes = || match access {
            Access::Read(array) => part_bytes(&self.arrays, state, &overlap.both, array),
            Access::Update { .. } => 0..self.arrays.parts(state.len()).bytes,
        };

        let (memory, held) = match &mut self.home {
            Home::Blocks { masters, slots } => {
                let both = overlap.both.clone();
                let piece = of_blocks(&self.arrays, masters.as_ref(), slots, both)?;
                return Ok(HeldPiece {
                    piece,
                    encoding: None,
                    held: None,
                    is_written: false,
                });
            }
            Home::Memory(block) => {
                let bytes = bytes();
                let memory = view(block).slice(at + bytes.start..at + bytes.end);
                (memory, None)
            }
            #[cfg(target_os = "linux")]
            Home::File(ring) => {
                let held = match access {
                    Access::Read(_) => ring.acquire_range(stream, overlap.index, bytes())?,
                    Access::Update { .. } => {
                        ring.acquire(stream, overlap.index, SwapAccess::Update)?
                    }
                };
                // SAFETY: used by operations of `stream`, until the piece is released.
                (unsafe { held.bytes() }, Some(held))
            }
        };
        match access {
            Access::Read(array) => decoder.array(overlap.both.clone(), memory, held, array),
            Access::Update { seed } => decoder.piece(state.clone(), memory, held, seed),
        }
    }
}

impl Pieces<HostDevice> {
    /// State of an optimizer of the host, in pieces, in this home.
    pub(crate) fn offloaded(
        pool: &Pool<HostDevice>,
        kernels: Arc<dyn Kernels<HostDevice>>,
        stream: &HostStream,
        groups: &Resolved,
        sub_group_elems: usize,
        arrays: StateArrays,
        home: &StateHome,
    ) -> Result<Self, OptimError> {
        let mut places = Vec::new();
        let mut bytes = 0;
        for state in cut(groups, sub_group_elems) {
            let at = bytes;
            bytes += arrays.parts(state.len()).bytes;
            places.push(PieceRange { state, at });
        }

        let largest = places.iter().map(|place| place.state.len()).max();

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
                let bytes = |place: &PieceRange| arrays.parts(place.state.len()).bytes;
                let bytes: Vec<_> = places.iter().map(bytes).collect();
                OptimError::check(*buffers > 0, "buffers", *buffers as f64, "at least 1")?;
                let parts = SwapParts::create(host, name, dir, &bytes, options.clone())?;
                Home::File(SwapRing::new(&parts, host, pool, name, *buffers, limit)?)
            }
        };

        let mut decoded = Vec::new();
        for slot in arrays.slots() {
            let elems = largest.unwrap_or(0);
            let workspace = || pool.allocate(elems, DType::F32, Purpose::Workspace, stream);
            decoded.push(match slot.codec.is_decoded() {
                true => Some(workspace()?),
                false => None,
            });
        }

        Ok(Self {
            kernels,
            arrays,
            places,
            home,
            decoded,
        })
    }
}

/// The ranges of the state storage that are pieces, in order.
fn cut(groups: &Resolved, sub_group_elems: usize) -> Vec<Range<usize>> {
    let most = if sub_group_elems == usize::MAX {
        PIECE_ELEMS
    } else {
        sub_group_elems.clamp(1, usize::MAX / 2)
    };
    // A multiple of 2048 elements, so that full pieces have no padding.
    let most = most.next_multiple_of(PIECE_ALIGN_BYTES / size_of::<u16>());

    let mut pieces = Vec::new();
    for unit in &groups.pieces {
        let mut states = unit.iter().filter_map(|piece| piece.state.as_ref());
        let Some(first) = states.next() else { continue };
        let start = first.start;
        let end = states.next_back().unwrap_or(first).end;
        for start in (start..end).step_by(most) {
            pieces.push(start..end.min(start.saturating_add(most)));
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
    encoding: Option<Encoding<D>>,
    held: Option<InFile<'a, D>>,
    is_written: bool,
}

/// Encoding the slots of a piece that were decoded.
struct Encoding<D: Device> {
    kernels: Arc<dyn Kernels<D>>,
    stream: D::Stream,
    /// The format and the stored memory of each slot.
    stored: Vec<(Codec, AnySlice)>,
    seed: Option<u64>,
}

impl<D: Device> HeldPiece<'_, D> {
    /// Ends the operations on the piece, and keeps what they wrote.
    pub(crate) fn release(self) -> Result<(), OptimError> {
        if !self.is_written {
            return Ok(());
        }
        if let Some(encoding) = &self.encoding {
            encoding.enqueue(&self.piece)?;
        }
        if let Some(held) = self.held {
            held.write_back()?;
        }
        Ok(())
    }
}

impl<D: Device> Encoding<D> {
    fn enqueue(&self, piece: &PieceState) -> Result<(), OptimError> {
        let slots = self.stored.len() as u64;
        for (nth, ((codec, stored), values)) in (0..).zip(self.stored.iter().zip(&piece.slots)) {
            if !codec.is_decoded() {
                continue;
            }
            let rounding = match self.seed {
                None => Rounding::Nearest,
                Some(seed) => Rounding::Stochastic {
                    seed: seed.wrapping_mul(slots).wrapping_add(nth),
                    first: piece.state.start as u64,
                },
            };
            codec.encode(&*self.kernels, &self.stream, *values, *stored, rounding)?;
        }
        Ok(())
    }
}

/// What decodes the slots of a piece.
struct Decoder<'a, D: Device> {
    kernels: &'a Arc<dyn Kernels<D>>,
    stream: &'a D::Stream,
    arrays: &'a StateArrays,
    decoded: &'a [Option<Block<D>>],
}

impl<D: Device> Decoder<'_, D> {
    /// A piece to update, whose bytes are `memory`.
    fn piece<'h>(
        &self,
        state: Range<usize>,
        memory: AnySlice,
        held: Option<InFile<'h, D>>,
        seed: Option<u64>,
    ) -> Result<HeldPiece<'h, D>, OptimError> {
        let elems = state.len();
        let parts = self.arrays.parts(elems);
        let masters = self.arrays.masters();
        let of_masters = stored(memory.slice(parts.masters), masters.unwrap_or(Codec::Fp32));

        let mut of_slots = Vec::new();
        let mut slots = Vec::new();
        for (nth, (slot, part)) in self.arrays.slots().iter().zip(parts.slots).enumerate() {
            let memory = stored(memory.slice(part), slot.codec);
            slots.push(self.slot(nth, memory)?);
            of_slots.push((slot.codec, memory));
        }

        let encoding = Encoding {
            kernels: Arc::clone(self.kernels),
            stream: self.stream.clone(),
            stored: of_slots,
            seed,
        };
        Ok(HeldPiece {
            piece: PieceState {
                state,
                masters: MasterSlice::stored(masters, of_masters),
                slots,
            },
            is_written: true,
            encoding: Some(encoding),
            held,
        })
    }

    /// The elements `state` of one array to read, whose bytes are `bytes`.
    fn array<'h>(
        &self,
        state: Range<usize>,
        bytes: AnySlice,
        held: Option<InFile<'h, D>>,
        array: Array,
    ) -> Result<HeldPiece<'h, D>, OptimError> {
        let (masters, values) = match array {
            Array::Masters => {
                let codec = self.arrays.masters();
                let memory = stored(bytes, codec.unwrap_or(Codec::Fp32));
                let none = of_type(stored(bytes.slice(0..0), Codec::Fp32));
                (MasterSlice::stored(codec, memory), none)
            }
            Array::Slot(nth) => {
                let memory = stored(bytes, self.arrays.slots()[nth].codec);
                (MasterSlice::Params, self.slot(nth, memory)?)
            }
        };
        Ok(HeldPiece {
            piece: PieceState {
                state,
                masters,
                slots: vec![values; self.arrays.slots().len()],
            },
            encoding: None,
            held,
            is_written: false,
        })
    }

    /// Slot `nth` in fp32: the memory itself, or what it is decoded to.
    fn slot(&self, nth: usize, memory: AnySlice) -> Result<DeviceSlice<f32>, OptimError> {
        let Some(decoded) = &self.decoded[nth] else {
            return Ok(of_type(memory));
        };
        let values = view(decoded).slice(0..memory.len()).typed()?;
        let codec = self.arrays.slots()[nth].codec;
        codec.decode(&**self.kernels, self.stream, memory, values)?;
        Ok(values)
    }
}

/// The bytes of the elements `range` of one array, from the start of the piece `state`.
fn part_bytes(
    arrays: &StateArrays,
    state: &Range<usize>,
    range: &Range<usize>,
    array: Array,
) -> Range<usize> {
    let mut parts = arrays.parts(state.len());
    let (part, codec) = match array {
        Array::Masters => (parts.masters, arrays.masters()),
        Array::Slot(nth) => (
            parts.slots.swap_remove(nth),
            Some(arrays.slots()[nth].codec),
        ),
    };
    let bytes = |elems| codec.map_or(0, |codec| codec.bytes(elems));
    let start = part.start + bytes(range.start - state.start);
    start..start + bytes(range.len())
}

/// The range `state` of state in blocks.
fn of_blocks<D: Device>(
    arrays: &StateArrays,
    masters: Option<&Block<D>>,
    slots: &[Block<D>],
    state: Range<usize>,
) -> Result<PieceState, DeviceError> {
    let slice = |block| view(block).slice(state.clone());
    let masters = match masters.map(slice) {
        None => MasterSlice::Params,
        Some(masters) => MasterSlice::stored(arrays.masters(), masters),
    };
    let slots = slots.iter().map(|block| slice(block).typed());
    Ok(PieceState {
        masters,
        slots: slots.collect::<Result<_, _>>()?,
        state,
    })
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
fn stored(bytes: AnySlice, codec: Codec) -> AnySlice {
    let dtype = codec.dtype();
    let elems = bytes.len_bytes() / dtype.size_bytes();
    // SAFETY: the same memory, initialised, at a multiple of the element's size from the aligned
    // start of a block or buffer; the rest as for `bytes`.
    unsafe { AnySlice::from_raw_parts(bytes.as_ptr(), elems, dtype, bytes.device()) }
}

/// The values as those of `T`, which has their size.
fn of_type<T>(values: AnySlice) -> DeviceSlice<T> {
    assert_eq!(
        values.dtype().size_bytes(),
        size_of::<T>(),
        "a value's size"
    );
    // SAFETY: the same memory, of a type of the same size and alignment, of which all values are
    // valid: fp32, or remainders, which are allocated as fp16.
    unsafe { DeviceSlice::from_raw_parts(values.as_ptr().cast(), values.len(), values.device()) }
}

/// The block as a slice, for the optimizer's launches.
pub(crate) fn view<D: Device>(block: &Block<D>) -> AnySlice {
    // SAFETY: the optimizer owns the block, and uses it in methods with `&mut self` only, each
    // after `enter`: so its launches on all streams are in one order. Its drop records the last
    // stream, which is behind all others. Slices go to callers through unsafe methods only.
    unsafe { block.slice() }
}

//! Optimizer state, for launches on a range of it: in memory of the device, in host memory in a
//! smaller format, or in a file.
//!
//! | home | what a launch gets |
//! |---|---|
//! | memory of the device | any range: each kind of state has a block |
//! | host memory | a piece |
//! | a file on NVMe | a piece, in a buffer of a [`SwapRing`]: while one piece is updated, the next is read and the last is written |
//!
//! | buffer | bytes | purpose | when |
//! |---|---|---|---|
//! | masters, moments | all state | `Optimizer` | memory |
//! | buffers of the ring | `buffers` x the largest piece | `Workspace` | [`StateHome::Nvme`](crate::StateHome::Nvme) |
//! | moments in fp32 | 8 x the elements of the largest piece | `Workspace` | [`OffloadOptions::bf16_moments`](crate::OffloadOptions::bf16_moments) |
//!
//! Why a piece is read and written whole: masters and moments together are one list of requests and
//! one buffer, updated in place, 12 bytes an element each way (6 in the smaller formats). DeepSpeed
//! moves the gradient with them, 16 bytes; here the caller has it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use zero_alloc::device::{AnySlice, DType, Device, DeviceError, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostStream};
#[cfg(target_os = "linux")]
use zero_alloc::swap::{Held, SwapAccess, SwapParts, SwapRing};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::Kernels;

use crate::format::{Format, MasterFormat, OffloadOptions, StateHome, cut};
use crate::groups::Resolved;
use crate::rounding::round_stochastically;
use crate::{OptimError, StateKind};

/// The access of operations to a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// They read one kind; other kinds have arbitrary values.
    Read(StateKind),
    /// They read and write all kinds.
    Update {
        /// Selects the random bits of stochastic rounding; `None` rounds to nearest.
        seed: Option<u64>,
    },
}

/// The masters of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Masters {
    /// The parameters are the masters.
    Params,
    Fp32(DeviceSlice<f32>),
    /// The low bits of the masters, whose high bits are the bf16 parameters.
    Remainders(DeviceSlice<i16>),
}

/// A range of the state in memory.
#[derive(Clone, Debug)]
pub(crate) struct PieceState {
    /// Its range of the state storage.
    pub(crate) state: Range<usize>,
    pub(crate) masters: Masters,
    pub(crate) first_moment: DeviceSlice<f32>,
    pub(crate) second_moment: DeviceSlice<f32>,
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
            masters: match self.masters {
                Masters::Params => Masters::Params,
                Masters::Fp32(masters) => Masters::Fp32(masters.slice(range.clone())),
                Masters::Remainders(rest) => Masters::Remainders(rest.slice(range.clone())),
            },
            first_moment: self.first_moment.slice(range.clone()),
            second_moment: self.second_moment.slice(range),
        }
    }
}

/// All state of an optimizer.
pub(crate) struct Pieces<D: Device> {
    kernels: Arc<dyn Kernels<D>>,
    format: Format,
    home: Home<D>,
    /// The moments of a piece in fp32, if they are kept in bf16.
    wide: Option<[Block<D>; 2]>,
}

enum Home<D: Device> {
    /// Each kind of state in a block.
    Blocks {
        /// `None`: the parameters are the masters.
        masters: Option<Block<D>>,
        moments: [Block<D>; 2],
    },
    /// Pieces, one after another.
    Memory { places: Vec<Place>, block: Block<D> },
    /// Each piece is a part of a file.
    #[cfg(target_os = "linux")]
    File {
        places: Vec<Place>,
        ring: SwapRing<D>,
    },
}

/// The place of a piece.
#[derive(Debug)]
struct Place {
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
    /// State of `elems` elements in memory of the device. Enqueues zeroing the moments.
    pub(crate) fn on_device(
        pool: &Pool<D>,
        kernels: Arc<dyn Kernels<D>>,
        stream: &D::Stream,
        elems: usize,
        masters: MasterFormat,
    ) -> Result<Self, OptimError> {
        let allocate = |dtype| pool.allocate(elems, dtype, Purpose::Optimizer, stream);
        let format = Format {
            masters,
            bf16_moments: false,
        };
        let masters = match masters {
            MasterFormat::Params => None,
            MasterFormat::Fp32 => Some(allocate(DType::F32)?),
            MasterFormat::Remainders => Some(allocate(DType::F16)?),
        };
        let moments = [allocate(DType::F32)?, allocate(DType::F32)?];
        for block in &moments {
            pool.device().fill_zero(stream, view(block))?;
        }
        Ok(Self {
            kernels,
            format,
            home: Home::Blocks { masters, moments },
            wide: None,
        })
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// The kind of memory that the state is in.
    pub(crate) fn home(&self) -> &'static str {
        match &self.home {
            Home::Blocks { .. } => "memory of the device",
            Home::Memory { .. } => "host memory",
            #[cfg(target_os = "linux")]
            Home::File { .. } => "a file",
        }
    }

    pub(crate) fn has_remainders(&self) -> bool {
        self.format.masters == MasterFormat::Remainders
    }

    /// Whether any range is a piece.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self.home, Home::Blocks { .. })
    }

    /// A range of the state, if any range is a piece.
    pub(crate) fn in_blocks(&self, state: Range<usize>) -> Option<PieceState> {
        match &self.home {
            Home::Blocks { masters, moments } => of_blocks(masters.as_ref(), moments, state).ok(),
            _ => None,
        }
    }

    /// The blocks that operations of the optimizer's streams use.
    pub(crate) fn blocks(&mut self) -> impl Iterator<Item = &mut Block<D>> {
        let (masters, moments, pieces) = match &mut self.home {
            Home::Blocks { masters, moments } => (masters.as_mut(), Some(moments), None),
            Home::Memory { block, .. } => (None, None, Some(block)),
            // The ring waits for its uses.
            #[cfg(target_os = "linux")]
            Home::File { .. } => (None, None, None),
        };
        let wide = self.wide.iter_mut().flatten();
        masters
            .into_iter()
            .chain(moments.into_iter().flatten())
            .chain(pieces)
            .chain(wide)
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn ring(&self) -> Option<&SwapRing<D>> {
        match &self.home {
            Home::File { ring, .. } => Some(ring),
            Home::Blocks { .. } | Home::Memory { .. } => None,
        }
    }

    /// Waits at most `limit` for reads and writes of a file.
    pub(crate) fn wait_for_transfers(&self, limit: Duration) -> Result<(), OptimError> {
        match &self.home {
            Home::Blocks { .. } | Home::Memory { .. } => {
                let _nothing_to_wait_for = limit;
                Ok(())
            }
            #[cfg(target_os = "linux")]
            Home::File { ring, .. } => Ok(ring.synchronize(limit)?),
        }
    }

    /// The pieces that have elements of `state`, in order.
    pub(crate) fn within(&self, state: &Range<usize>) -> Vec<Overlap> {
        let places = match &self.home {
            Home::Blocks { .. } => {
                return vec![Overlap {
                    index: 0,
                    both: state.clone(),
                }];
            }
            Home::Memory { places, .. } => places,
            #[cfg(target_os = "linux")]
            Home::File { places, .. } => places,
        };

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
        let memory = match &mut self.home {
            Home::Blocks { masters, moments } => {
                let piece = of_blocks(masters.as_ref(), moments, overlap.both.clone())?;
                return Ok(HeldPiece::lasting(piece));
            }
            Home::Memory { places, block } => {
                let Place { state, at } = &places[overlap.index];
                let bytes = self.format.piece_bytes(state.len());
                Bytes {
                    state: state.clone(),
                    memory: view(block).slice(*at..at + bytes),
                    held: None,
                }
            }
            #[cfg(target_os = "linux")]
            Home::File { places, ring } => {
                let state = places[overlap.index].state.clone();
                if let Access::Read(kind) = access {
                    let part = part_bytes(self.format, &state, &overlap.both, kind);
                    let held = ring.acquire_range(stream, overlap.index, part)?;
                    let wide = self.wide.as_ref();
                    let values = Part {
                        format: self.format,
                        kind,
                        state: overlap.both.clone(),
                    };
                    return values.held(&*self.kernels, stream, held, wide);
                }
                let held = ring.acquire(stream, overlap.index, SwapAccess::Update)?;
                Bytes {
                    state,
                    // SAFETY: used by operations of `stream`, until the piece is released.
                    memory: unsafe { held.bytes() },
                    held: Some(held),
                }
            }
        };

        memory.held(
            self.format,
            Arc::clone(&self.kernels),
            stream,
            self.wide.as_ref(),
            access,
        )
    }
}

impl Pieces<HostDevice> {
    /// State of an optimizer of the host, in pieces, in the home and format of `options`.
    pub(crate) fn offloaded(
        pool: &Pool<HostDevice>,
        kernels: Arc<dyn Kernels<HostDevice>>,
        stream: &HostStream,
        groups: &Resolved,
        sub_group_elems: usize,
        format: Format,
        options: &OffloadOptions,
    ) -> Result<Self, OptimError> {
        let mut places = Vec::new();
        let mut bytes = 0;
        for state in cut(groups, sub_group_elems) {
            let at = bytes;
            bytes += format.piece_bytes(state.len());
            places.push(Place { state, at });
        }

        let largest = places.iter().map(|place| place.state.len()).max();

        let home = match &options.home {
            StateHome::Memory => {
                let block = pool.allocate(bytes, DType::U8, Purpose::Optimizer, stream)?;
                pool.device().fill_zero(stream, view(&block))?;
                Home::Memory { places, block }
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
                let bytes = |place: &Place| format.piece_bytes(place.state.len());
                let bytes: Vec<_> = places.iter().map(bytes).collect();
                OptimError::check(*buffers > 0, "buffers", *buffers as f64, "at least 1")?;
                let parts = SwapParts::create(host, name, dir, &bytes, options.clone())?;
                let ring = SwapRing::new(&parts, host, pool, name, *buffers, limit)?;
                Home::File { places, ring }
            }
        };

        let moment = || {
            let elems = largest.unwrap_or(0);
            pool.allocate(elems, DType::F32, Purpose::Workspace, stream)
        };

        let wide = match format.bf16_moments {
            true => Some([moment()?, moment()?]),
            false => None,
        };

        Ok(Self {
            kernels,
            format,
            home,
            wide,
        })
    }
}

/// A piece of a file in a buffer.
#[cfg(target_os = "linux")]
type InFile<'a, D> = Held<'a, D>;

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
    narrowing: Option<Narrowing<D>>,
    held: Option<InFile<'a, D>>,
    is_written: bool,
}

/// Rounding moments in fp32 to those of a piece.
struct Narrowing<D: Device> {
    kernels: Arc<dyn Kernels<D>>,
    stream: D::Stream,
    narrow: [DeviceSlice<bf16>; 2],
    seed: Option<u64>,
}

impl<D: Device> HeldPiece<'_, D> {
    /// A piece whose memory holds it.
    fn lasting(piece: PieceState) -> Self {
        Self {
            piece,
            narrowing: None,
            held: None,
            is_written: false,
        }
    }

    /// Ends the operations on the piece, and keeps what they wrote.
    pub(crate) fn release(self) -> Result<(), OptimError> {
        if !self.is_written {
            return Ok(());
        }
        if let Some(narrowing) = &self.narrowing {
            narrowing.enqueue(&self.piece)?;
        }
        if let Some(held) = self.held {
            held.write_back()?;
        }
        Ok(())
    }
}

impl<D: Device> Narrowing<D> {
    fn enqueue(&self, piece: &PieceState) -> Result<(), OptimError> {
        let wide = [piece.first_moment, piece.second_moment];
        for (kind, (narrow, wide)) in self.narrow.into_iter().zip(wide).enumerate() {
            let Some(seed) = self.seed else {
                let (wide, narrow) = (wide.erase(), narrow.erase());
                self.kernels.cast(&self.stream, wide, narrow, 1.0)?;
                continue;
            };
            let seed = seed.wrapping_mul(2).wrapping_add(kind as u64);
            let first = piece.state.start as u64;
            self.stream.enqueue_host("round moments", move || {
                // SAFETY: host memory of the buffer beside the piece, which only this stream uses
                // now.
                let wide = unsafe { wide.as_host() };
                // SAFETY: as above, of the piece itself.
                let narrow = unsafe { narrow.as_host_mut() };
                round_stochastically(wide, narrow, seed, first);
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// A piece's bytes in memory.
struct Bytes<'a, D: Device> {
    state: Range<usize>,
    memory: AnySlice,
    held: Option<InFile<'a, D>>,
}

impl<'a, D: Device> Bytes<'a, D> {
    /// The piece. Moments in bf16 are widened into `wide`, which operations of the stream use.
    fn held(
        self,
        format: Format,
        kernels: Arc<dyn Kernels<D>>,
        stream: &D::Stream,
        wide: Option<&[Block<D>; 2]>,
        access: Access,
    ) -> Result<HeldPiece<'a, D>, OptimError> {
        let elems = self.state.len();
        let parts = format.parts(elems);
        let masters = match format.masters {
            MasterFormat::Params => Masters::Params,
            MasterFormat::Fp32 => Masters::Fp32(typed(self.memory.slice(parts.masters), elems)),
            MasterFormat::Remainders => {
                Masters::Remainders(typed(self.memory.slice(parts.masters), elems))
            }
        };

        let moments = [parts.first_moment, parts.second_moment];
        let moments = moments.map(|part| self.memory.slice(part));
        let (moments, narrowing) = match wide {
            None => (moments.map(|bytes| typed(bytes, elems)), None),
            Some(wide) => {
                let narrow = moments.map(|bytes| typed::<bf16>(bytes, elems));
                let [first, second] = wide;
                let first = widen(&*kernels, stream, narrow[0], first)?;
                let second = widen(&*kernels, stream, narrow[1], second)?;
                let seed = match access {
                    Access::Update { seed } => seed,
                    Access::Read(_) => None,
                };
                let narrowing = Narrowing {
                    kernels,
                    stream: stream.clone(),
                    narrow,
                    seed,
                };
                ([first, second], Some(narrowing))
            }
        };

        let [first_moment, second_moment] = moments;
        Ok(HeldPiece {
            piece: PieceState {
                state: self.state,
                masters,
                first_moment,
                second_moment,
            },
            narrowing,
            held: self.held,
            is_written: matches!(access, Access::Update { .. }),
        })
    }
}

/// The elements `state` of one kind, which alone were read from a file.
#[cfg(target_os = "linux")]
struct Part {
    format: Format,
    kind: StateKind,
    state: Range<usize>,
}

#[cfg(target_os = "linux")]
impl Part {
    fn held<'a, D: Device>(
        self,
        kernels: &dyn Kernels<D>,
        stream: &D::Stream,
        held: Held<'a, D>,
        wide: Option<&[Block<D>; 2]>,
    ) -> Result<HeldPiece<'a, D>, OptimError> {
        let elems = self.state.len();
        // SAFETY: used by operations of `stream`, until the piece is released.
        let bytes = unsafe { held.bytes() };
        let is_master = self.kind == StateKind::Master;
        let none = typed::<f32>(bytes.slice(0..0), 0);

        let (masters, moment) = match (is_master, self.format.masters, wide) {
            (true, MasterFormat::Params, _) => (Masters::Params, none),
            (true, MasterFormat::Fp32, _) => (Masters::Fp32(typed(bytes, elems)), none),
            (true, MasterFormat::Remainders, _) => (Masters::Remainders(typed(bytes, elems)), none),
            (false, _, None) => (Masters::Params, typed(bytes, elems)),
            (false, _, Some([wide, _])) => {
                let narrow = typed::<bf16>(bytes, elems);
                (Masters::Params, widen(kernels, stream, narrow, wide)?)
            }
        };

        Ok(HeldPiece {
            piece: PieceState {
                state: self.state,
                masters,
                first_moment: moment,
                second_moment: moment,
            },
            narrowing: None,
            held: Some(held),
            is_written: false,
        })
    }
}

/// The bytes of the elements `range` of one kind, from the start of the piece `state`.
#[cfg(target_os = "linux")]
fn part_bytes(
    format: Format,
    state: &Range<usize>,
    range: &Range<usize>,
    kind: StateKind,
) -> Range<usize> {
    let parts = format.parts(state.len());
    let (part, elem_bytes) = match kind {
        StateKind::Master => (parts.masters, format.master_bytes()),
        StateKind::FirstMoment => (parts.first_moment, format.moment_bytes()),
        StateKind::SecondMoment => (parts.second_moment, format.moment_bytes()),
    };
    let start = part.start + (range.start - state.start) * elem_bytes;
    start..start + range.len() * elem_bytes
}

/// Enqueues casting moments to fp32 in `wide`.
fn widen<D: Device>(
    kernels: &dyn Kernels<D>,
    stream: &D::Stream,
    narrow: DeviceSlice<bf16>,
    wide: &Block<D>,
) -> Result<DeviceSlice<f32>, OptimError> {
    let wide = view(wide).slice(0..narrow.len());
    kernels.cast(stream, narrow.erase(), wide, 1.0)?;
    Ok(wide.typed()?)
}

/// The range `state` of state in blocks.
fn of_blocks<D: Device>(
    masters: Option<&Block<D>>,
    moments: &[Block<D>; 2],
    state: Range<usize>,
) -> Result<PieceState, DeviceError> {
    let slice = |block| view(block).slice(state.clone());
    let masters = match masters.map(slice) {
        None => Masters::Params,
        Some(masters) if masters.dtype() == DType::F32 => Masters::Fp32(masters.typed()?),
        Some(remainders) => Masters::Remainders(as_remainders(remainders)),
    };
    Ok(PieceState {
        masters,
        first_moment: slice(&moments[0]).typed()?,
        second_moment: slice(&moments[1]).typed()?,
        state,
    })
}

/// The elements of both ranges; none if they do not overlap.
fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// The 16-bit values as remainders.
fn as_remainders(values: AnySlice) -> DeviceSlice<i16> {
    debug_assert_eq!(
        values.dtype(),
        DType::F16,
        "remainders are allocated as fp16"
    );
    // SAFETY: the same memory as integers of the same size, for which the maker of `values` made
    // the same promises.
    unsafe { DeviceSlice::from_raw_parts(values.as_ptr().cast(), values.len(), values.device()) }
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

/// The bytes as `elems` values of `T`.
fn typed<T>(bytes: AnySlice, elems: usize) -> DeviceSlice<T> {
    assert_eq!(
        bytes.len(),
        elems * size_of::<T>(),
        "a part of a piece has the bytes of its elements"
    );
    // SAFETY: initialised bytes of a block or buffer, at a multiple of the element's size from its
    // aligned start, of a type of which all values are valid; the rest as for `bytes`.
    unsafe { DeviceSlice::from_raw_parts(bytes.as_ptr().cast(), elems, bytes.device()) }
}

/// The block as a slice, for the optimizer's launches.
pub(crate) fn view<D: Device>(block: &Block<D>) -> AnySlice {
    // SAFETY: the optimizer owns the block, and uses it in methods with `&mut self` only, each
    // after `enter`: so its launches on all streams are in one order. Its drop records the last
    // stream, which is behind all others. Slices go to callers through unsafe methods only.
    unsafe { block.slice() }
}

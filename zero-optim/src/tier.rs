//! Optimizer state away from the memory that a launch updates: in pieces, in host memory in a
//! smaller format or on NVMe.
//!
//! A **piece** is at most
//! [`OptimizerConfig::sub_group_elems`](crate::OptimizerConfig::sub_group_elems) elements of one
//! unit: its masters (or remainders), first and second moments, one after another. A visit of
//! pieces on NVMe is a pipeline over three streams, ordered by events, through a few buffers:
//!
//! ```text
//! read    | 1 | 2 | 3 |   | 4 |
//! update      | 1 | 2 | 3 |   | 4 |
//! write           | 1 | 2 | 3 |   | 4 |
//! ```
//!
//! | buffer | bytes | purpose | when |
//! |---|---|---|---|
//! | pieces | all state | `Optimizer` | [`StateHome::Memory`] |
//! | transfer buffers | `buffers` x the largest piece | `Workspace` | [`StateHome::Nvme`] |
//! | moments in fp32 | 8 x the elements of the largest piece | `Workspace` | [`OffloadOptions::bf16_moments`] |
//!
//! Why a piece is read and written whole: masters and moments together are one list of requests and
//! one buffer, updated in place, 12 bytes an element each way (6 in the smaller formats). DeepSpeed
//! moves the gradient with them, 16 bytes; here the caller has it.
//!
//! State on the device is one piece of the same type. So remainders are a format of masters and not
//! of offload: reading, writing and updating them is one code.

use std::ops::Range;
#[cfg(target_os = "linux")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
#[cfg(target_os = "linux")]
use zero_alloc::swap::{SwapBuffer, SwapFile, SwapLane, SwapOptions};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::Kernels;

use crate::groups::Resolved;
use crate::{OptimError, StateKind};

/// Elements of a piece if the settings have no sub-groups: 12 MB of masters and moments, which the
/// caches of a CPU hold from the read to the write. Four times as many are updated 1.15 times
/// slower.
const PIECE_ELEMS: usize = 1 << 20;
/// Lengths and offsets of pieces in bytes are multiples of this one.
const PIECE_ALIGN_BYTES: usize = 4096;
/// The parts of a piece start at multiples of this one.
const PART_ALIGN_BYTES: usize = 64;

/// The place of the state of an optimizer of the host.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum StateHome {
    /// Host memory.
    #[default]
    Memory,
    /// A scratch file without a name, of the length of the state, which disappears with the
    /// optimizer.
    #[cfg(target_os = "linux")]
    Nvme {
        /// The folder of the file.
        dir: PathBuf,
        /// How the file is read and written.
        options: SwapOptions,
        /// Pieces in memory at once; at least 1. With 4, one is read, one is updated and one is
        /// written at the same time, and one is ready.
        buffers: usize,
    },
}

/// Home and format of the state of [`ShardedAdamW::offloaded`](crate::ShardedAdamW::offloaded).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OffloadOptions {
    /// The place of the state.
    pub home: StateHome,
    /// Keeps the masters of bf16 parameters as 16-bit remainders: parameter and remainder together
    /// have the bits of an fp32 master. The parameter is the master rounded to nearest, ties away
    /// from zero; without remainders ties go to even.
    pub remainder: bool,
    /// Keeps the moments in bf16, rounded stochastically: to nearest, a second moment would not
    /// fall, since a step changes it by less than half a unit in the last place. The random bits
    /// follow from the step and the place in this rank's state, so a run has the same bits again,
    /// but other bits at another stage, with other ranks or other frozen elements.
    pub bf16_moments: bool,
}
setters!(OffloadOptions {
    home: StateHome,
    remainder: bool,
    bf16_moments: bool
});

/// The access of a visit to pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reads the visited elements of one kind: pieces are those parts, whose other kinds have
    /// arbitrary values.
    Read(StateKind),
    /// Reads and writes them.
    Update {
        /// Selects the random bits of stochastic rounding; `None` rounds to nearest.
        seed: Option<u64>,
    },
}

/// The masters in a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Masters {
    /// The parameters are the masters.
    Params,
    Fp32(DeviceSlice<f32>),
    /// The low bits of the masters, whose high bits are the bf16 parameters.
    Remainders(DeviceSlice<i16>),
}

/// A piece in memory, for operations on the stream of the visit.
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
        let start = range.start.max(self.state.start);
        let end = range.end.min(self.state.end);
        let end = end.max(start);
        (
            start - range.start..end - range.start,
            start - self.state.start..end - self.state.start,
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

/// State in pieces, on a device whose streams can transfer it.
pub(crate) trait StateTier<D: Device>: Send {
    /// Calls `run` for each piece that has elements of `state`, in order; it enqueues operations on
    /// `stream`.
    fn visit(
        &mut self,
        stream: &D::Stream,
        state: Range<usize>,
        access: Access,
        run: &mut dyn FnMut(&PieceState) -> Result<(), OptimError>,
    ) -> Result<(), OptimError>;

    /// Whether masters are kept as remainders.
    fn has_remainders(&self) -> bool;

    /// Its file.
    #[cfg(target_os = "linux")]
    fn file(&self) -> Option<&SwapFile>;

    /// Waits for transfers in flight.
    fn wait_for_transfers(&self, limit: Duration) -> Result<(), OptimError>;
}

/// In place of a tier that is visited. It stays if the visit panics, which drops the tier: some
/// units are then updated and others are not, so every later use is an error.
pub(crate) struct Away;

impl<D: Device> StateTier<D> for Away {
    fn visit(
        &mut self,
        _: &D::Stream,
        _: Range<usize>,
        _: Access,
        _: &mut dyn FnMut(&PieceState) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        Err(OptimError::StateLost)
    }

    fn has_remainders(&self) -> bool {
        false
    }

    #[cfg(target_os = "linux")]
    fn file(&self) -> Option<&SwapFile> {
        None
    }

    fn wait_for_transfers(&self, _: Duration) -> Result<(), OptimError> {
        Err(OptimError::StateLost)
    }
}

/// The place of a piece.
#[derive(Debug)]
struct Placed {
    state: Range<usize>,
    /// Its first byte in the storage.
    at: usize,
    /// After it the piece is written, if it was.
    #[cfg_attr(
        not(target_os = "linux"),
        allow(dead_code, reason = "only a file is written to")
    )]
    written: Option<HostEvent>,
}

/// The sizes of pieces.
#[derive(Clone, Copy, Debug)]
struct Format {
    /// Bytes of an element's master; 0 if the parameters are the masters.
    master: usize,
    /// Bytes of an element's moment.
    moment: usize,
}

impl Format {
    /// The parts of a piece in bytes: masters, first and second moments.
    fn parts(self, elems: usize) -> [Range<usize>; 3] {
        let mut end = 0;
        [self.master, self.moment, self.moment].map(|bytes| {
            let start = end;
            end = (start + elems * bytes).next_multiple_of(PART_ALIGN_BYTES);
            start..start + elems * bytes
        })
    }

    fn bytes(self, elems: usize) -> usize {
        self.parts(elems)[2].end.next_multiple_of(PIECE_ALIGN_BYTES)
    }
}

enum Storage {
    Memory(Block<HostDevice>),
    #[cfg(target_os = "linux")]
    File(Box<Transfers>),
}

/// The transfers of pieces from and to a file.
#[cfg(target_os = "linux")]
struct Transfers {
    file: SwapFile,
    reads: (HostStream, SwapLane),
    writes: (HostStream, SwapLane),
    buffers: Vec<Buffer>,
    /// The buffer of the next piece.
    next: usize,
}

#[cfg(target_os = "linux")]
struct Buffer {
    memory: SwapBuffer,
    /// After it the buffer may be overwritten.
    free: Option<HostEvent>,
}

/// The state of an optimizer of the host.
pub(crate) struct Pieces {
    kernels: Arc<dyn Kernels<HostDevice>>,
    format: Format,
    pieces: Vec<Placed>,
    storage: Storage,
    /// The moments of a piece in fp32, if they are kept in bf16.
    wide: Option<[Block<HostDevice>; 2]>,
    /// The stream of the last visit, behind all earlier ones.
    stream: HostStream,
}

impl Pieces {
    pub(crate) fn new(
        pool: &Pool<HostDevice>,
        kernels: Arc<dyn Kernels<HostDevice>>,
        stream: &HostStream,
        groups: &Resolved,
        (param_dtype, sub_group_elems): (DType, usize),
        options: &OffloadOptions,
    ) -> Result<Self, OptimError> {
        if options.remainder && param_dtype != DType::Bf16 {
            return Err(OptimError::Remainders { dtype: param_dtype });
        }
        let format = Format {
            master: match param_dtype {
                DType::F32 => 0,
                _ if options.remainder => size_of::<i16>(),
                _ => size_of::<f32>(),
            },
            moment: if options.bf16_moments {
                size_of::<bf16>()
            } else {
                size_of::<f32>()
            },
        };
        // A multiple of 2048 elements, so that full pieces have no padding.
        let most = if sub_group_elems == usize::MAX {
            PIECE_ELEMS
        } else {
            sub_group_elems.clamp(1, usize::MAX / 2)
        };
        let most = most.next_multiple_of(PIECE_ALIGN_BYTES / size_of::<bf16>());
        let mut pieces = Vec::new();
        let mut bytes = 0;
        let mut largest = 0;
        for unit in &groups.pieces {
            let mut states = unit.iter().filter_map(|piece| piece.state.as_ref());
            let Some(first) = states.next() else { continue };
            let start = first.start;
            let end = states.next_back().unwrap_or(first).end;
            for start in (start..end).step_by(most) {
                let state = start..end.min(start.saturating_add(most));
                largest = largest.max(state.len());
                pieces.push(Placed {
                    state: state.clone(),
                    at: bytes,
                    written: None,
                });
                bytes += format.bytes(state.len());
            }
        }
        let storage = match &options.home {
            StateHome::Memory => {
                let block = pool.allocate(bytes, DType::U8, Purpose::Optimizer, stream)?;
                // SAFETY: a slice of this call, on the stream of the block's first use.
                pool.device().fill_zero(stream, unsafe { block.slice() })?;
                Storage::Memory(block)
            }
            #[cfg(target_os = "linux")]
            StateHome::Nvme {
                dir,
                options,
                buffers,
            } => {
                let sizes = (bytes, format.bytes(largest), *buffers);
                Storage::File(Box::new(Transfers::new(
                    pool,
                    stream,
                    dir,
                    options.clone(),
                    sizes,
                )?))
            }
        };
        let moments = || pool.allocate(largest, DType::F32, Purpose::Workspace, stream);
        let wide = if options.bf16_moments {
            Some([moments()?, moments()?])
        } else {
            None
        };
        Ok(Self {
            kernels,
            format,
            pieces,
            storage,
            wide,
            stream: stream.clone(),
        })
    }

    #[cfg(target_os = "linux")]
    fn is_on_file(&self) -> bool {
        !matches!(self.storage, Storage::Memory(_))
    }

    /// Visits the elements `part` of one kind of a piece on a file.
    #[cfg(target_os = "linux")]
    fn read_part(
        &mut self,
        stream: &HostStream,
        index: usize,
        part: Range<usize>,
        kind: StateKind,
        run: &mut dyn FnMut(&PieceState) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let piece = &self.pieces[index];
        let [masters, first, second] = self.format.parts(piece.state.len());
        let (of_kind, width) = match kind {
            StateKind::Master if self.format.master == 0 => return Ok(()),
            StateKind::Master => (masters, self.format.master),
            StateKind::FirstMoment => (first, self.format.moment),
            StateKind::SecondMoment => (second, self.format.moment),
        };
        let start = of_kind.start + (part.start - piece.state.start) * width;
        let from = start / PIECE_ALIGN_BYTES * PIECE_ALIGN_BYTES;
        let to = start + part.len() * width;
        let elems = part.len();
        let Storage::File(transfers) = &mut self.storage else {
            return Ok(());
        };
        let (buffer, bytes) =
            transfers.read(stream, piece, from..to.next_multiple_of(PIECE_ALIGN_BYTES))?;
        let bytes = bytes.slice(start - from..to - from);
        let kernels = &self.kernels;
        let wide = &self.wide;
        let mut visit = || {
            // SAFETY: as in `run`.
            let wide = wide
                .as_ref()
                .map(|[block, _]| unsafe { block.slice() }.slice(0..elems));
            let values = match (kind, width, wide) {
                (StateKind::Master, 2, _) => {
                    let masters = Masters::Remainders(typed(bytes, elems));
                    let empty = typed(bytes.slice(0..0), 0);
                    return run(&PieceState {
                        state: part.clone(),
                        masters,
                        first_moment: empty,
                        second_moment: empty,
                    });
                }
                (_, 2, Some(wide)) => {
                    kernels.cast(stream, typed::<bf16>(bytes, elems).erase(), wide, 1.0)?;
                    wide.typed()?
                }
                _ => typed::<f32>(bytes, elems),
            };
            let masters = Masters::Fp32(values);
            run(&PieceState {
                state: part.clone(),
                masters,
                first_moment: values,
                second_moment: values,
            })
        };
        let enqueued = visit();
        transfers.buffers[buffer].free = Some(stream.record()?);
        enqueued
    }

    /// Enqueues operations of one piece, whose bytes are in memory. The moments are widened before
    /// and narrowed after.
    fn run(
        &self,
        stream: &HostStream,
        state: &Range<usize>,
        bytes: AnySlice,
        access: Access,
        run: &mut dyn FnMut(&PieceState) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let elems = state.len();
        let [master, first, second] = self.format.parts(elems);
        let masters = match self.format.master {
            0 => Masters::Params,
            2 => Masters::Remainders(typed(bytes.slice(master), elems)),
            _ => Masters::Fp32(typed(bytes.slice(master), elems)),
        };
        let Some(wide) = &self.wide else {
            let first_moment = typed(bytes.slice(first), elems);
            let second_moment = typed(bytes.slice(second), elems);
            return run(&PieceState {
                state: state.clone(),
                masters,
                first_moment,
                second_moment,
            });
        };
        let narrow = [
            typed::<bf16>(bytes.slice(first), elems),
            typed::<bf16>(bytes.slice(second), elems),
        ];
        // SAFETY: used by operations on the stream of the visit only, behind those of earlier
        // visits; the drop records it.
        let wide = wide
            .each_ref()
            .map(|block| unsafe { block.slice() }.slice(0..elems));
        for (narrow, wide) in narrow.iter().zip(wide) {
            self.kernels.cast(stream, narrow.erase(), wide, 1.0)?;
        }
        let first_moment = wide[0].typed()?;
        let second_moment = wide[1].typed()?;
        run(&PieceState {
            state: state.clone(),
            masters,
            first_moment,
            second_moment,
        })?;
        let Access::Update { seed } = access else {
            return Ok(());
        };
        for (kind, (narrow, wide)) in narrow
            .into_iter()
            .zip([first_moment, second_moment])
            .enumerate()
        {
            match seed {
                None => self
                    .kernels
                    .cast(stream, wide.erase(), narrow.erase(), 1.0)?,
                Some(seed) => {
                    let first = state.start as u64;
                    stream.enqueue("round moments", move || {
                        // SAFETY: host memory of the buffer beside the piece, which only this
                        // stream uses now.
                        let wide = unsafe { wide.as_host() };
                        // SAFETY: as above, of the piece itself.
                        let narrow = unsafe { narrow.as_host_mut() };
                        round_stochastically(
                            wide,
                            narrow,
                            seed.wrapping_mul(2).wrapping_add(kind as u64),
                            first,
                        );
                        Ok(())
                    })?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
impl Transfers {
    /// `sizes`: bytes of the file, bytes of the largest piece, number of buffers.
    fn new(
        pool: &Pool<HostDevice>,
        stream: &HostStream,
        dir: &std::path::Path,
        options: SwapOptions,
        sizes: (usize, usize, usize),
    ) -> Result<Self, OptimError> {
        let (bytes, piece_bytes, buffers) = sizes;
        OptimError::check(buffers > 0, "buffers", buffers as f64, "at least 1")?;
        let file = SwapFile::create(dir, bytes as u64, options)?;
        let lane = |direction: &str| {
            let stream = pool
                .device()
                .create_stream(&format!("{} {direction}", stream.name()))?;
            Ok::<_, OptimError>((stream, file.lane()?))
        };
        let reads = lane("read")?;
        let writes = lane("write")?;
        let buffer = |_| {
            let memory = SwapBuffer::allocate(pool, piece_bytes, Purpose::Workspace, &reads.0)?;
            Ok(Buffer { memory, free: None })
        };
        let buffers = (0..buffers)
            .map(buffer)
            .collect::<Result<Vec<_>, OptimError>>()?;
        let registered: Vec<SwapBuffer> =
            buffers.iter().map(|buffer| buffer.memory.clone()).collect();
        reads.1.register(&registered);
        writes.1.register(&registered);
        Ok(Self {
            file,
            reads,
            writes,
            buffers,
            next: 0,
        })
    }

    /// Enqueues reading a range of a piece's bytes into the next buffer; `stream` waits for it.
    /// Returns the buffer's position and the bytes.
    fn read(
        &mut self,
        stream: &HostStream,
        piece: &Placed,
        range: Range<usize>,
    ) -> Result<(usize, AnySlice), OptimError> {
        let at = self.next;
        self.next = (at + 1) % self.buffers.len();
        let (buffer, (reads, lane)) = (&mut self.buffers[at], &self.reads);
        for before in buffer.free.iter().chain(&piece.written) {
            reads.wait(before)?;
        }
        // SAFETY: the operations of visits use it, ordered by events; the drop records their
        // streams.
        let bytes = unsafe { buffer.memory.slice() }.slice(0..range.len());
        lane.read(reads, &[((piece.at + range.start) as u64, bytes)])?;
        let read = reads.record()?;
        stream.wait(&read)?;
        buffer.free = Some(read);
        Ok((at, bytes))
    }

    /// Enqueues writing a piece after the work of `stream`.
    fn write(
        &mut self,
        stream: &HostStream,
        piece: &mut Placed,
        bytes: AnySlice,
    ) -> Result<HostEvent, OptimError> {
        let (writes, lane) = &self.writes;
        writes.wait(&stream.record()?)?;
        lane.write(writes, &[(piece.at as u64, bytes)])?;
        let written = writes.record()?;
        piece.written = Some(written.clone());
        Ok(written)
    }
}

impl StateTier<HostDevice> for Pieces {
    fn visit(
        &mut self,
        stream: &HostStream,
        state: Range<usize>,
        access: Access,
        run: &mut dyn FnMut(&PieceState) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        self.stream = stream.clone();
        let first = self
            .pieces
            .partition_point(|piece| piece.state.end <= state.start);
        for index in first..self.pieces.len() {
            if self.pieces[index].state.start >= state.end {
                break;
            }
            let of_piece = self.pieces[index].state.clone();
            let at = self.pieces[index].at;
            #[cfg(target_os = "linux")]
            if let Access::Read(kind) = access
                && self.is_on_file()
            {
                let part = state.start.max(of_piece.start)..state.end.min(of_piece.end);
                self.read_part(stream, index, part, kind, run)?;
                continue;
            }
            let bytes = self.format.bytes(of_piece.len());
            match &mut self.storage {
                Storage::Memory(block) => {
                    // SAFETY: used by operations on the streams of visits, each behind the last;
                    // the drop records the last.
                    let bytes = unsafe { block.slice() }.slice(at..at + bytes);
                    self.run(stream, &of_piece, bytes, access, run)?;
                }
                #[cfg(target_os = "linux")]
                Storage::File(transfers) => {
                    let (buffer, bytes) = transfers.read(stream, &self.pieces[index], 0..bytes)?;
                    let enqueued = self.run(stream, &of_piece, bytes, access, run);
                    let Storage::File(transfers) = &mut self.storage else {
                        continue;
                    };
                    let free = &mut transfers.buffers[buffer].free;
                    // Also after an error: some operations may be enqueued.
                    *free = Some(stream.record()?);
                    enqueued?;
                    if matches!(access, Access::Update { .. }) {
                        let written = transfers.write(stream, &mut self.pieces[index], bytes)?;
                        transfers.buffers[buffer].free = Some(written);
                    }
                }
            }
        }
        Ok(())
    }

    fn has_remainders(&self) -> bool {
        self.format.master == size_of::<i16>()
    }

    #[cfg(target_os = "linux")]
    fn file(&self) -> Option<&SwapFile> {
        match &self.storage {
            Storage::Memory(_) => None,
            Storage::File(transfers) => Some(&transfers.file),
        }
    }

    fn wait_for_transfers(&self, limit: Duration) -> Result<(), OptimError> {
        match &self.storage {
            Storage::Memory(_) => Ok(()),
            #[cfg(target_os = "linux")]
            Storage::File(transfers) => {
                for (stream, _) in [&transfers.reads, &transfers.writes] {
                    stream.synchronize(limit)?;
                }
                Ok(())
            }
        }
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        // A closed stream runs no more work.
        for block in self.wide.iter_mut().flatten() {
            let _closed = block.record_use(&self.stream);
        }
        match &mut self.storage {
            Storage::Memory(block) => {
                let _closed = block.record_use(&self.stream);
            }
            #[cfg(target_os = "linux")]
            Storage::File(transfers) => {
                for buffer in &transfers.buffers {
                    for stream in [&self.stream, &transfers.reads.0, &transfers.writes.0] {
                        let _closed = buffer.memory.record_use(stream);
                    }
                }
            }
        }
    }
}

/// The bytes as `elems` values of `T`.
fn typed<T>(bytes: AnySlice, elems: usize) -> DeviceSlice<T> {
    assert_eq!(
        bytes.len(),
        elems * size_of::<T>(),
        "a part of a piece has the bytes of its elements"
    );
    // SAFETY: initialised bytes of a block, at a multiple of `PART_ALIGN_BYTES` from its aligned
    // start, of a type of which all values are valid; the rest as for `bytes`.
    unsafe { DeviceSlice::from_raw_parts(bytes.as_ptr().cast(), elems, bytes.device()) }
}

/// Rounds up or down with probabilities by the distance, so that the mean is exact. Infinities and
/// NaNs stay so.
fn round_stochastically(wide: &[f32], narrow: &mut [bf16], seed: u64, first: u64) {
    for (i, (wide, narrow)) in wide.iter().zip(narrow).enumerate() {
        // The finalizer of SplitMix64 (Steele et al., 2014) of the element's position and the seed.
        let mut x = (first + i as u64).wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let bits = wide.to_bits();
        *narrow = match wide.is_finite() {
            true => {
                let rounded = (bits.wrapping_add((x >> 48) as u32) >> 16) as u16;
                let up = bf16::from_bits(rounded);
                if up.is_finite() {
                    up
                } else {
                    bf16::from_bits((bits >> 16) as u16)
                }
            }
            false => bf16::from_f32(*wide),
        };
    }
}

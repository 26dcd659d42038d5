//! From the directions of a wave of matrices to their updates, on the device that computes them.
//!
//! Buffers of a wave, in fp32, from its directions to its application:
//!
//! | buffer | elements |
//! |---|---|
//! | held | what the rank holds of the wave's parameters |
//! | received, returned | what all ranks hold of the parameters that it updates; one buffer, unless every rank holds all |
//! | whole | those parameters, joined from their parts |
//! | scratch | [`Kernels::orthogonalise_scratch_elems`] of the largest matrix |

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device, Stream};
use zero_alloc::host::{HostDevice, HostEvent, HostStream};
use zero_alloc::{Block, Pool, Purpose};
use zero_kernels::{Kernels, MatrixRows, MatrixRule, OrthogonaliseArgs};

use crate::OptimError;
use crate::matrices::{Buffer, Part, Wave};
use crate::pieces::view;
use crate::run_rows::run_rows;

/// The exchange of directions and updates with the ranks among which the state is sharded, on a
/// stream.
pub trait AllToAll<E: Device>: std::fmt::Debug + Send + Sync {
    /// The stream of the exchanges.
    fn stream(&self) -> &E::Stream;

    /// Enqueues, behind the work of `stream` so far, that this rank sends `send_counts[q]` elements
    /// to each rank q and receives `recv_counts[q]`; `send` and `recv` are in the order of ranks.
    /// All ranks call it in the same order. Returns the point at which `recv` is complete and
    /// `send` free.
    ///
    /// # Errors
    /// [`OptimError::Exchange`], or a stream failed.
    fn all_to_all(
        &self,
        stream: &E::Stream,
        send: (AnySlice, &[usize]),
        recv: (AnySlice, &[usize]),
    ) -> Result<E::Event, OptimError>;
}

/// The device that computes the updates of matrices, and its exchange with other ranks.
pub struct MatrixDevice<E: Device> {
    kernels: Arc<dyn Kernels<E>>,
    pool: Pool<E>,
    comm: Box<dyn AllToAll<E>>,
    /// Those of each group, if it has some. Set when the optimizer is built.
    rules: Vec<Option<MatrixRule>>,
}

impl<E: Device> std::fmt::Debug for MatrixDevice<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MatrixDevice({:?})", self.comm)
    }
}

/// The updates of a wave, which are complete at an event.
pub(crate) struct Updates<D: Device> {
    pub(crate) complete: D::Event,
    /// Buffers in use until then, to be freed by the stream that waits for it.
    pub(crate) _buffers: Option<Box<dyn Any>>,
}

/// The rest of an exchange: enqueues what follows the arrival of directions.
pub(crate) type Rest<'a, D> = Box<dyn FnOnce() -> Result<Updates<D>, OptimError> + 'a>;

/// The exchange of an optimizer on `D`.
pub(crate) trait WaveExchange<D: Device>: Send + Sync {
    /// Sends the directions of a wave, which are complete on `stream`, to the updaters. The rest
    /// replaces them by updates.
    fn send<'a>(
        &'a self,
        stream: &'a D::Stream,
        wave: &'a Wave<'a>,
        held: AnySlice,
    ) -> Result<Rest<'a, D>, OptimError>;

    /// Sets the rules of the matrices of each group.
    fn set_rules(&mut self, rules: Vec<Option<MatrixRule>>) -> Result<(), OptimError>;
}

/// On the optimizer's own device: while the matrices of a wave are computed, the directions of the
/// next travel.
impl<D: Device> WaveExchange<D> for MatrixDevice<D> {
    fn send<'a>(
        &'a self,
        stream: &'a D::Stream,
        wave: &'a Wave<'a>,
        held: AnySlice,
    ) -> Result<Rest<'a, D>, OptimError> {
        let (received, arrived) = self.to_updaters(stream, wave, held)?;
        Ok(Box::new(move || {
            stream.wait(&arrived)?;
            let (returned, complete) = self.updates(stream, wave, held, received)?;
            Ok(Updates {
                complete,
                _buffers: Some(Box::new(returned)),
            })
        }))
    }

    fn set_rules(&mut self, rules: Vec<Option<MatrixRule>>) -> Result<(), OptimError> {
        self.rules = rules;
        Ok(self.kernels.can_orthogonalise()?)
    }
}

/// On a device beside an optimizer on the host: all of a wave on the stream of the exchange.
pub struct OffloadedMatrices<E: Device> {
    /// The device.
    pub on: MatrixDevice<E>,
    /// Memory of the host for directions, which the device copies.
    pub held: Pool<HostDevice>,
    /// A stream that is used for nothing else.
    pub done: HostStream,
    /// The limit of the waits between host and device.
    pub limit: Duration,
}

impl<E: Device> std::fmt::Debug for OffloadedMatrices<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OffloadedMatrices({:?})", self.on)
    }
}

impl<E: Device> OffloadedMatrices<E> {
    fn enqueue(
        &self,
        ready: &HostEvent,
        wave: &Wave<'_>,
        held: AnySlice,
    ) -> Result<HostEvent, OptimError> {
        let Self { on, done, .. } = self;
        let device = on.pool.device();
        let stream = on.comm.stream();
        device.wait_for_host(stream, ready, self.limit)?;
        let copy = match device.id().accesses(held.device()) {
            true => None,
            false => Some(on.allocate(stream, held.len())?),
        };
        let on_device = copy.as_ref().map_or(held, view);
        if copy.is_some() {
            device.copy(stream, held, on_device)?;
        }
        let (received, _) = on.to_updaters(stream, wave, on_device)?;
        let (_returned, complete) = on.updates(stream, wave, on_device, received)?;
        let complete = match copy.is_some() {
            true => {
                device.copy(stream, on_device, held)?;
                stream.record()?
            }
            false => complete,
        };
        device.host_waits(done, &complete, self.limit)?;
        Ok(done.record()?)
    }
}

impl<E: Device> WaveExchange<HostDevice> for OffloadedMatrices<E> {
    fn send<'a>(
        &'a self,
        stream: &'a HostStream,
        wave: &'a Wave<'a>,
        held: AnySlice,
    ) -> Result<Rest<'a, HostDevice>, OptimError> {
        let complete = self.enqueue(&stream.record()?, wave, held)?;
        Ok(Box::new(move || {
            Ok(Updates {
                complete,
                _buffers: None,
            })
        }))
    }

    fn set_rules(&mut self, rules: Vec<Option<MatrixRule>>) -> Result<(), OptimError> {
        self.on.set_rules(rules)
    }
}

impl<E: Device> MatrixDevice<E> {
    /// The device of `pool`, with an exchange over its ranks.
    pub fn new(
        kernels: Arc<dyn Kernels<E>>,
        pool: &Pool<E>,
        comm: impl AllToAll<E> + 'static,
    ) -> Self {
        Self {
            kernels,
            pool: pool.clone(),
            comm: Box::new(comm),
            rules: Vec::new(),
        }
    }

    fn allocate(&self, stream: &E::Stream, elems: usize) -> Result<Block<E>, OptimError> {
        let pool = &self.pool;
        Ok(pool.allocate(elems, DType::F32, Purpose::Workspace, stream)?)
    }

    /// Sends the directions of a wave to the updaters: those for this rank, which have arrived at
    /// the event.
    fn to_updaters(
        &self,
        stream: &E::Stream,
        wave: &Wave<'_>,
        held: AnySlice,
    ) -> Result<(Block<E>, E::Event), OptimError> {
        let buffer = wave.held();
        let given = wave.given();
        let of_held = |part: &Part<'_>| {
            let mut held = buffer.parts.iter();
            let same = held.find(|held| held.param.id == part.param.id);
            same.map(|held| held.at)
        };
        let first = given.parts.first().and_then(of_held).unwrap_or(0);
        let send = held.slice(first..first + given.elems());
        let arriving = wave.received();
        let received = self.allocate(stream, arriving.elems())?;
        let recv = (view(&received), &arriving.counts[..]);
        let arrived = self.comm.all_to_all(stream, (send, &given.counts), recv)?;
        Ok((received, arrived))
    }

    /// Orthogonalises the matrices of this rank, whose directions have arrived on `stream`, and
    /// returns them: the updates are in `held` at the event. The buffer is in use until then.
    fn updates(
        &self,
        stream: &E::Stream,
        wave: &Wave<'_>,
        held: AnySlice,
        received: Block<E>,
    ) -> Result<(Block<E>, E::Event), OptimError> {
        let own = wave.own();
        let whole = self.allocate(stream, own.elems())?;
        let arrived = wave.received();
        self.copy_parts(stream, &own, view(&whole), &arrived, view(&received), true)?;

        let scratch = own.parts.iter().flat_map(|part| &part.matrices.matrices);
        let scratch = scratch.map(|m| self.kernels.orthogonalise_scratch_elems(m.rows, m.cols));
        let scratch = self.allocate(stream, scratch.max().unwrap_or(0))?;
        for part in &own.parts {
            let group = part.matrices.group;
            let Some(rule) = self.rules.get(group).and_then(Option::as_ref) else {
                return Err(OptimError::NoMatrixRule {
                    unit: part.param.id.unit.to_string(),
                    group,
                });
            };
            for matrix in &part.matrices.matrices {
                let range = matrix.range();
                let values = part.at + range.start..part.at + range.end;
                let factor = rule.adjust.factor(matrix.outputs(), matrix.inputs());
                let args = OrthogonaliseArgs {
                    values: view(&whole).slice(values).typed()?,
                    rows: matrix.rows,
                    cols: matrix.cols,
                    row_stride: matrix.row_stride,
                    scratch: view(&scratch).typed()?,
                    rule: rule.newton_schulz,
                    scale: factor as f32,
                };
                self.kernels.orthogonalise(stream, args)?;
            }
        }

        let leaving = wave.returned();
        // The same parts, unless every rank holds all.
        let returned = match leaving.elems() == arrived.elems() {
            true => received,
            false => self.allocate(stream, leaving.elems())?,
        };
        self.copy_parts(stream, &own, view(&whole), &leaving, view(&returned), false)?;
        let arriving = wave.held();
        let send = (view(&returned), &leaving.counts[..]);
        let complete = self
            .comm
            .all_to_all(stream, send, (held, &arriving.counts))?;
        Ok((returned, complete))
    }

    /// Copies between a rank's own parameters and the parts of a buffer.
    fn copy_parts(
        &self,
        stream: &E::Stream,
        own: &Buffer<'_>,
        whole: AnySlice,
        buffer: &Buffer<'_>,
        parts: AnySlice,
        to_whole: bool,
    ) -> Result<(), OptimError> {
        for part in &buffer.parts {
            let mut all = own.parts.iter();
            let Some(of_own) = all.find(|own| own.param.id == part.param.id) else {
                continue;
            };
            for rows in run_rows(part.runs()?) {
                let place = part.in_buffer(rows.in_part.elems());
                let in_parts = MatrixRows {
                    data: parts.slice(place),
                    stride: rows.in_part.stride as usize,
                };
                let Some(place) = &rows.in_whole else {
                    if !to_whole {
                        self.pool.device().fill_zero(stream, in_parts.data)?;
                    }
                    continue;
                };
                let in_whole = MatrixRows {
                    data: whole.slice(of_own.in_buffer(place.elems())),
                    stride: place.stride as usize,
                };
                let [from, to] = match to_whole {
                    true => [in_parts, in_whole],
                    false => [in_whole, in_parts],
                };
                let shape = [rows.in_part.count, rows.in_part.len].map(|n| n as usize);
                self.kernels.cast_rows(stream, from, to, shape, 1.0)?;
            }
        }
        Ok(())
    }
}

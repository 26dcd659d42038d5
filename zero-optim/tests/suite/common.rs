//! Test ranks with units and shards; they take turns on one thread.
#![allow(unreachable_pub)]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use proptest::prelude::ProptestConfig;
use zero_alloc::Pool;
use zero_alloc::device::{AnySlice, DType, Device, DeviceId, DeviceSlice, Reduced, Stream};
use zero_alloc::host::{HostDevice, HostStream};
use zero_kernels::host::HostKernels;
use zero_optim::{
    Divisor, GatheredStats, GroupRules, OptimError, OptimizerBuilder, OptimizerConfig, ParamGroups,
    RankStats, Segment, ShardedOptimizer, StateKind, StepInputs, StepOutcome, UnitSlices,
};

pub const LIMIT: Duration = Duration::from_secs(60);

/// The kinds of Adam's state.
pub const KINDS: [StateKind; 3] = [
    StateKind::Master,
    StateKind::Slot("first_moment"),
    StateKind::Slot("second_moment"),
];

/// Host memory with values of a dtype.
pub struct Buffer {
    bytes: Vec<u64>,
    len: usize,
    dtype: DType,
}

impl Buffer {
    pub fn new(values: &[f32], dtype: DType) -> Self {
        let mut buffer = Self {
            bytes: vec![0; values.len().div_ceil(2) + 1],
            len: values.len(),
            dtype,
        };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer.bytes);
        for (i, &x) in values.iter().enumerate() {
            match dtype {
                DType::Bf16 => {
                    bytes[2 * i..2 * i + 2].copy_from_slice(&bf16::from_f32(x).to_ne_bytes())
                }
                DType::F16 => {
                    bytes[2 * i..2 * i + 2].copy_from_slice(&f16::from_f32(x).to_ne_bytes())
                }
                _ => bytes[4 * i..4 * i + 4].copy_from_slice(&x.to_ne_bytes()),
            }
        }
        buffer
    }

    pub fn values(&self) -> Vec<f32> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.bytes);
        (0..self.len)
            .map(|i| match self.dtype {
                DType::Bf16 => bf16::from_ne_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
                DType::F16 => f16::from_ne_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
                _ => f32::from_ne_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap()),
            })
            .collect()
    }

    pub fn slice(&mut self) -> AnySlice {
        // SAFETY: tests keep their buffers until the stream is drained, and use one stream.
        unsafe {
            AnySlice::from_raw_parts(
                self.bytes.as_mut_ptr().cast(),
                self.len,
                self.dtype,
                DeviceId::HOST,
            )
        }
    }
}

/// Configuration of a property with `n` cases, times `ZERO_PROPTEST_FACTOR` if that is set.
pub fn cases(n: u32) -> ProptestConfig {
    let factor = std::env::var("ZERO_PROPTEST_FACTOR")
        .ok()
        .and_then(|f| f.parse().ok())
        .unwrap_or(1);
    ProptestConfig {
        cases: n.saturating_mul(factor),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// A stream, memory and kernels of the host.
pub struct Host {
    pub stream: HostStream,
    pub pool: Pool<HostDevice>,
    kernels: Arc<HostKernels>,
}

impl Host {
    pub fn on(device: HostDevice) -> Self {
        Self {
            stream: device.create_stream("compute").unwrap(),
            pool: Pool::new(device, 1 << 30),
            kernels: Arc::new(HostKernels::new(1).unwrap()),
        }
    }

    pub fn builder(&self) -> OptimizerBuilder<'_, HostDevice> {
        ShardedOptimizer::builder(&self.pool, self.kernels.clone(), &self.stream)
    }
}

pub struct Random(pub u64);

impl Random {
    /// A value in -1..1.
    pub fn value(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        ((self.0 >> 40) as f32 / (1 << 23) as f32) - 1.0
    }

    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// The part of each unit that a rank stores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Holding {
    /// Whole units: stage 0.
    Whole,
    /// Its shards: stages 1 to 3.
    Shard,
}

/// One rank: its optimizer and its parameters.
pub struct Rank {
    pub optim: ShardedOptimizer<HostDevice>,
    pub params: Vec<Buffer>,
    pub pool: Pool<HostDevice>,
    pub stream: HostStream,
    /// This rank's range of each unit.
    held: Vec<Range<usize>>,
}

/// A rank to be: unit `u` has the initial values `init[u]`, padded to a multiple of the ranks.
pub struct RankOf<'a> {
    pub config: &'a OptimizerConfig,
    pub dtype: DType,
    pub init: &'a [Vec<f32>],
    /// The rank, and the number of ranks.
    pub place: (usize, usize),
    pub how: Holding,
    pub rules: &'a [GroupRules],
    /// The group of an element of a unit.
    pub group_of: &'a dyn Fn(usize, usize) -> usize,
}

impl RankOf<'_> {
    /// Makes the rank; `change` changes the optimizer's other settings.
    pub fn build(
        self,
        device: HostDevice,
        change: impl FnOnce(OptimizerBuilder<'_, HostDevice>) -> OptimizerBuilder<'_, HostDevice>,
    ) -> Result<Rank, OptimError> {
        let host = Host::on(device);
        let (rank, world) = self.place;
        let mut segments = Vec::new();
        let mut held = Vec::new();
        let mut end = 0;

        for (u, init) in self.init.iter().enumerate() {
            assert!(init.len().is_multiple_of(world), "units are padded");
            let shard = init.len() / world;
            let own = rank * shard..(rank + 1) * shard;
            let held_here = if self.how == Holding::Whole {
                0..init.len()
            } else {
                own.clone()
            };
            let state = end..end + held_here.len();
            end = state.end;
            segments.push(match self.how {
                Holding::Whole => Segment::whole(format!("unit{u}"), state, own),
                Holding::Shard => Segment::shard(format!("unit{u}"), state),
            });
            held.push(held_here);
        }

        // A run an element: the optimizer joins them.
        let units = held.iter().enumerate().filter(|_| !self.rules.is_empty());
        let groups = units.flat_map(|(u, held)| held.clone().map(move |elem| (u, elem)));
        let runs = groups
            .enumerate()
            .map(|(i, (u, elem))| (i..i + 1, (self.group_of)(u, elem)));
        let groups = ParamGroups::new(self.rules.to_vec(), runs);

        let builder = host.builder().config(self.config.clone());
        let builder = builder.param_dtype(self.dtype).groups(&groups);
        let mut optim = change(builder).build(segments)?;
        let mut params: Vec<Buffer> = self
            .init
            .iter()
            .zip(&held)
            .map(|(w, held)| Buffer::new(&w[held.clone()], self.dtype))
            .collect();
        let slices: Vec<_> = params.iter_mut().map(|p| [(p.slice(), 0)]).collect();
        optim.init_masters(&host.stream, &slices)?;
        host.stream.synchronize(LIMIT)?;

        let Host { pool, stream, .. } = host;
        Ok(Rank {
            optim,
            params,
            pool,
            stream,
            held,
        })
    }
}

impl Rank {
    /// Rank `rank` of `world`, without parameter groups.
    pub fn new(
        config: &OptimizerConfig,
        dtype: DType,
        init: &[Vec<f32>],
        rank: usize,
        world: usize,
        how: Holding,
    ) -> Self {
        let rank = RankOf {
            config,
            dtype,
            init,
            place: (rank, world),
            how,
            rules: &[],
            group_of: &|_, _| 0,
        };
        rank.build(HostDevice::new(), |builder| builder).unwrap()
    }

    pub fn grads(&self, grads: &[Vec<f32>], dtype: DType) -> Vec<Buffer> {
        grads
            .iter()
            .zip(&self.held)
            .map(|(g, held)| Buffer::new(&g[held.clone()], dtype))
            .collect()
    }

    /// The slices of each unit's parameter.
    pub fn slices(&mut self) -> Vec<[(AnySlice, usize); 1]> {
        let slice = |param: &mut Buffer| [(param.slice(), 0)];
        self.params.iter_mut().map(slice).collect()
    }

    /// The gradients, complete from now on.
    pub fn reduced(&self, grads: &mut [Buffer]) -> Vec<Reduced<HostDevice>> {
        // SAFETY: written by the test's thread before; tests keep them until the stream is drained.
        let reduced = |grad: &mut Buffer| unsafe {
            Reduced::new(grad.slice(), self.stream.record().unwrap())
        };
        grads.iter_mut().map(reduced).collect()
    }

    pub fn stats(
        &mut self,
        grads: &[Vec<f32>],
        dtype: DType,
        loss: f64,
    ) -> Result<RankStats, OptimError> {
        let mut grads = self.grads(grads, dtype);
        let reduced = self.reduced(&mut grads);
        self.optim.enqueue_stats(&self.stream, &reduced)?;
        self.optim.rank_stats(&self.stream, loss, LIMIT)
    }

    pub fn step(
        &mut self,
        grads: &[Vec<f32>],
        dtype: DType,
        gathered: GatheredStats<'_>,
    ) -> Result<StepOutcome, OptimError> {
        self.step_within(LIMIT, grads, dtype, gathered)
    }

    pub fn step_within(
        &mut self,
        limit: Duration,
        grads: &[Vec<f32>],
        dtype: DType,
        gathered: GatheredStats<'_>,
    ) -> Result<StepOutcome, OptimError> {
        let mut grads = self.grads(grads, dtype);
        let reduced = self.reduced(&mut grads);
        let params = self.slices();
        let units = unit_slices(&reduced, &params);
        let outcome = self.optim.step(&self.stream, &units, gathered, limit)?;
        self.stream.synchronize(LIMIT).unwrap();
        Ok(outcome)
    }

    /// A step of the only rank.
    pub fn step_alone(
        &mut self,
        grads: &[Vec<f32>],
        dtype: DType,
    ) -> Result<StepOutcome, OptimError> {
        let stats = [self.stats(grads, dtype, 0.0)?];
        let gathered = GatheredStats::new(&stats, Divisor::MicroBatches(1));
        self.step(grads, dtype, gathered)
    }

    /// One step by one call, with two micro-batches.
    pub fn step_with(
        &mut self,
        grads: &[Vec<f32>],
        dtype: DType,
        loss: f64,
        exchange: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, OptimError>,
    ) -> Result<StepOutcome, OptimError> {
        let mut grads = self.grads(grads, dtype);
        let reduced = self.reduced(&mut grads);
        let params = self.slices();
        let units = unit_slices(&reduced, &params);
        let inputs = StepInputs::new(loss, Divisor::MicroBatches(2));
        let outcome = self
            .optim
            .step_with(&self.stream, &units, inputs, exchange, LIMIT);
        self.stream.synchronize(LIMIT).unwrap();
        outcome
    }

    /// The state of one kind, as host memory.
    pub fn state(&self, kind: StateKind) -> Option<&[f32]> {
        self.state_slice(kind).map(|s| {
            // SAFETY: host memory, and the stream is drained after every step.
            unsafe { s.as_host() }
        })
    }

    pub fn write_state(&mut self, kind: StateKind, values: &[f32]) {
        let slice = self.state_slice(kind).unwrap();
        // SAFETY: host memory, and the stream is drained after every step.
        unsafe { slice.as_host_mut() }.copy_from_slice(values);
    }

    pub fn write_params(&mut self) {
        let slices = self.slices();
        self.optim.write_params(&self.stream, &slices).unwrap();
        self.stream.synchronize(LIMIT).unwrap();
    }

    fn state_slice(&self, kind: StateKind) -> Option<DeviceSlice<f32>> {
        // SAFETY: used before the optimizer is dropped, on the one host thread of the test.
        unsafe { self.optim.state(kind) }
    }
}

/// The slices of units with a gradient and a parameter each.
pub fn unit_slices<'a, D: Device>(
    grads: &'a [Reduced<D>],
    params: &'a [[(AnySlice, usize); 1]],
) -> Vec<UnitSlices<'a, D>> {
    grads
        .iter()
        .zip(params)
        .map(|(grad, param)| UnitSlices { grad, param })
        .collect()
}

/// All ranks of a run.
pub struct World {
    pub ranks: Vec<Rank>,
    how: Holding,
}

impl World {
    pub fn new(
        config: &OptimizerConfig,
        dtype: DType,
        init: &[Vec<f32>],
        world: usize,
        how: Holding,
    ) -> Self {
        Self::with_groups(config, dtype, init, world, how, &[], &|_, _| 0)
    }

    /// As [`Self::new`], with parameter groups.
    pub fn with_groups(
        config: &OptimizerConfig,
        dtype: DType,
        init: &[Vec<f32>],
        world: usize,
        how: Holding,
        rules: &[GroupRules],
        group_of: &dyn Fn(usize, usize) -> usize,
    ) -> Self {
        let rank = |r| {
            let rank = RankOf {
                config,
                dtype,
                init,
                place: (r, world),
                how,
                rules,
                group_of,
            };
            rank.build(HostDevice::new(), |builder| builder).unwrap()
        };
        Self {
            ranks: (0..world).map(rank).collect(),
            how,
        }
    }

    /// Runs one step on all ranks with these reduced gradients (whole padded units), and asserts
    /// equal outcomes.
    pub fn step(
        &mut self,
        grads: &[Vec<f32>],
        dtype: DType,
        micro_batches: usize,
    ) -> (Vec<RankStats>, StepOutcome) {
        let stats: Vec<RankStats> = self
            .ranks
            .iter_mut()
            .enumerate()
            .map(|(r, rank)| rank.stats(grads, dtype, r as f64).unwrap())
            .collect();
        let gathered = GatheredStats::new(&stats, Divisor::MicroBatches(micro_batches));
        let mut outcomes: Vec<StepOutcome> = self
            .ranks
            .iter_mut()
            .map(|rank| rank.step(grads, dtype, gathered).unwrap())
            .collect();
        let outcome = outcomes.pop().unwrap();
        assert!(outcomes.iter().all(|o| *o == outcome), "the ranks disagree");
        (stats, outcome)
    }

    /// The parameters of whole units, assembled from all ranks.
    pub fn params(&self) -> Vec<Vec<f32>> {
        let units = self.ranks[0].params.len();
        match self.how {
            Holding::Whole => {
                let first: Vec<Vec<f32>> =
                    self.ranks[0].params.iter().map(Buffer::values).collect();
                for rank in &self.ranks {
                    assert_eq!(
                        rank.params.iter().map(Buffer::values).collect::<Vec<_>>(),
                        first,
                        "the ranks differ"
                    );
                }
                first
            }
            Holding::Shard => (0..units)
                .map(|u| {
                    self.ranks
                        .iter()
                        .flat_map(|rank| rank.params[u].values())
                        .collect()
                })
                .collect(),
        }
    }
}

//! The model, its data, and training with and without ZeRO.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput, TransformerEncoderLayer,
};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use burn_zero::{Chain, TrainStep, ZeroBurn, unit_of_block};
use zero_alloc::host::HostDevice;
use zero_comm::CommOptions;
use zero_comm::threads::{ThreadsComm, World};
use zero_kernels::AdamHyper;
use zero_optim::framework::{Builder, FrameworkError, Rank, Zero};
use zero_optim::{OptimizerConfig, StepOutcome};
use zero_shard::ZeroStage;

use crate::muon;

pub(crate) const RANKS: usize = 4;
pub(crate) const STEPS: usize = 50;
/// Rows of all ranks together.
const ROWS: usize = 8;
const SEQ: usize = 6;
const FEATURES: usize = 5;
const WIDTH: usize = 32;
/// The factor of Muon's learning rate.
pub(crate) const MUON_LR_SCALE: f64 = 10.0;
/// Elements of the first block.
pub(crate) const INPUT_ELEMS: usize = FEATURES * WIDTH + WIDTH;

pub(crate) type Result<T> = std::result::Result<T, FrameworkError>;

/// A model as a user of burn writes it.
#[derive(Module, Debug)]
pub(crate) struct Model {
    input: Linear,
    encoder: TransformerEncoder,
    pub(crate) head: Linear,
}

/// The same as a list of blocks.
pub(crate) type Blocks = Chain<Linear, TransformerEncoderLayer, Linear>;

impl Model {
    pub(crate) fn new(layers: usize) -> Self {
        let device = Device::flex().autodiff();
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, layers).with_dropout(0.0);
        let encoder = encoder.with_initializer(Initializer::Zeros);
        let linear = |inputs, outputs| {
            let linear = LinearConfig::new(inputs, outputs);
            linear.with_initializer(Initializer::Zeros).init(&device)
        };
        let model = Self {
            input: linear(FEATURES, WIDTH),
            encoder: encoder.init(&device),
            head: linear(WIDTH, FEATURES),
        };
        // Tests run at the same time, and burn has one random generator for all of them.
        model.map(&mut Reproducible(Numbers(1)))
    }

    pub(crate) fn with_frozen_input(mut self) -> Self {
        self.input = self.input.no_grad();
        self
    }

    /// The output of the encoder.
    pub(crate) fn hidden(&self, batch: &Batch) -> Tensor<3> {
        let hidden = self.input.forward(batch.input());
        self.encoder.forward(TransformerEncoderInput::new(hidden))
    }

    pub(crate) fn loss(&self, batch: &Batch) -> Tensor<1> {
        batch.mse(self.head.forward(self.hidden(batch)))
    }

    pub(crate) fn into_blocks(self) -> Blocks {
        Chain {
            first: self.input,
            layers: self.encoder.layers,
            last: self.head,
        }
    }

    /// This model with the parameters of `blocks`.
    pub(crate) fn with_blocks(mut self, blocks: Blocks) -> Self {
        self.input = blocks.first;
        self.encoder.layers = blocks.layers;
        self.head = blocks.last;
        self
    }
}

/// Numbers that look random, from -1 to 1.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        let next = self.0.wrapping_mul(6364136223846793005);
        self.0 = next.wrapping_add(1442695040888963407);
        (self.0 >> 33) as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// Replaces matrices by numbers of the usual size.
struct Reproducible(Numbers);

impl ModuleMapper for Reproducible {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let shape = tensor.dims();
            if D < 2 {
                return tensor;
            }
            let scale = (1.0 / shape[0] as f32).sqrt();
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|_| scale * self.0.next())
                .collect();
            let data = TensorData::new(values, shape);
            Tensor::from_data(data, &tensor.device()).require_grad()
        })
    }
}

/// Replaces all parameters by one number.
pub(crate) struct Constant;

impl ModuleMapper for Constant {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| (tensor.ones_like() * 0.01).detach().require_grad())
    }
}

/// Input and targets, `[rows, SEQ, FEATURES]`.
pub(crate) struct Batch {
    input: Tensor<3>,
    targets: Tensor<3>,
}

impl Batch {
    pub(crate) fn new(step: usize, rows: Range<usize>) -> Self {
        let shape = [rows.len(), SEQ, FEATURES];
        let mut input = Vec::new();
        for row in rows {
            let mut numbers = Numbers((step * ROWS + row + 1) as u64);
            input.extend((0..SEQ * FEATURES).map(|_| numbers.next()));
        }
        let targets: Vec<f32> = input.iter().map(|x| (3.0 * x).sin()).collect();
        let tensor =
            |values: Vec<f32>| Tensor::from_data(TensorData::new(values, shape), &Device::flex());
        Self {
            input: tensor(input),
            targets: tensor(targets),
        }
    }

    pub(crate) fn cast(self, dtype: DType) -> Self {
        Self {
            input: self.input.cast(dtype),
            targets: self.targets.cast(dtype),
        }
    }

    pub(crate) fn input(&self) -> Tensor<3> {
        self.input.clone()
    }

    /// The mean squared error of `output`.
    pub(crate) fn mse(&self, output: Tensor<3>) -> Tensor<1> {
        MseLoss::new().forward(output, self.targets.clone(), Reduction::Mean)
    }

    /// The rows of all ranks.
    pub(crate) fn whole(step: usize) -> Self {
        Self::new(step, 0..ROWS)
    }

    /// The rows of one rank.
    pub(crate) fn of_rank(step: usize, (rank, ranks): (usize, usize)) -> Self {
        let rows = ROWS / ranks;
        Self::new(step, rank * rows..(rank + 1) * rows)
    }
}

pub(crate) fn config() -> OptimizerConfig {
    let hyper = AdamHyper {
        weight_decay: 0.01,
        ..OptimizerConfig::default().hyper
    };
    OptimizerConfig::default().hyper(hyper)
}

/// Trains a step as one model or as a chain.
pub(crate) enum Run {
    Model(ZeroBurn<Model>),
    Chain(ZeroBurn<Blocks>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Model,
    Chain,
}

impl Run {
    pub(crate) fn new(form: Form, model: Model, builder: Builder<HostDevice>) -> Result<Self> {
        Ok(match form {
            Form::Model => Self::Model(ZeroBurn::new(model, builder, unit_of_block)?),
            Form::Chain => Self::Chain(ZeroBurn::chain(model.into_blocks(), builder)?),
        })
    }

    pub(crate) fn step(&mut self, batch: &Batch) -> Result<StepOutcome> {
        match self {
            Self::Model(run) => run.step(|model| model.loss(batch)),
            Self::Chain(run) => step_chain(run, batch),
        }
    }

    pub(crate) fn zero(&mut self) -> &mut Zero<HostDevice> {
        match self {
            Self::Model(run) => run.zero(),
            Self::Chain(run) => run.zero(),
        }
    }

    /// The whole model.
    pub(crate) fn model(&mut self, template: Model) -> Result<Model> {
        match self {
            Self::Model(run) => run.model(),
            Self::Chain(run) => Ok(template.with_blocks(run.model()?)),
        }
    }
}

pub(crate) fn step_chain(run: &mut ZeroBurn<Blocks>, batch: &Batch) -> Result<StepOutcome> {
    let mut step = run.begin()?;
    backward_chain(&mut step, batch)?;
    step.end()
}

pub(crate) fn backward_chain(step: &mut TrainStep<'_, Blocks>, batch: &Batch) -> Result<()> {
    step.backward_chain(
        |input| input.forward(batch.input()),
        |layer, hidden| layer.forward(hidden, None, None),
        |head, hidden| batch.mse(head.forward(hidden)),
    )
}

/// The place of a rank: its number, and the number of ranks.
pub(crate) type Place = (usize, usize);

/// Runs `work` on `ranks` threads.
pub(crate) fn on_ranks<R: Send>(
    ranks: usize,
    work: impl Fn(ThreadsComm, Place) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let comms = World::new(ranks, CommOptions::default()).unwrap();
    let work = &work;
    thread::scope(|scope| {
        let spawn = |(rank, comm)| scope.spawn(move || work(comm, (rank, ranks)));
        let threads: Vec<_> = comms.into_iter().enumerate().map(spawn).collect();
        threads
            .into_iter()
            .map(|rank| rank.join().unwrap())
            .collect()
    })
}

pub(crate) fn builder(comm: ThreadsComm, stage: ZeroStage) -> Result<Builder<HostDevice>> {
    let rank = Rank::on_host(comm)?;
    Ok(Zero::builder(rank).stage(stage).adamw(config()))
}

/// The bits of all parameters.
pub(crate) fn bits(model: &Model) -> Vec<u32> {
    struct Bits(Vec<u32>);

    impl ModuleVisitor for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().inner().into_data().try_into_vec::<f32>();
            self.0.extend(values.unwrap().iter().map(|x| x.to_bits()));
        }
    }

    let mut bits = Bits(Vec::new());
    model.visit(&mut bits);
    bits.0
}

/// AdamW over the whole model, whose scalars are f64 and whose state is f32.
struct AdamW {
    gradients: Gradients,
    moments: HashMap<ParamId, Vec<[f32; 2]>>,
    step: i32,
    /// Whether Muon updates the matrices at a path, with [`MUON_LR_SCALE`].
    is_hidden: fn(&str) -> bool,
    path: Vec<String>,
}

impl ModuleMapper for AdamW {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let OptimizerConfig { hyper, lr, .. } = config();
        let gradient = param.base().grad_remove(&mut self.gradients).unwrap();
        let gradient = gradient.into_data().try_into_vec::<f32>().unwrap();
        let moments = self.moments.entry(param.id).or_default();
        moments.resize(gradient.len(), [0.0; 2]);
        if D == 2 && (self.is_hidden)(&self.path.join(".")) {
            return param
                .map(|tensor| muon::updated(tensor, gradient, moments, lr * MUON_LR_SCALE));
        }

        let correction1 = 1.0 - hyper.beta1.powi(self.step);
        let correction2 = 1.0 - hyper.beta2.powi(self.step);
        param.map(|tensor| {
            let (shape, device) = (tensor.dims(), tensor.device());
            let mut values = tensor.inner().into_data().try_into_vec::<f32>().unwrap();
            for ((value, gradient), [m, v]) in values.iter_mut().zip(gradient).zip(moments) {
                let g = f64::from(gradient);
                *m = (hyper.beta1 * f64::from(*m) + (1.0 - hyper.beta1) * g) as f32;
                *v = (hyper.beta2 * f64::from(*v) + (1.0 - hyper.beta2) * g * g) as f32;
                let root = (f64::from(*v) / correction2).sqrt() + hyper.eps;
                let decayed = f64::from(*value) * (1.0 - lr * hyper.weight_decay);
                *value = (decayed - lr * f64::from(*m) / correction1 / root) as f32;
            }
            let data = TensorData::new(values, shape);
            Tensor::from_data(data, &device).require_grad()
        })
    }
}

/// Trains without ZeRO, on the whole batch. Returns the losses.
pub(crate) fn unsharded(layers: usize, steps: usize) -> Vec<f64> {
    unsharded_with_muon(layers, steps, |_| false)
}

/// As [`unsharded`], with Muon for the matrices whose paths `is_hidden` accepts.
pub(crate) fn unsharded_with_muon(
    layers: usize,
    steps: usize,
    is_hidden: fn(&str) -> bool,
) -> Vec<f64> {
    let mut model = Model::new(layers);
    let mut moments = HashMap::new();
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = model.loss(&Batch::whole(step));
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let mut adamw = AdamW {
            gradients: loss.backward(),
            moments: std::mem::take(&mut moments),
            step: step as i32 + 1,
            is_hidden,
            path: Vec::new(),
        };
        model = model.map(&mut adamw);
        moments = adamw.moments;
    }
    losses
}

/// A rank on a device that others share.
pub(crate) fn rank_on(comm: ThreadsComm, device: &HostDevice) -> Result<Rank<HostDevice>> {
    let pool = zero_alloc::Pool::new(device.clone(), usize::MAX);
    let kernels = zero_kernels::host::HostKernels::new(1)?;
    Rank::new(Arc::new(comm), pool, Arc::new(kernels))
}

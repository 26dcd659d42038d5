//! ZeRO for a framework, in one object: [`Zero`] owns the layout, the memory, the streams, the
//! buckets, the optimizer and their order; the framework computes, a unit (such as a layer) at a
//! time, and hands over gradients.
//!
//! ```text
//! Rank::on_host(communicator)           memory, streams and kernels of a rank
//! Zero::builder(rank).stage(..).unit(..).build(initial values)
//! step = zero.begin()?
//!     step.forward(unit, |params| ..)?               at stage 3 the unit is gathered for the call
//!     step.backward(unit, |params, grads| ..)?       the unit's last gradient starts its reduction
//!     step.end(loss)?                                statistics, update; at stages 1 and 2 a gather
//! zero.save(folder)?, zero.resume(folder)?           any number of ranks, any stage
//! ```
//!
//! A framework whose tape returns all gradients at once passes them to [`Step::grad`], at stages 0
//! to 2. One whose tensors can be views of foreign memory takes [`Zero::param`] or
//! [`Params::view`], so that no parameter is copied.
//!
//! | stage | parameters | a unit's gradient is reduced | after the update |
//! |---|---|---|---|
//! | 0 | whole | when it is complete in the last micro-batch | |
//! | 1 | whole | when it is complete in the last micro-batch | gather |
//! | 2 | whole | when it is complete | gather |
//! | 3 | shards; whole within `forward` and `backward` | when it is complete | |
//!
//! | misuse | result |
//! |---|---|
//! | a parameter without a gradient at the end of a micro-batch, or with two | an error that names it; see [`Step::unused`], [`Builder::add_gradients`] |
//! | a name or a length that does not exist | an error that names both; the step may go on |
//! | a name that means two parameters of a unit | an error of [`Builder::build`] |
//! | ranks with other parameters, groups, settings, formats of state, stages or initial values | an error of [`Builder::build`] on all ranks |
//! | a learning rate that is set on one rank, or losses with weights on one | an error at the end of the step, on all ranks |
//! | losses with and without weights in one step | an error; at [`Step::next_micro_batch`] the step may go on |
//! | a step that fails, is dropped, or panics | the other ranks get an error at once |
//! | units in another order than on other ranks | an error on all ranks that names rank and unit |
//! | ranks in different calls, such as `save` and `resume` | an error on all ranks that names both, or the collectives that met |
//! | a checkpoint that another rank does not have, or has otherwise | an error of [`Zero::resume`] on all ranks |
//! | a state that differs between ranks, or parameters that one rank changed | an error of [`Zero::save`] on all ranks; nothing is saved |
//! | tensors that keep parameters at stage 3 | an error that names the unit |
//!
//! After an error that ended a step, make a new `Zero` and resume.

mod build;
mod core;
mod error;
mod gradients;
mod rank;
mod rank_calls;
mod step;
mod values;
mod zero;

pub use build::Builder;
pub use error::FrameworkError;
pub use gradients::Grads;
pub use half::{bf16, f16};
pub use rank::Rank;
pub use step::{HeldUnit, Step};
pub use values::{ParamView, Params};
pub use zero::Zero;

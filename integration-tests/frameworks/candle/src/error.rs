//! Failures of the crates below, as errors of candle.

use std::error::Error;

use zero_optim::framework::FrameworkError;

/// A failure of the crates below, which becomes a candle error.
type Failure = Box<dyn Error + Send + Sync>;

pub(crate) fn candle_error(error: impl Into<Failure>) -> candle_core::Error {
    let error: Failure = error.into();
    if let Some(FrameworkError::Twice { name }) = error.downcast_ref().map(FrameworkError::cause) {
        return candle_core::Error::msg(format!(
            "{name} got a second gradient in one micro-batch: an earlier backward of the micro-batch \
             failed; after an error of TrainStep::backward the step cannot go on"
        ));
    }
    match error.downcast_ref() {
        Some(of_zero) if is_missing(of_zero) => candle_core::Error::msg(format!(
            "{error}. candle's backward ends at operations without one, such as candle_nn's fused \
             rms_norm, layer_norm, softmax_last_dim and rope: exclude these parameters by the \
             filter of ShardedVars::new, or use a model without these operations"
        )),
        _ => candle_core::Error::wrap(error),
    }
}

/// Whether parameters have no gradient.
fn is_missing(error: &FrameworkError) -> bool {
    matches!(error.cause(), FrameworkError::Missing { .. })
}

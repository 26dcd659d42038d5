//! What the steps of all stages share: batches, flags between ranks, recorded graphs.

pub(crate) mod batch_loader;
pub(crate) mod flags;
pub(crate) mod inputs;
pub(crate) mod quant_sums;
pub(crate) mod recorder;
pub(crate) mod replay;

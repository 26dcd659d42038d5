//! The ranks that share the sequences of a model on the host; see [`super::sequence`].

use std::sync::Arc;

use zero_alloc::host::HostDevice;
use zero_comm::Communicator;

use super::sequence_part::Exchanges;
use super::slices::{BlockSlices, ExchangeSlices};

/// The ranks that share the sequences of a model.
pub(super) struct SequenceGroup {
    pub(super) comm: Arc<dyn Communicator<HostDevice>>,
    pub(super) exchanges: Exchanges,
    pub(super) slices: ExchangeSlices,
}

impl SequenceGroup {
    pub(super) fn new(
        comm: &Arc<dyn Communicator<HostDevice>>,
        exchanges: Exchanges,
        slices: ExchangeSlices,
    ) -> Self {
        Self {
            comm: Arc::clone(comm),
            exchanges,
            slices,
        }
    }

    /// The block of pass `pass` in tokens, and in heads.
    pub(super) fn blocks(&self, block: BlockSlices, pass: usize) -> [BlockSlices; 2] {
        let elems = self.exchanges.qkv.tokens_elems();
        let layer = pass.saturating_sub(1).min(self.slices.attended.len() - 1);

        let mut in_tokens = block;
        in_tokens.qkv = self.slices.recv.slice(0..elems);
        let mut in_heads = block;
        in_heads.attended = self.slices.attended[layer];
        [in_tokens, in_heads]
    }
}

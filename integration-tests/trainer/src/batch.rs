//! One micro-batch of a rank.

/// The target of a token that is not trained: it adds neither to the loss nor to a gradient.
pub const IGNORED: u32 = u32::MAX;

/// The tokens of one micro-batch of a rank: B rows of T tokens.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Batch {
    /// Token ids `[B, T]`.
    pub inputs: Vec<u32>,
    /// The ids that follow them `[B, T]`, or [`IGNORED`].
    pub targets: Vec<u32>,
    /// For each token, the place in its row of the first token of its document `[B, T]`; empty if
    /// each row is one document.
    ///
    /// A token attends to no token before its document's first, which has position 0.
    pub starts: Vec<u32>,
    /// The loss is the sum over the trained tokens divided by this number: the trained tokens of
    /// the step on all ranks, divided by the number of its micro-batches on all ranks.
    ///
    /// The mean over ranks and micro-batches, which the trainer takes, is then the mean over the
    /// trained tokens of the step.
    pub divisor: f64,
    /// The rows among those of the run, for a model that draws random numbers for them, such as the
    /// masks of dropout. The trainer sets it; `None` in evaluations, which draw none.
    pub rows: Option<BatchRows>,
}

/// The rows of a batch among those of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRows {
    /// Seed of the run.
    pub seed: u64,
    /// Completed steps.
    pub step: u64,
    /// The first row's number among those of the step: all ranks' of the first micro-batch, then
    /// all ranks' of the second, and so on.
    pub first: u64,
}

impl Batch {
    /// Rows that are one document each, all of whose tokens are trained.
    pub fn plain(inputs: impl Into<Vec<u32>>, targets: impl Into<Vec<u32>>) -> Self {
        let inputs = inputs.into();
        Self {
            divisor: inputs.len() as f64,
            inputs,
            targets: targets.into(),
            starts: Vec::new(),
            rows: None,
        }
    }

    /// A plain batch of `tokens` tokens, all 0.
    pub fn zeros(tokens: usize) -> Self {
        Self::plain(vec![0; tokens], vec![0; tokens])
    }

    /// Trained tokens among the first `tokens`.
    pub fn trained(&self, tokens: usize) -> u64 {
        let targets = self.targets.iter().take(tokens);
        targets.filter(|&&target| target != IGNORED).count() as u64
    }
}

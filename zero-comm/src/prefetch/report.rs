//! The report of a step: counts of gathers, and the check of the order of use.

/// The result of comparing a step's uses with the expected order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OrderCheck {
    /// No order was expected; later steps expect this step's order.
    #[default]
    Recorded,
    /// The units were used in the expected order.
    Followed,
    /// They were not; from `position` on, units were gathered on demand.
    Changed {
        /// The first use out of order.
        position: usize,
        /// The unit expected; `None` past the last.
        expected: Option<usize>,
        /// The unit used; `None` if the step ended.
        got: Option<usize>,
    },
}

/// The counts of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefetchReport {
    /// Uses whose gather was enqueued ahead.
    pub prefetched: usize,
    /// Uses whose gather was enqueued at the use.
    pub on_demand: usize,
    /// Uses without a gather, because the unit was kept.
    pub kept: usize,
    /// Gathers that were dropped unused.
    pub wasted: usize,
    /// Peak of live elements.
    pub peak_live_elems: usize,
    /// The order of use.
    pub order: OrderCheck,
}

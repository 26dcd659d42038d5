//! What a step did: its counts, and how its uses compare with the expected order.

/// How a step's uses compare with the expected order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OrderCheck {
    /// There was no order yet; this step's is expected from now on.
    #[default]
    Recorded,
    /// The units were used in the expected order.
    Followed,
    /// They were not; from `position` on, units were gathered on demand.
    Changed {
        /// The first use out of order.
        position: usize,
        /// The unit expected; none after the last.
        expected: Option<usize>,
        /// The unit used; none if the step ended.
        got: Option<usize>,
    },
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchReport {
    /// Uses whose gather was under way before.
    pub prefetched: usize,
    /// Uses that were gathered when they were asked for.
    pub on_demand: usize,
    /// Uses that needed no gather, since the unit was kept.
    pub kept: usize,
    /// Gathers that were dropped unused.
    pub wasted: usize,
    /// The most elements that were live at a time.
    pub peak_live_elems: usize,
    /// The order of use.
    pub order: OrderCheck,
}

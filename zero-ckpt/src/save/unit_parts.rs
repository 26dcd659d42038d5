//! The state of a rank as parts of units, in the order of its file.

use std::ops::Range;

use zero_shard::Layout;

use crate::StateSpec;
use crate::format::encoding::{Encoding, spans};
use crate::format::runs::runs;

/// Contiguous elements of one unit of one state that are stored alike.
pub(super) struct UnitPart {
    /// Index of the state, in the order of the file.
    pub(super) state: usize,
    pub(super) unit: usize,
    pub(super) in_shard: Range<u64>,
    pub(super) encoding: Encoding,
}

impl UnitPart {
    pub(super) fn elems(&self) -> u64 {
        self.in_shard.end - self.in_shard.start
    }

    pub(super) fn bytes(&self) -> u64 {
        self.encoding.bytes(self.elems())
    }
}

/// The state of a rank in parts, in the order of the file.
pub(super) fn unit_parts(layout: &Layout, rank: u64, states: &[StateSpec]) -> Vec<UnitPart> {
    let mut parts = Vec::new();
    for (state, spec) in states.iter().enumerate() {
        for (unit, placed) in layout.units().iter().enumerate() {
            for run in runs(placed, rank) {
                let in_shard = |elem: u64| run.at + elem - run.elems.start;
                let spans = spans(spec.encoding, placed, run.elems.clone());
                parts.extend(spans.map(|span| UnitPart {
                    state,
                    unit,
                    in_shard: in_shard(span.elems.start)..in_shard(span.elems.end),
                    encoding: span.encoding,
                }));
            }
        }
    }
    parts
}

//! The copies of a packing: pure arithmetic on slices.

use zero_alloc::device::AnySlice;

use crate::Segments;

/// The destinations of a packing in order, each with its source; `None` is 0.
pub(super) fn copies(
    parts: &[(AnySlice, usize)],
    segments: Segments,
    dst: AnySlice,
) -> Vec<(Option<AnySlice>, AnySlice)> {
    let mut copies = Vec::new();
    for nth in 0..segments.count {
        let start = segments.start + nth * segments.stride;
        let at = nth * segments.len;
        let range = start..start + segments.len;
        let to = |from: usize, until: usize| dst.slice(at + from - start..at + until - start);
        let mut end = range.start;
        for &(part, at) in parts {
            let from = at.max(range.start);
            let until = at.saturating_add(part.len()).min(range.end);
            if from < until {
                if end < from {
                    copies.push((None, to(end, from)));
                }
                copies.push((Some(part.slice(from - at..until - at)), to(from, until)));
                end = until;
            }
        }
        if end < range.end {
            copies.push((None, to(end, range.end)));
        }
    }

    copies
}

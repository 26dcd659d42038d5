//! Examples in rows of `seq_len` tokens.
//!
//! An example of L tokens has L - 1 inputs, each with the next token as its target. It is a row of
//! its own, padded with tokens that are not trained, or shares a row with others. Packing is by
//! best fit in order of decreasing length, which depends on nothing but the lengths.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use zero_trainer::IGNORED;

use super::Examples;

/// Examples arranged in rows.
pub struct ExampleRows {
    examples: Arc<Examples>,
    seq_len: usize,
    packed: bool,
    /// The examples of all rows, row by row.
    members: Vec<u32>,
    /// For each row the end of its examples in `members`.
    ends: Vec<u32>,
    /// For each row its trained targets.
    trained: Vec<u32>,
    /// Examples that are longer than a row, and end with it.
    pub truncated: u64,
    /// Examples of which no row has a trained target.
    pub untrained: u64,
    /// Inputs that are no padding.
    filled: u64,
}

impl ExampleRows {
    /// Arranges the examples in rows of `seq_len` tokens.
    pub(crate) fn new(examples: Arc<Examples>, seq_len: usize, packed: bool) -> Self {
        let mut rows = Self {
            seq_len,
            packed,
            members: Vec::new(),
            ends: Vec::new(),
            trained: Vec::new(),
            truncated: 0,
            untrained: 0,
            filled: 0,
            examples,
        };

        let mut kept = Vec::new();
        for index in 0..rows.examples.count() {
            let example = rows.examples.get(index);
            let inputs = example.token_count().saturating_sub(1);
            let cut = inputs.min(seq_len);
            if !example.has_trained(cut) {
                rows.untrained += 1;
                continue;
            }
            rows.truncated += u64::from(cut < inputs);
            rows.filled += cut as u64;
            kept.push((index as u32, cut));
        }

        let groups = if packed {
            pack(&kept, seq_len)
        } else {
            kept.iter().map(|&(index, _)| vec![index]).collect()
        };
        for group in groups {
            rows.push(&group);
        }
        rows
    }

    fn push(&mut self, group: &[u32]) {
        let mut trained = 0;
        for &index in group {
            let example = self.examples.get(index as usize);
            let inputs = example.token_count().saturating_sub(1).min(self.seq_len);
            trained += example.trained(inputs);
        }
        self.members.extend_from_slice(group);
        self.ends.push(self.members.len() as u32);
        self.trained.push(trained);
    }

    /// The number of rows.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// The trained targets of a row.
    pub(crate) fn trained(&self, row: usize) -> u32 {
        self.trained[row]
    }

    /// The trained targets of all rows.
    pub fn all_trained(&self) -> u64 {
        self.trained.iter().map(|&n| u64::from(n)).sum()
    }

    /// Tokens of a row.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Whether several examples share a row.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    /// The share of the inputs that is padding.
    pub fn padding(&self) -> f64 {
        let inputs = self.count() as f64 * self.seq_len as f64;
        1.0 - self.filled as f64 / inputs
    }

    /// The examples of all rows.
    pub fn examples(&self) -> &Examples {
        &self.examples
    }

    /// The examples of a row, by index.
    pub fn members(&self, row: usize) -> &[u32] {
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.members[start as usize..self.ends[row] as usize]
    }

    /// Writes a row: inputs, targets, and for each token the first of its document if `starts` is
    /// not empty.
    pub(crate) fn fill(
        &self,
        row: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) {
        let mut at = 0;
        for &index in self.members(row) {
            let example = self.examples.get(index as usize);
            let len = example.token_count().saturating_sub(1).min(self.seq_len);
            for i in 0..len {
                inputs[at + i] = example.token(i);
                targets[at + i] = example.target(i + 1);
                if let Some(start) = starts.get_mut(at + i) {
                    *start = at as u32;
                }
            }
            at += len;
        }
        pad(at, inputs, targets, starts);
    }
}

/// Fills a row from its token `at` on with tokens that are not trained, each a document of its own.
pub(super) fn pad(at: usize, inputs: &mut [u32], targets: &mut [u32], starts: &mut [u32]) {
    inputs[at..].fill(0);
    targets[at..].fill(IGNORED);
    for (i, start) in starts.iter_mut().enumerate().skip(at) {
        *start = i as u32;
    }
}

/// Groups of examples (index, inputs) that fit rows of `seq_len` inputs: each example goes to the
/// row with the least room that is enough, the longest example first.
fn pack(examples: &[(u32, usize)], seq_len: usize) -> Vec<Vec<u32>> {
    let mut order = examples.to_vec();
    order.sort_by_key(|&(index, inputs)| (Reverse(inputs), index));

    let mut rows: Vec<Vec<u32>> = Vec::new();
    // Rows by the inputs that they have left.
    let mut with_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, inputs) in order {
        let best = with_room.range(inputs..).next().map(|(&room, _)| room);
        let (row, room) = match best.and_then(|room| Some((take(&mut with_room, room)?, room))) {
            Some(found) => found,
            None => {
                rows.push(Vec::new());
                (rows.len() - 1, seq_len)
            }
        };
        rows[row].push(index);
        if room > inputs {
            with_room.entry(room - inputs).or_default().push(row);
        }
    }

    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows
}

/// Takes a row with exactly `room` inputs left.
fn take(with_room: &mut BTreeMap<usize, Vec<usize>>, room: usize) -> Option<usize> {
    let rows = with_room.get_mut(&room)?;
    let row = rows.pop();
    if rows.is_empty() {
        with_room.remove(&room);
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn best_fit_fills_rows() {
        let lengths = [(0, 3), (1, 7), (2, 5), (3, 2), (4, 1)];
        assert_eq!(pack(&lengths, 8), [vec![1, 4], vec![0, 2], vec![3]]);
    }

    proptest! {
        #[test]
        fn packing_loses_nothing(
            lengths in prop::collection::vec(1usize..40, 0..80), seq_len in 40usize..64,
        ) {
            let examples: Vec<(u32, usize)> = (0..).zip(lengths.iter().copied()).collect();
            let rows = pack(&examples, seq_len);
            let mut all: Vec<u32> = rows.concat();
            for row in &rows {
                let inputs: usize = row.iter().map(|&i| lengths[i as usize]).sum();
                prop_assert!(inputs <= seq_len && inputs > 0);
            }
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len() as u32).collect::<Vec<_>>());
            // No two rows fit one: the bound of any fit.
            let used: usize = lengths.iter().sum();
            prop_assert!(rows.len() <= 1 + 2 * used / seq_len);
        }
    }
}

//! The rows of all settings.

use super::row::Row;
use super::{
    activations, batch, communication, epochs, mesh, offload, optimizer, record, resolve, samples,
    saving, validation,
};

/// The rows by topic, in the order in which ranks compare them: a setting that others are derived
/// from comes before them.
const TOPICS: &[&[Row]] = &[
    resolve::ROWS,
    mesh::ROWS,
    batch::ROWS,
    activations::ROWS,
    offload::ROWS,
    validation::SPLIT,
    epochs::ROWS,
    record::DATA,
    validation::ROWS,
    optimizer::ROWS,
    communication::ROWS,
    saving::ROWS,
    samples::ROWS,
    record::IDENTITY,
];

/// All rows.
pub(crate) fn rows() -> impl Iterator<Item = &'static Row> {
    TOPICS.iter().copied().flatten()
}

/// The row of exactly this name in `run.json`.
pub(crate) fn named(record: &str) -> Option<&'static Row> {
    rows().find(|row| row.record == record)
}

/// The place in the order, and the row of the longest name that covers `name`.
pub(crate) fn covering(name: &str) -> Option<(usize, &'static Row)> {
    let mut longest: Option<(usize, &Row)> = None;
    for (place, row) in rows().enumerate() {
        let rest = name.strip_prefix(row.record);
        let covers = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let is_longer = longest.is_none_or(|(_, other)| row.record.len() > other.record.len());
        if covers && is_longer {
            longest = Some((place, row));
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct() {
        let mut names: Vec<&str> = rows().map(|row| row.record).collect();
        names.sort_unstable();
        assert!(names.is_sorted_by(|one, next| one < next), "{names:?}");
    }
}

//! Lookup of parameters by name: a sorted list of hashes, without a copy of the names.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::{ParamId, ShardError, UnitLayout};

/// An index of names, by ascending hash. Construction sorts integers; a lookup is a binary search
/// and a comparison with each name of equal hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameIndex {
    entries: Vec<(u64, NameRef)>,
}

/// The owner of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameRef {
    /// The name of a parameter.
    Param(ParamId),
    /// The name of a tie, by its position.
    Tie(usize),
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

impl NameIndex {
    /// Indexes all names; `name_of` returns the name of an entry.
    pub(crate) fn new<'a>(
        units: &'a [UnitLayout],
        ties: impl Iterator<Item = &'a str>,
        name_of: impl Fn(NameRef) -> &'a str,
    ) -> Result<Self, ShardError> {
        let mut entries = Vec::with_capacity(units.iter().map(|u| u.params.len()).sum());
        for (unit, placed) in units.iter().enumerate() {
            let params = placed.params.iter().enumerate();
            entries.extend(
                params.map(|(param, p)| (hash(&p.name), NameRef::Param(ParamId { unit, param }))),
            );
        }

        entries.extend(
            ties.enumerate()
                .map(|(i, name)| (hash(name), NameRef::Tie(i))),
        );
        entries.sort_unstable_by_key(|e| e.0);
        // Equal names have equal hashes, so they are in one run.
        for run in entries
            .chunk_by(|a, b| a.0 == b.0)
            .filter(|run| run.len() > 1)
        {
            let mut names: Vec<&str> = run.iter().map(|e| name_of(e.1)).collect();
            names.sort_unstable();
            if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(ShardError::DuplicateName {
                    name: pair[0].into(),
                });
            }
        }

        Ok(Self { entries })
    }

    /// Returns the owner of `name`; `name_of` returns the name of an entry.
    pub(crate) fn find<'a>(
        &self,
        name: &str,
        name_of: impl Fn(NameRef) -> &'a str,
    ) -> Option<NameRef> {
        let wanted = hash(name);
        let first = self.entries.partition_point(|e| e.0 < wanted);
        let same = self.entries[first..].iter().take_while(|e| e.0 == wanted);
        same.map(|e| e.1).find(|&r| name_of(r) == name)
    }
}

//! Small parameters that stay whole on every rank at stage 3.
//!
//! Gathering a layer-norm weight for each use would cost latency and save little memory. Instead,
//! parameters up to a threshold form one persistent unit, which is gathered once per step, after
//! the optimizer, and kept. It is sharded, optimized and checkpointed like any other unit.

use crate::{ShardError, UnitSpec};

/// Units, of which one may be persistent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PersistentSplit {
    /// The input units without their persistent parameters, in order, followed by the persistent
    /// unit if there is one.
    pub units: Vec<UnitSpec>,
    /// Position of the persistent unit.
    pub persistent: Option<usize>,
    /// Its elements.
    pub persistent_elems: u64,
}

/// Moves the parameters of 1 to `threshold_elems` elements into a unit `name`, in order, as long as
/// their sum is at most `max_total_elems`. A threshold of 0 moves no parameter.
///
/// # Errors
/// The size of a parameter does not fit 64 bits, or a unit already has the name `name`.
pub fn split_persistent(
    units: &[UnitSpec],
    name: &str,
    threshold_elems: u64,
    max_total_elems: u64,
) -> Result<PersistentSplit, ShardError> {
    if units.iter().any(|u| u.name == name) {
        return Err(ShardError::DuplicateName { name: name.into() });
    }
    let mut rest = Vec::with_capacity(units.len() + 1);
    let mut kept = Vec::new();
    let mut total = 0u64;
    for unit in units {
        let mut left = Vec::with_capacity(unit.params.len());
        for param in &unit.params {
            let n = param.numel_elems()?;
            let sum = total.checked_add(n).filter(|&sum| sum <= max_total_elems);
            match sum.filter(|_| (1..=threshold_elems).contains(&n)) {
                Some(sum) => {
                    total = sum;
                    kept.push(param.clone());
                }
                None => left.push(param.clone()),
            }
        }
        rest.push(UnitSpec::new(unit.name.clone(), left));
    }
    let persistent = (!kept.is_empty()).then_some(rest.len());
    if persistent.is_some() {
        rest.push(UnitSpec::new(name, kept));
    }
    Ok(PersistentSplit {
        units: rest,
        persistent,
        persistent_elems: total,
    })
}

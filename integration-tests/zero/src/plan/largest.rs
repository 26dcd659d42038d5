//! The largest model and the longest sequence that fit.

use zero_shard::{TransformerShape, ZeroStage};

use super::request::PlanRequest;
use super::stage::fits;

/// Returns the most parameters of a transformer of typical shape that fits at `stage`, with the
/// buckets and gathered units that a run of that model has; 0 if none fits, and `None` if the
/// memory of a GPU is unknown, or GPUs have parts of the parameters. 1.1 times as many do not fit.
///
/// With more layers, a layer has a smaller part of the parameters, so memory does not always rise
/// with their number. But it does rise among models of equal shape, and from the smallest model of
/// one shape to that of the next.
pub(crate) fn largest_model_params(request: &PlanRequest, stage: ZeroStage) -> Option<u64> {
    // A model of assumed shape has no adapters, and no matrices.
    if request.run.adapters.is_some() || request.run.names_muon() {
        return None;
    }
    request.machine.gpu_memory_bytes?;
    // A model of typical shape has no parameters that are cut.
    if request.tensor_ranks() > 1 {
        return None;
    }
    // A size that overflows 64 bits does not fit.
    let fits = |params: u64| {
        params <= MAX_PARAMS && fits(&request.with_about(params), stage).unwrap_or(false)
    };

    let layers = galloping(|layers| fits(least_params(layers)));
    let mut params = match layers {
        0 => 0,
        layers => {
            let least = least_params(layers);
            // The models of this number of layers.
            let more = least_params(layers + 1) - least;
            least + bisect(0, more, least / PRECISION, |more| fits(least + more))
        }
    };

    // The limits of a configuration are not proportional to the model.
    while fits(a_tenth_more(params)) {
        params = a_tenth_more(params);
    }
    Some(params)
}

/// Returns the tokens of the longest sequence of the requested model that fits at `stage`, up to the
/// model's positions; 0 if none fits, and `None` if the memory of a GPU is unknown, or the model's
/// shape is assumed, so that it has no positions. Ranks that share a sequence divide it.
pub(crate) fn longest_seq_len(request: &PlanRequest, stage: ZeroStage) -> Option<u64> {
    request.machine.gpu_memory_bytes?;
    let most = request.model.config.as_ref()?.max_positions() as u64;
    let share = request.run.mesh.sequence_ranks() as u64;
    let tokens = galloping(|parts| {
        let tokens = parts.saturating_mul(share);
        tokens <= most && fits(&request.with_seq_len(tokens), stage).unwrap_or(false)
    });
    Some(tokens * share)
}

/// Among models of equal shape the result is exact to this part of it, so that a search of large
/// models ends soon.
const PRECISION: u64 = 1_000_000;

/// As many as `--params` accepts.
const MAX_PARAMS: u64 = 1_000_000_000_000_000_000;

fn a_tenth_more(params: u64) -> u64 {
    params.saturating_add((params / 10).max(1))
}

/// The fewest parameters whose typical shape has `layers` layers.
fn least_params(layers: u64) -> u64 {
    let fewer = zero_shard::largest(|params| TransformerShape::with_about(params).layers < layers);
    // No number of parameters has fewer than one layer.
    if layers <= 1 { 1 } else { fewer + 1 }
}

/// The greatest n for which the monotone predicate `holds` is true, or 0. It is called with numbers
/// of at most twice that, since a predicate may cost as much as its number.
fn galloping(mut holds: impl FnMut(u64) -> bool) -> u64 {
    let mut low = 0;
    let mut high = 1;
    while holds(high) {
        low = high;
        match high.checked_mul(2) {
            Some(next) => high = next,
            None => return low,
        }
    }
    bisect(low, high, 1, holds)
}

/// A number of `low..high` for which the monotone predicate `holds` is true, at most `precision`
/// below the greatest one, and the greatest one itself if `precision` is 0 or 1. The predicate is
/// true for `low`, and not called with `low` or `high`.
fn bisect(mut low: u64, mut high: u64, precision: u64, mut holds: impl FnMut(u64) -> bool) -> u64 {
    while high - low > precision.max(1) {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn galloping_finds_every_limit() {
        for limit in (0..100).chain([u64::MAX / 3, 1 << 40]) {
            assert_eq!(galloping(|n| n <= limit), limit);
        }
    }

    #[test]
    fn least_params_are_the_first_of_their_shape() {
        for layers in 2..40 {
            let least = least_params(layers);
            assert_eq!(TransformerShape::with_about(least).layers, layers);
            assert_eq!(TransformerShape::with_about(least - 1).layers, layers - 1);
        }
    }
}

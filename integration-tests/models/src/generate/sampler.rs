//! The choice of the next token, by the rules of transformers: temperature, then `top_k`, then
//! `top_p`.

use crate::random::Counter;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 chooses the most likely token.
    pub temperature: f32,
    /// Only so many of the most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together have at least this probability; 1 for all.
    pub top_p: f32,
    /// The token at each position is a function of this and of the logits.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token; of equal ones, the first.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        seed: 0,
    };

    /// Chooses the token at `position`; `None` if a logit is NaN or none is finite.
    pub fn choose(&self, logits: &[f32], position: u64) -> Option<u32> {
        let mut greatest = 0;
        for (token, &logit) in logits.iter().enumerate() {
            if logit.is_nan() {
                return None;
            }
            if logit > logits[greatest] {
                greatest = token;
            }
        }
        if !logits.get(greatest)?.is_finite() {
            return None;
        }
        if self.temperature == 0.0 {
            return Some(greatest as u32);
        }

        let kept = self.kept(logits, logits[greatest]);
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        // 53 of 64 bits, so that the number is below 1.
        let [high, low, ..] = Counter::new(self.seed, "generation").four(0, position);
        let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
        let mut left = bits as f64 / (1u64 << 53) as f64 * total;
        for (token, weight) in &kept {
            left -= weight;
            if left < 0.0 {
                return Some(*token);
            }
        }
        kept.last().map(|(token, _)| *token)
    }

    /// The tokens that can be chosen, the most likely first, with weights in proportion to their
    /// probabilities.
    fn kept(&self, logits: &[f32], greatest: f32) -> Vec<(u32, f64)> {
        let temperature = f64::from(self.temperature);
        let weight = |&logit: &f32| (f64::from(logit - greatest) / temperature).exp();
        let mut all: Vec<_> = (0..).zip(logits.iter().map(weight)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        if self.top_k > 0 {
            all.truncate(self.top_k);
        }

        let total: f64 = all.iter().map(|(_, weight)| weight).sum();
        let mut before = 0.0;
        let enough = all.iter().position(|(_, weight)| {
            let is_enough = before >= f64::from(self.top_p) * total;
            before += weight;
            is_enough
        });
        all.truncate(enough.unwrap_or(all.len()).max(1));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 3.0, -1.0];

    fn counts(sampling: Sampling) -> [u32; 5] {
        let mut counts = [0; 5];
        for position in 0..10_000 {
            counts[sampling.choose(&LOGITS, position).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_the_most_likely() {
        assert_eq!(Sampling::GREEDY.choose(&LOGITS, 5), Some(1));
        assert_eq!(Sampling::GREEDY.choose(&[f32::NAN, 1.0], 0), None);
        assert_eq!(Sampling::GREEDY.choose(&[f32::NEG_INFINITY; 2], 0), None);
        assert_eq!(Sampling::GREEDY.choose(&[], 0), None);
    }

    #[test]
    fn frequencies_are_those_of_the_softmax() {
        for temperature in [0.5, 1.0, 2.0] {
            let sampling = Sampling {
                temperature,
                seed: 3,
                ..Sampling::GREEDY
            };
            let weights = LOGITS.map(|l| (f64::from(l) / f64::from(temperature)).exp());
            let total: f64 = weights.iter().sum();
            for (count, weight) in counts(sampling).into_iter().zip(weights) {
                let p = weight / total;
                let expected = 10_000.0 * p;
                // Five standard deviations of a binomial.
                let bound = 5.0 * (expected * (1.0 - p)).sqrt() + 1.0;
                assert!(
                    (f64::from(count) - expected).abs() < bound,
                    "{count} for {expected}"
                );
            }
        }
    }

    #[test]
    fn only_the_most_likely_are_kept() {
        let all = Sampling {
            temperature: 1.0,
            ..Sampling::GREEDY
        };
        // Probabilities: 0.06, 0.40, 0.15, 0.40, 0.01.
        assert_eq!(counts(Sampling { top_k: 1, ..all })[1], 10_000);
        let of_two = counts(Sampling { top_k: 2, ..all });
        assert_eq!(of_two[1] + of_two[3], 10_000);
        let likely = counts(Sampling { top_p: 0.7, ..all });
        assert_eq!(likely[1] + likely[3], 10_000);
        let three = counts(Sampling { top_p: 0.9, ..all });
        assert!(three[2] > 0 && three[0] == 0, "{three:?}");
        assert_eq!(counts(Sampling { top_p: 0.0, ..all })[1], 10_000);
    }
}

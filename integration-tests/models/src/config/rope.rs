//! The angles of the rotary embedding, by transformers' rules for each `rope_type`.

use crate::config::{ConfigError, check_positive};

/// The rotary embedding of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// How long contexts change the frequencies.
    pub scaling: Scaling,
}

/// How frequencies are changed, by `rope_type`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// `default`: not at all.
    Default,
    /// `linear`: all are divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// `dynamic`: not at all in sequences of up to `max_position_embeddings` tokens, and no longer
    /// ones are computed.
    Dynamic {
        /// How much longer sequences would change the base.
        factor: f64,
    },
    /// `llama3`: low frequencies are divided by the factor, high ones are kept.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Below this number of turns in the original context, a frequency is low.
        low_freq_factor: f64,
        /// Above this number, it is high.
        high_freq_factor: f64,
        /// Positions of the original context.
        original_positions: usize,
    },
    /// `yarn`.
    Yarn(Yarn),
}

/// YaRN (arXiv 2309.00071): low frequencies are divided by the factor, high ones are kept, with a
/// ramp between them; and queries and keys are scaled. `None`: the key is absent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// The divisor.
    pub factor: f64,
    /// Positions of the original context.
    pub original_positions: usize,
    /// The factor of queries and keys; by default a function of `factor` and the two scales.
    pub attention_factor: Option<f64>,
    /// Above this number of turns in the original context, a frequency is high.
    pub beta_fast: Option<f64>,
    /// Below this number, it is low.
    pub beta_slow: Option<f64>,
    /// The scale above the fraction line of the default attention factor.
    pub mscale: Option<f64>,
    /// The scale below it.
    pub mscale_all_dim: Option<f64>,
    /// Whether the ramp begins and ends at whole frequencies.
    pub truncate: bool,
}

impl Rope {
    /// Without scaling.
    pub fn new(theta: f64) -> Self {
        Self {
            theta,
            scaling: Scaling::Default,
        }
    }

    /// With Llama 3's scaling.
    #[must_use]
    pub fn llama3(
        self,
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_positions: usize,
    ) -> Self {
        let scaling = Scaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_positions,
        };
        Self { scaling, ..self }
    }

    /// Checks the numbers for heads of `d` elements.
    pub(crate) fn validate(&self, d: usize) -> Result<(), ConfigError> {
        check_positive("rope_theta", self.theta as f32)?;
        match self.scaling {
            Scaling::Default => Ok(()),
            Scaling::Linear { factor } => check_positive("rope factor", factor as f32),
            Scaling::Dynamic { factor } => {
                check_positive("rope factor", factor as f32)?;
                // The exponent of the base is d / (d - 2).
                check_positive("head_dim - 2, for rope_type \"dynamic\",", d as f32 - 2.0)
            }
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            } => {
                check_positive("rope factor", factor as f32)?;
                check_positive("rope low_freq_factor", low_freq_factor as f32)?;
                let above = high_freq_factor - low_freq_factor;
                check_positive("rope high_freq_factor - low_freq_factor", above as f32)?;
                check_original(original_positions)
            }
            Scaling::Yarn(yarn) => {
                check_positive("rope factor", yarn.factor as f32)?;
                check_positive("rope beta_fast", yarn.beta_fast() as f32)?;
                check_positive("rope beta_slow", yarn.beta_slow() as f32)?;
                check_positive("rope attention_factor", yarn.attention_scaling() as f32)?;
                // The ramp divides by its logarithm.
                check_positive("rope_theta - 1", (self.theta - 1.0) as f32)?;
                check_original(yarn.original_positions)
            }
        }
    }

    /// The longest context of a model with `max_position_embeddings`.
    ///
    /// Why: the cards of Qwen's models add YaRN for contexts beyond `max_position_embeddings`,
    /// which stays what it was. transformers computes any length.
    pub(crate) fn positions(&self, max_position_embeddings: usize) -> usize {
        match self.scaling {
            Scaling::Yarn(yarn) => {
                let extended = yarn.factor * yarn.original_positions as f64;
                let extended = extended.min(f64::from(i32::MAX)) as usize;
                max_position_embeddings.max(extended)
            }
            _ => max_position_embeddings,
        }
    }

    /// Why no longer sequence is computed.
    pub(crate) fn positions_limit(&self) -> Option<&'static str> {
        match self.scaling {
            Scaling::Dynamic { .. } => Some(
                "the frequencies of its rope_type \"dynamic\" change with the length of longer sequences, which is not \
                 supported",
            ),
            _ => None,
        }
    }

    /// The factor of cosines and sines.
    pub(crate) fn attention_scaling(&self) -> f32 {
        match self.scaling {
            Scaling::Yarn(yarn) => yarn.attention_scaling() as f32,
            _ => 1.0,
        }
    }

    /// The frequency of each pair of a head, in fp32 as in transformers.
    pub(crate) fn frequencies(&self, d: usize) -> Vec<f32> {
        let base = f64::from(self.base(d) as f32);
        let wavelengths: Vec<f32> = (0..d / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / d as f32;
                base.powf(f64::from(exponent)) as f32
            })
            .collect();
        match self.scaling {
            Scaling::Yarn(yarn) => yarn.frequencies(&wavelengths, self.theta, d),
            _ => wavelengths
                .iter()
                .map(|wavelength| self.scaled(1.0 / wavelength))
                .collect(),
        }
    }

    /// The base of the frequencies in sequences of at most `max_position_embeddings` tokens.
    fn base(&self, d: usize) -> f64 {
        match self.scaling {
            // 1 but for rounding, which transformers has, too.
            Scaling::Dynamic { factor } => {
                let grown = factor - (factor - 1.0);
                self.theta * grown.powf(d as f64 / (d as f64 - 2.0))
            }
            _ => self.theta,
        }
    }

    fn scaled(&self, frequency: f32) -> f32 {
        match self.scaling {
            Scaling::Default | Scaling::Dynamic { .. } | Scaling::Yarn(_) => frequency,
            Scaling::Linear { factor } => frequency / factor as f32,
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            } => {
                let turns =
                    original_positions as f64 * f64::from(frequency) / std::f64::consts::TAU;
                let divided = frequency / factor as f32;
                if turns < low_freq_factor {
                    divided
                } else if turns > high_freq_factor {
                    frequency
                } else {
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - kept as f32) * divided + kept as f32 * frequency
                }
            }
        }
    }

    /// Writes the table `[seq, d]` of [`crate::ops::rope`].
    ///
    /// Cosines and sines have the attention factor, so that queries and keys are scaled where they
    /// are rotated, and their gradients where they are rotated back.
    pub(crate) fn fill(&self, table: &mut [f32], d: usize) {
        let frequencies = self.frequencies(d);
        let scaling = self.attention_scaling();
        for (position, row) in table.chunks_exact_mut(d).enumerate() {
            let (cos, sin) = row.split_at_mut(d / 2);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
                // The product is rounded as in transformers; its cosine is exact.
                let angle = f64::from(position as f32 * frequency);
                *cos = angle.cos() as f32 * scaling;
                *sin = angle.sin() as f32 * scaling;
            }
        }
    }
}

impl Yarn {
    /// transformers counts 0 as absent.
    fn beta_fast(&self) -> f64 {
        self.beta_fast.filter(|beta| *beta != 0.0).unwrap_or(32.0)
    }

    fn beta_slow(&self) -> f64 {
        self.beta_slow.filter(|beta| *beta != 0.0).unwrap_or(1.0)
    }

    /// The factor of queries and keys.
    fn attention_scaling(&self) -> f64 {
        let of_scale = |scale: f64| match self.factor <= 1.0 {
            true => 1.0,
            false => 0.1 * scale * self.factor.ln() + 1.0,
        };
        let is_set = |scale: &f64| *scale != 0.0;
        let scales = self
            .mscale
            .filter(is_set)
            .zip(self.mscale_all_dim.filter(is_set));
        match (self.attention_factor, scales) {
            (Some(factor), _) => factor,
            (None, Some((above, below))) => of_scale(above) / of_scale(below),
            (None, None) => of_scale(1.0),
        }
    }

    /// The frequencies of heads of `d` elements, of the wavelengths (over 2π) without scaling.
    fn frequencies(&self, wavelengths: &[f32], theta: f64, d: usize) -> Vec<f32> {
        let [first, last] = self.ramp(theta, d);
        let factor = self.factor as f32;
        let share = |(i, wavelength): (usize, &f32)| {
            let ramp = (i as f32 - first as f32) / (last - first) as f32;
            let kept = 1.0 - ramp.clamp(0.0, 1.0);
            let divided = 1.0 / (factor * wavelength);
            divided * (1.0 - kept) + 1.0 / wavelength * kept
        };
        wavelengths.iter().enumerate().map(share).collect()
    }

    /// The frequencies, by their number, where the ramp begins and ends.
    fn ramp(&self, theta: f64, d: usize) -> [f64; 2] {
        let turned = |turns: f64| {
            let positions = self.original_positions as f64;
            d as f64 * (positions / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
        };
        let first = turned(self.beta_fast());
        let last = turned(self.beta_slow());
        let [first, last] = match self.truncate {
            true => [first.floor(), last.ceil()],
            false => [first, last],
        };
        let first = first.max(0.0);
        let last = last.min(d as f64 - 1.0);
        match first == last {
            true => [first, last + 0.001],
            false => [first, last],
        }
    }
}

fn check_original(positions: usize) -> Result<(), ConfigError> {
    match positions {
        0 => Err(ConfigError::Zero("original_max_position_embeddings")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_the_attention_factor() {
        let yarn = Yarn {
            factor: 4.0,
            original_positions: 16,
            attention_factor: Some(0.5),
            beta_fast: None,
            beta_slow: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        };
        let rope = Rope {
            theta: 100.0,
            scaling: Scaling::Yarn(yarn),
        };
        let mut table = [9.0; 3 * 4];
        rope.fill(&mut table, 4);
        let frequencies = rope.frequencies(4);
        assert_ne!(frequencies, Rope::new(100.0).frequencies(4));
        for (position, row) in table.chunks_exact(4).enumerate() {
            let angles = [0, 1].map(|i| position as f32 * frequencies[i]);
            let expected = [
                angles[0].cos(),
                angles[1].cos(),
                angles[0].sin(),
                angles[1].sin(),
            ];
            for (got, expected) in row.iter().zip(expected) {
                assert!((got - 0.5 * expected).abs() < 1e-6, "{got}, {expected}");
            }
        }
    }
}

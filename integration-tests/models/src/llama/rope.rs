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

    /// Checks the numbers.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        check_positive("rope_theta", self.theta as f32)?;
        match self.scaling {
            Scaling::Default => Ok(()),
            Scaling::Linear { factor } => check_positive("rope factor", factor as f32),
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
                match original_positions {
                    0 => Err(ConfigError::Zero("original_max_position_embeddings")),
                    _ => Ok(()),
                }
            }
        }
    }

    /// The frequency of each pair of a head, in fp32 as in transformers.
    fn frequencies(&self, d: usize) -> Vec<f32> {
        let plain = (0..d / 2).map(|i| {
            let exponent = (2 * i) as f32 / d as f32;
            1.0 / self.theta.powf(f64::from(exponent)) as f32
        });
        plain.map(|frequency| self.scaled(frequency)).collect()
    }

    fn scaled(&self, frequency: f32) -> f32 {
        match self.scaling {
            Scaling::Default => frequency,
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
    pub(crate) fn fill(&self, table: &mut [f32], d: usize) {
        let frequencies = self.frequencies(d);
        for (position, row) in table.chunks_exact_mut(d).enumerate() {
            let (cos, sin) = row.split_at_mut(d / 2);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
                // The product is rounded as in transformers; its cosine is exact.
                let angle = f64::from(position as f32 * frequency);
                *cos = angle.cos() as f32;
                *sin = angle.sin() as f32;
            }
        }
    }
}

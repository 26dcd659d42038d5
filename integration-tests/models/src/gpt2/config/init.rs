//! Initial parameters by GPT-2's rules: a pure function of (seed, parameter, element).
//!
//! Weights are normal with standard deviation `initializer_range`; the two projections that end in
//! the residual stream (`attn.c_proj`, `mlp.c_proj`) are smaller by `sqrt(2 * n_layer)`, so that
//! the variance of the stream does not grow with depth (Radford et al. 2019, section 2.3). Biases
//! are 0, gains 1.

use std::ops::Range;

use rayon::prelude::*;

use super::{ConfigError, GptConfig};
use crate::random::Counter;

/// Elements per task; a multiple of 4, because one counter generates four numbers.
const CHUNK: usize = 1 << 16;

impl GptConfig {
    /// Writes the initial values of elements `range` of parameter `name` to `out`.
    ///
    /// An element's value depends only on `seed`, `name` and its index, so a rank can generate any
    /// part without the rest. It is the same on all machines whose maths libraries have the same
    /// `ln`, `sin` and `cos`.
    ///
    /// # Errors
    /// An unknown parameter, or a range that is outside the parameter or does not have the length
    /// of `out`.
    pub fn fill_initial(
        &self,
        seed: u64,
        name: &str,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), ConfigError> {
        let param = self
            .param(name)
            .ok_or_else(|| ConfigError::UnknownParameter(name.to_owned()))?;
        let numel: u64 = param.shape.iter().product();
        if range.start > range.end
            || range.end > numel
            || range.end - range.start != out.len() as u64
        {
            let start = range.start;
            let end = range.end;
            let len = out.len();
            return Err(ConfigError::BadRange {
                name: name.to_owned(),
                start,
                end,
                numel,
                len,
            });
        }

        match self.rule(name) {
            Rule::Constant(value) => out.fill(value),
            Rule::Normal(std) => {
                let counter = Counter::new(seed, name);
                out.par_chunks_mut(CHUNK)
                    .enumerate()
                    .for_each(|(i, chunk)| {
                        fill_normal(&counter, range.start + (i * CHUNK) as u64, std, chunk);
                    });
            }
        }

        Ok(())
    }

    fn rule(&self, name: &str) -> Rule {
        if name.ends_with(".bias") {
            Rule::Constant(0.0)
        } else if name.contains(".ln_") {
            Rule::Constant(1.0)
        } else if name.ends_with(".c_proj.weight") {
            Rule::Normal(self.initializer_range / (2.0 * self.n_layer as f32).sqrt())
        } else {
            Rule::Normal(self.initializer_range)
        }
    }
}

enum Rule {
    Constant(f32),
    Normal(f32),
}

/// Fills `out` with the elements of the normal sequence of `counter` from `start` on, times `std`.
fn fill_normal(counter: &Counter, start: u64, std: f32, out: &mut [f32]) {
    let mut group = start / 4;
    let mut skip = (start % 4) as usize;
    let mut rest = out;
    while !rest.is_empty() {
        let four = &counter.four_normals(group)[skip..];
        let (now, later) = rest.split_at_mut(four.len().min(rest.len()));
        for (o, n) in now.iter_mut().zip(four) {
            *o = n * std;
        }
        (rest, group, skip) = (later, group + 1, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole(config: &GptConfig, seed: u64, name: &str) -> Vec<f32> {
        let numel: u64 = config.param(name).unwrap().shape.iter().product();
        let mut out = vec![f32::NAN; numel as usize];
        config.fill_initial(seed, name, 0..numel, &mut out).unwrap();
        out
    }

    fn std_of(values: &[f32]) -> f32 {
        let sum: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        (sum / values.len() as f64).sqrt() as f32
    }

    #[test]
    fn every_parameter_has_the_deviation_that_gpt2_gives_it() {
        let config = GptConfig {
            n_layer: 2,
            tied_head: false,
            ..GptConfig::preset("nano").unwrap()
        };

        let close = |name: &str, std: f32| {
            let values = whole(&config, 1, name);
            // Five standard errors of a deviation: std / sqrt(2 n).
            let margin = 5.0 * std / (2.0 * values.len() as f32).sqrt();
            assert!(
                (std_of(&values) - std).abs() < margin,
                "{name}: {} for {std}",
                std_of(&values)
            );
        };

        for name in [
            "transformer.wte.weight",
            "transformer.wpe.weight",
            "lm_head.weight",
        ] {
            close(name, 0.02);
        }

        close("transformer.h.1.attn.c_attn.weight", 0.02);
        close("transformer.h.1.mlp.c_fc.weight", 0.02);
        close("transformer.h.0.attn.c_proj.weight", 0.01);
        close("transformer.h.1.mlp.c_proj.weight", 0.01);

        for unit in config.units() {
            for name in unit.params.iter().map(|p| p.name.as_str()) {
                if name.ends_with("bias") {
                    assert!(whole(&config, 1, name).iter().all(|x| *x == 0.0), "{name}");
                } else if name.contains("ln_") {
                    assert!(whole(&config, 1, name).iter().all(|x| *x == 1.0), "{name}");
                }
            }
        }
    }

    #[test]
    fn other_seeds_and_parameters_get_other_values() {
        let config = GptConfig::preset("nano").unwrap();
        let name = "transformer.h.0.mlp.c_fc.weight";
        assert_eq!(whole(&config, 1, name), whole(&config, 1, name));
        assert_ne!(whole(&config, 1, name), whole(&config, 2, name));
        assert_ne!(
            whole(&config, 1, name),
            whole(&config, 1, "transformer.h.1.mlp.c_fc.weight")
        );
    }

    #[test]
    fn a_part_that_crosses_tasks_is_the_same_part_of_the_whole() {
        let config = GptConfig {
            vocab_size: 1200,
            ..GptConfig::preset("nano").unwrap()
        };
        let name = "transformer.wte.weight";
        let all = whole(&config, 5, name);
        let range = 3..2 * CHUNK as u64 + 3;
        let mut part = vec![0.0; 2 * CHUNK];
        config.fill_initial(5, name, range, &mut part).unwrap();
        assert!(part == all[3..2 * CHUNK + 3]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_part_is_the_same_part_of_the_whole(a in 0u64..=512, b in 0u64..=512) {
            let config = GptConfig {
                n_embd: 4, n_head: 1, n_inner: 16, vocab_size: 128, ..GptConfig::preset("nano").unwrap()
            };
            let name = "transformer.wte.weight";
            let (a, b) = (a.min(b), a.max(b));
            let mut part = vec![0.0; (b - a) as usize];
            config.fill_initial(9, name, a..b, &mut part).unwrap();
            prop_assert_eq!(&part[..], &whole(&config, 9, name)[a as usize..b as usize]);
        }
    }

    #[test]
    fn an_unknown_name_and_a_wrong_range_are_errors() {
        let config = GptConfig::preset("nano").unwrap();
        let error = |name, range, len| {
            let mut out = vec![0.0; len];
            config
                .fill_initial(0, name, range, &mut out)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error("lm_head.weight", 0..1, 1),
            "the model has no parameter \"lm_head.weight\""
        );
        let ln = "transformer.ln_f.bias";
        let expected = "elements 0..129 of \"transformer.ln_f.bias\" (128 elements) do not fit a buffer of 129";
        assert_eq!(error(ln, 0..129, 129), expected);
        assert!(error(ln, 0..4, 5).contains("a buffer of 5"));
        #[expect(clippy::reversed_empty_ranges, reason = "the case under test")]
        let reversed = 4..0;
        assert!(error(ln, reversed, 4).contains("elements 4..0"));
    }
}

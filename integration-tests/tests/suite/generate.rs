//! Generation against PyTorch: greedy continuations, and logits of every position.

use std::collections::HashMap;

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2, relative_error};
use zero_alloc::device::DType;
use zero_models::ModelConfig;
use zero_models::generate::{Generator, GeneratorOptions, Sampling};
use zero_models::ops::Threads;

fn generator(oracle: Oracle, weights: &str, context: usize, threads: usize) -> Generator {
    let text = std::fs::read_to_string(oracle.data("model/config.json")).unwrap();
    let (config, _) = ModelConfig::from_hf_json(&text).unwrap();
    let tensors: HashMap<_, _> = oracle.tensors(weights).into_iter().collect();
    let options = GeneratorOptions {
        context,
        dtype: DType::F32,
        threads: Threads::new(threads).unwrap(),
    };
    let source = |name: &str, range: std::ops::Range<u64>, out: &mut [f32]| {
        out.copy_from_slice(&tensors[name][range.start as usize..range.end as usize]);
        Ok(())
    };
    Generator::new(&config, &source, options).unwrap()
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    for oracle in [LLAMA, QWEN2] {
        let text = std::fs::read_to_string(oracle.data("expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
        let list = |key: &str| -> Vec<u32> {
            let tokens = expected["greedy"][key].as_array().unwrap();
            tokens.iter().map(|t| t.as_u64().unwrap() as u32).collect()
        };

        for (weights, key) in [
            ("model/model.safetensors", "of_initial_weights"),
            ("params_last.safetensors", "of_last_weights"),
        ] {
            let prompt = list("prompt");
            let want = list(key);
            for threads in [1, 2] {
                let context = prompt.len() + want.len();
                let mut generator = generator(oracle, weights, context, threads);
                let mut logits = generator.feed(&prompt).unwrap();
                let mut got = Vec::new();
                while got.len() < want.len() {
                    let token = Sampling::GREEDY.choose(&logits, 0).unwrap();
                    got.push(token);
                    logits = generator.feed(&[token]).unwrap();
                }
                assert_eq!(got, want, "{}, {key}", oracle.folder);
                let error = generator.feed(&[0]).unwrap_err().to_string();
                assert!(error.contains("of which 0 are left"), "{error}");
            }
        }
    }
}

/// Each position by a pass over its prefix, and token by token.
#[test]
fn logits_of_every_position_are_those_of_pytorch() {
    for oracle in [GPT2, LLAMA, QWEN2] {
        let file = oracle.tensors("logits_first_micro_batch.safetensors");
        let (_, want) = &file[0];
        let vocab = want.len() / (oracle.batch * oracle.seq);
        let tokens = &oracle.tokens()[..oracle.seq];
        let new = || generator(oracle, "model/model.safetensors", oracle.seq, 2);

        let mut one_by_one = new();
        for (i, want) in want.chunks(vocab).take(oracle.seq).enumerate() {
            let at_once = new().feed(&tokens[..=i]).unwrap();
            let next = one_by_one.feed(&tokens[i..=i]).unwrap();
            for got in [at_once, next] {
                let error = relative_error(&got, want);
                assert!(error < 1e-5, "{} at {i}: {error:e}", oracle.folder);
            }
        }
        assert_eq!(one_by_one.len(), oracle.seq);
    }
}

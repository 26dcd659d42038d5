//! The samples of a run: a text that the model continues as it trains.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zero_models::generate::Sampling;
use zero_trainer::{NextToken, SampleOptions};

use super::args::TrainArgs;
use crate::codec::Codec;
use crate::error::CliError;
use crate::flags::check_positive;

/// Tokens of a continuation by default.
const TOKENS: usize = 32;

/// The samples of a run, as `run.json` stores them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SampleRecord {
    /// Steps from one sample to the next; 0 samples only at the end.
    every: u64,
    /// The text to continue.
    prompt: String,
    /// Most tokens of a continuation.
    tokens: usize,
}

impl SampleRecord {
    /// Sets the settings to the recorded values.
    pub(crate) fn fill(&self, settings: &mut TrainArgs) {
        settings.sample_every = Some(self.every);
        settings.sample_tokens = Some(self.tokens);
        settings.sample_prompt = Some(self.prompt.clone());
    }
}

/// The samples of a run.
pub(crate) struct Samples {
    pub(crate) options: SampleOptions,
    pub(crate) record: SampleRecord,
    /// Turns a continuation into text.
    codec: Codec,
}

impl Samples {
    /// The prompt and its continuation, in one line.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub(crate) fn text(&self, tokens: &[u32]) -> Result<String, CliError> {
        let mut decoder = self.codec.decoder();
        let mut bytes = self.record.prompt.clone().into_bytes();
        for token in tokens {
            bytes.extend(decoder.next(*token)?);
        }
        bytes.extend(decoder.rest()?);

        let escaped = |c: char| match c.is_control() {
            true => c.escape_default().to_string(),
            false => c.to_string(),
        };
        Ok(String::from_utf8_lossy(&bytes)
            .chars()
            .map(escaped)
            .collect())
    }
}

/// The most likely token, until a token that ends a text.
#[derive(Debug)]
struct Greedy {
    ends: Vec<u32>,
}

impl NextToken for Greedy {
    fn choose(&self, logits: &[f32], index: u64) -> Option<u32> {
        let token = Sampling::GREEDY.choose(logits, index)?;
        Some(token).filter(|token| !self.ends.contains(token))
    }
}

/// The samples of a run, if its flags request them: with the tokenizer of the run, or bytes.
///
/// # Errors
/// Flags that do not go together, or a prompt that the model cannot read.
pub(crate) fn options(
    args: &TrainArgs,
    tokenizer: Option<PathBuf>,
    vocab: usize,
    ends: Vec<u32>,
) -> Result<Option<Samples>, CliError> {
    let usage = |text: String| CliError::Usage(text);
    let prompt = match &args.sample_prompt {
        Some(prompt) => prompt.clone(),
        None if args.sample_every.is_some() || args.sample_tokens.is_some() => {
            return Err(usage(
                "--sample-every and --sample-tokens need a text to continue: pass --sample-prompt TEXT"
                    .to_owned(),
            ));
        }
        None => return Ok(None),
    };
    check_positive(&[("--sample-tokens", args.sample_tokens.map(|n| n as u64))])?;

    let codec = Codec::open(tokenizer, vocab)?;
    let tokens = codec.encode(prompt.clone().into_bytes())?;
    if tokens.is_empty() {
        return Err(usage(
            "--sample-prompt: the text has no tokens; write at least a character".to_owned(),
        ));
    }
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
        return Err(usage(format!(
            "--sample-prompt: token {token} of the text is not in the model's vocabulary of {vocab}"
        )));
    }

    let record = SampleRecord {
        every: args.sample_every.unwrap_or(0),
        prompt,
        tokens: args.sample_tokens.unwrap_or(TOKENS),
    };
    let options = SampleOptions {
        every: record.every,
        prompt: tokens,
        tokens: record.tokens,
        next: Arc::new(Greedy { ends }),
    };
    Ok(Some(Samples {
        options,
        record,
        codec,
    }))
}

//! Examples for fine-tuning: rows of JSON (one a line, or an array of them) and of parquet files.
//!
//! | keys, or columns | trained |
//! |---|---|
//! | `prompt` and `completion`, strings or lists of messages | the completion and the end token |
//! | `messages`, by the chat template of the model's folder | the assistant's messages |
//! | `conversations` of `from` and `value` ([`sharegpt`]), by the template | the assistant's messages |
//! | `instruction`, `input` and `output` ([`alpaca`]) | the output and the end token |
//! | `text` | all of it and the end token |
//!
//! [`Examples`] are the tokens of all rows. [`ExampleRows`] arrange them in rows, and [`Epochs`]
//! order rows.

mod alpaca;
mod conversation;
mod encode;
mod epochs;
mod jinja;
mod json;
mod line;
mod messages;
#[cfg(feature = "parquet")]
mod parquet;
mod renderer;
mod rows;
mod sharegpt;
mod source;
mod template;
#[cfg(test)]
mod tests;
mod trace;
mod training;
mod turns;
mod worker;

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use indicatif::HumanCount;
use zero_trainer::IGNORED;

pub use encode::EncoderSource;
pub(super) use line::FORMS;
pub(crate) use line::Form;
pub use renderer::{render_apart, serve_templates};
pub use rows::ExampleRows;
pub(super) use source::Format;
pub(crate) use source::RowFile;
pub use training::{RowData, RowOptions, TrainingData};

use super::{DataError, MAX_BYTE_VOCAB};
use encode::{Encoded, Encoder};
use epochs::Epochs;
use line::Line;

/// The bit of a token that is trained. No vocabulary has as many tokens.
const TRAINED: u32 = 1 << 31;

/// Rows that are tokenized at a time.
const ROWS: usize = 4096;

/// The tokens of examples.
pub struct Examples {
    /// The path, for messages.
    name: String,
    form: Form,
    /// The tokens of all examples, with [`TRAINED`].
    tokens: Vec<u32>,
    /// For each example the end of its tokens.
    ends: Vec<u64>,
    /// For each example its file and line.
    places: Vec<(u32, u32)>,
    files: Vec<PathBuf>,
    encoder: Arc<Encoder>,
    /// Examples whose prompt has other tokens alone.
    moved: u64,
    fingerprint: u64,
    /// Notes about the files for the user, one line each.
    notices: Vec<String>,
}

/// The tokens of one example.
#[derive(Clone, Copy, Debug)]
pub struct Example<'a>(&'a [u32]);

impl Example<'_> {
    /// The number of tokens.
    pub fn token_count(&self) -> usize {
        self.0.len()
    }

    /// A token.
    pub fn token(&self, i: usize) -> u32 {
        self.0[i] & !TRAINED
    }

    /// The token as a target.
    pub fn target(&self, i: usize) -> u32 {
        if self.0[i] & TRAINED != 0 {
            self.token(i)
        } else {
            IGNORED
        }
    }

    /// Trained targets of the first `inputs` tokens.
    fn trained(&self, inputs: usize) -> u32 {
        let targets = self.0.iter().skip(1).take(inputs);
        targets.filter(|&&token| token & TRAINED != 0).count() as u32
    }

    fn has_trained(&self, inputs: usize) -> bool {
        self.trained(inputs) > 0
    }
}

impl Examples {
    /// Reads and tokenizes the examples of files.
    ///
    /// # Errors
    /// A file, a line or a tokenizer that cannot be used.
    pub(crate) fn open(
        path: &Path,
        files: Vec<RowFile>,
        source: &EncoderSource,
    ) -> Result<Self, DataError> {
        let encoder = Arc::new(Encoder::open(source)?);
        let mut examples = Self {
            name: path.display().to_string(),
            form: Form::Text,
            tokens: Vec::new(),
            ends: Vec::new(),
            places: Vec::new(),
            files: files.iter().map(|file| file.path.clone()).collect(),
            encoder: Arc::clone(&encoder),
            moved: 0,
            fingerprint: 0,
            notices: Vec::new(),
        };

        for (index, file) in files.iter().enumerate() {
            let mut batch = Vec::with_capacity(ROWS);
            for row in file.rows()? {
                batch.push(row?);
                if batch.len() == ROWS {
                    examples.add(index, &batch)?;
                    batch.clear();
                }
            }
            examples.add(index, &batch)?;
        }

        if examples.ends.is_empty() {
            return Err(DataError::Empty {
                path: path.to_owned(),
            });
        }
        examples.fingerprint = examples.compute_fingerprint();
        Ok(examples)
    }

    /// Adds rows (line, text) of a file.
    fn add(&mut self, file: usize, rows: &[(u32, String)]) -> Result<(), DataError> {
        let encoder = Arc::clone(&self.encoder);
        let results = in_parallel(rows, |(_, text)| {
            let (form, line) = Line::parse(text)?;
            Ok((form, encoder.encode(&line, text)?))
        });
        for ((number, _), result) in rows.iter().zip(results) {
            let added = result.and_then(|(form, encoded)| self.push(file, *number, form, &encoded));
            added.map_err(|message| DataError::Example {
                path: self.files[file].clone(),
                line: *number,
                message,
            })?;
        }
        Ok(())
    }

    fn push(
        &mut self,
        file: usize,
        line: u32,
        form: Form,
        encoded: &Encoded,
    ) -> Result<(), String> {
        if self.ends.is_empty() {
            self.form = form;
        }
        if form != self.form {
            let (first_file, first_line) = self.places[0];
            return Err(format!(
                "it has {}, but {}, line {first_line} has {}: all rows of the data must have the same form",
                form.keys(),
                self.files[first_file as usize].display(),
                self.form.keys()
            ));
        }
        let tokens = encoded.tokens.iter().zip(&encoded.trained);
        let flagged = tokens.map(|(&token, &trained)| token | if trained { TRAINED } else { 0 });
        self.tokens.extend(flagged);
        self.ends.push(self.tokens.len() as u64);
        self.places.push((file as u32, line));
        self.moved += u64::from(encoded.moved);
        Ok(())
    }

    fn compute_fingerprint(&self) -> u64 {
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        for token in &self.tokens {
            crc.update(&token.to_le_bytes());
        }
        for end in &self.ends {
            crc.update(&end.to_le_bytes());
        }
        crc.finalize()
    }

    /// The number of examples.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn form(&self) -> Form {
        self.form
    }

    /// An example.
    pub fn get(&self, index: usize) -> Example<'_> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Example(&self.tokens[start as usize..self.ends[index] as usize])
    }

    /// The file and the line of an example.
    pub fn place(&self, index: usize) -> (&Path, u32) {
        let (file, line) = self.places[index];
        (&self.files[file as usize], line)
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        self.encoder.decode(tokens)
    }

    /// Takes the last `fraction` of the examples out, for validation.
    pub(crate) fn split(mut self, fraction: f64) -> (Self, Self) {
        let kept = ((self.count() as f64 * (1.0 - fraction)) as usize).min(self.count());
        let end = kept.checked_sub(1).map_or(0, |last| self.ends[last]);
        let ends = self.ends.split_off(kept);
        let mut last = Self {
            name: format!("{}, the part for validation", self.name),
            form: self.form,
            tokens: self.tokens.split_off(end as usize),
            ends: ends.into_iter().map(|one| one - end).collect(),
            places: self.places.split_off(kept),
            files: self.files.clone(),
            encoder: Arc::clone(&self.encoder),
            moved: 0,
            fingerprint: 0,
            notices: Vec::new(),
        };
        last.fingerprint = last.compute_fingerprint();
        self.fingerprint = self.compute_fingerprint();
        (self, last)
    }

    /// Checks that all tokens are in the vocabulary of the model.
    pub(crate) fn validate(&self, vocab_size: usize) -> Result<(), DataError> {
        if self.encoder.is_bytes() && vocab_size > MAX_BYTE_VOCAB {
            return Err(DataError::NoTokenizer {
                name: self.name.clone(),
                vocab_size: HumanCount(vocab_size as u64),
            });
        }
        let outside = |&token: &u32| (token & !TRAINED) as usize >= vocab_size;
        let Some(at) = self.tokens.iter().position(outside) else {
            return Ok(());
        };
        let index = self.ends.partition_point(|&end| end <= at as u64);
        let (path, line) = self.place(index);
        Err(DataError::Example {
            path: path.to_owned(),
            line,
            message: format!(
                "token {} is outside the model's vocabulary of {vocab_size}: the model and the tokens must be of the \
                 same tokenizer",
                self.tokens[at] & !TRAINED
            ),
        })
    }

    /// Cross entropy, in nats per token, of a unigram model of the trained tokens.
    pub(crate) fn unigram_loss(&self) -> f64 {
        let mut counts = std::collections::BTreeMap::<u32, u64>::new();
        for &token in self.tokens.iter().filter(|&&token| token & TRAINED != 0) {
            *counts.entry(token).or_default() += 1;
        }
        let total = counts.values().sum::<u64>() as f64;
        let shares = counts.values().map(|&n| n as f64 / total);
        shares.map(|p| p * (1.0 / p).ln()).sum()
    }
}

/// Applies `f` to all items on all cores, in order.
fn in_parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let part = items.len().div_ceil(cores).max(1);
    let f = &f;
    std::thread::scope(|scope| {
        let parts = items
            .chunks(part)
            .map(|part| scope.spawn(move || part.iter().map(f).collect::<Vec<R>>()));
        let parts: Vec<_> = parts.collect();
        let mut all = Vec::with_capacity(items.len());
        for part in parts {
            match part.join() {
                Ok(results) => all.extend(results),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    })
}

//! The training data of a run: a stream of tokens, or rows by epochs.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use indicatif::HumanCount;
use zero_trainer::{Batch, BatchAt, IGNORED, ModelError, ValidationData};

use super::epochs::{place_in_step, rows_of_step};
use super::rows::pad;
use super::{EncoderSource, Epochs, ExampleRows, Examples};
use crate::kind::{Content, DataKind};
use crate::output::{beginning, counted};
use crate::place::{DataPosition, Pace};
use crate::{DataError, DataSource, Dataset};

/// How data becomes rows.
#[derive(Clone, Debug, Default)]
pub struct RowOptions {
    /// Tokens of a row.
    pub seq_len: usize,
    /// Whether several examples share a row.
    pub pack: bool,
    /// Whether rows are shuffled by epochs, also those of plain data.
    pub by_epochs: bool,
    /// The files that decide the tokens of an example.
    pub encoder: EncoderSource,
}

/// Training or validation data.
pub enum TrainingData {
    /// Rows of a stream of tokens, without epochs.
    Stream(Dataset),
    /// Rows by epochs.
    Rows(RowData),
}

/// Rows by epochs.
pub struct RowData {
    rows: RowSource,
    seq_len: usize,
    epochs: Epochs,
    description: String,
    /// The beginning of the trained text of the first row of examples.
    first: Option<String>,
    notices: Vec<String>,
}

enum RowSource {
    Examples(ExampleRows),
    /// Consecutive windows of tokens.
    Windows(Dataset),
}

impl From<Dataset> for TrainingData {
    fn from(data: Dataset) -> Self {
        Self::Stream(data)
    }
}

impl fmt::Debug for TrainingData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrainingData({})", self.describe())
    }
}

/// The examples of data, if its kind is examples.
fn examples(
    source: &DataSource,
    kind: &DataKind,
    options: &RowOptions,
) -> Result<Option<Examples>, DataError> {
    let path = source.path.as_deref().unwrap_or(Path::new("."));
    match &kind.content {
        Content::Examples(files) => {
            let mut examples = Examples::open(path, files.clone(), &options.encoder)?;
            examples.notices.clone_from(&kind.notices);
            Ok(Some(examples))
        }
        _ if options.pack => Err(DataError::NothingToPack {
            path: path.to_owned(),
        }),
        _ => Ok(None),
    }
}

impl TrainingData {
    /// Opens data.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn open(source: &DataSource, options: &RowOptions) -> Result<Self, DataError> {
        Self::open_as(source, DataKind::of(source)?, options)
    }

    /// As [`Self::open`], of data whose kind is known.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_as(
        source: &DataSource,
        kind: DataKind,
        options: &RowOptions,
    ) -> Result<Self, DataError> {
        match examples(source, &kind, options)? {
            Some(examples) => Self::of_examples(examples, options),
            None => Ok(Self::of_dataset(Dataset::open_as(source, kind)?, options)),
        }
    }

    /// Opens data, and splits a fraction at its end off, for validation.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn open_split(
        source: &DataSource,
        options: &RowOptions,
        fraction: f64,
    ) -> Result<(Self, Self), DataError> {
        let kind = DataKind::of(source)?;
        match examples(source, &kind, options)? {
            Some(examples) => {
                let (training, validation) = examples.split(fraction);
                let training = Self::of_examples(training, options)?;
                let validation = Self::of_examples(validation, &options.for_validation())?;
                Ok((training, validation))
            }
            None => {
                let (training, validation) = Dataset::split_as(source, kind, fraction)?;
                Ok((Self::of_dataset(training, options), validation.into()))
            }
        }
    }

    fn of_examples(examples: Examples, options: &RowOptions) -> Result<Self, DataError> {
        let rows = ExampleRows::new(Arc::new(examples), options.seq_len, options.pack);
        if rows.count() == 0 {
            let examples = rows.examples();
            return Err(DataError::NothingTrained {
                name: examples.name.clone(),
                examples: HumanCount(examples.count() as u64),
                seq_len: options.seq_len,
            });
        }
        Ok(Self::Rows(RowData {
            seq_len: options.seq_len,
            epochs: Epochs::new(rows.count() as u64),
            description: describe(&rows),
            first: first_trained(&rows)?,
            notices: notices(&rows),
            rows: RowSource::Examples(rows),
        }))
    }

    fn of_dataset(data: Dataset, options: &RowOptions) -> Self {
        if !options.by_epochs {
            return Self::Stream(data);
        }
        let windows = data.windows(options.seq_len);
        Self::Rows(RowData {
            seq_len: options.seq_len,
            epochs: Epochs::new(windows),
            description: format!("{}, {} an epoch", data.describe(), counted(windows, "row")),
            first: None,
            notices: data.notices().to_vec(),
            rows: RowSource::Windows(data),
        })
    }

    /// The files left out of the data and what was done to examples, one line each.
    pub fn notices(&self) -> &[String] {
        match self {
            Self::Stream(data) => data.notices(),
            Self::Rows(data) => &data.notices,
        }
    }

    /// The number of tokens.
    pub fn len_tokens(&self) -> u64 {
        match self.dataset() {
            Ok(data) => data.len_tokens(),
            Err(rows) => rows.examples().tokens.len() as u64,
        }
    }

    /// A checksum of the data; detects data that changed since a checkpoint.
    pub fn fingerprint(&self) -> u64 {
        match self.dataset() {
            Ok(data) => data.fingerprint(),
            Err(rows) => rows.examples().fingerprint,
        }
    }

    /// One line of text.
    pub fn describe(&self) -> &str {
        match self {
            Self::Stream(data) => data.describe(),
            Self::Rows(data) => &data.description,
        }
    }

    /// The beginning of what the first row of examples trains, in quotes.
    pub fn first_trained(&self) -> Option<&str> {
        match self {
            Self::Stream(_) => None,
            Self::Rows(data) => data.first.as_deref(),
        }
    }

    /// Checks that a model of `vocab_size` tokens can be trained on rows of `seq_len` tokens.
    ///
    /// # Errors
    /// Too little data, or a token outside the vocabulary.
    pub fn validate(&self, vocab_size: usize, seq_len: usize) -> Result<(), DataError> {
        match self.dataset() {
            Ok(data) => data.validate(vocab_size, seq_len),
            Err(rows) => rows.examples().validate(vocab_size),
        }
    }

    /// Cross entropy, in nats per token, of a unigram model of the trained tokens.
    pub fn unigram_loss(&self) -> f64 {
        match self.dataset() {
            Ok(data) => data.unigram_loss(),
            Err(rows) => rows.examples().unigram_loss(),
        }
    }

    /// Whether rows have several documents.
    pub fn has_documents(&self) -> bool {
        self.dataset().is_err_and(|rows| rows.is_packed())
    }

    /// Whether rows are consecutive tokens of a file of tokens.
    pub fn is_in_order(&self) -> bool {
        self.dataset().is_ok_and(Dataset::is_in_order)
    }

    /// The end token of examples.
    pub fn end_token(&self) -> Option<u32> {
        self.dataset()
            .err()
            .and_then(|rows| rows.examples().encoder.end)
    }

    /// The rows and the trained tokens of an epoch, if there are epochs.
    pub fn epoch(&self) -> Option<(u64, u64)> {
        let Self::Rows(data) = self else { return None };
        Some(match &data.rows {
            RowSource::Examples(rows) => (rows.count() as u64, rows.all_trained()),
            RowSource::Windows(dataset) => {
                let windows = dataset.windows(data.seq_len);
                (windows, windows * data.seq_len as u64)
            }
        })
    }

    /// How steps of `rows_of_step` rows go through the data.
    pub fn pace(&self, rows_of_step: u64) -> Pace {
        Pace::new(rows_of_step, self.epoch().map(|(rows, _)| rows))
    }

    /// Begins the run's steps at `from`.
    pub fn begin_at(&mut self, from: DataPosition) {
        match self {
            Self::Stream(data) => data.begin_at(from),
            Self::Rows(data) => data.epochs.begin_at(from),
        }
    }

    fn dataset(&self) -> Result<&Dataset, &ExampleRows> {
        match self {
            Self::Stream(data) => Ok(data),
            Self::Rows(data) => match &data.rows {
                RowSource::Windows(data) => Ok(data),
                RowSource::Examples(rows) => Err(rows),
            },
        }
    }

    /// The rows of examples.
    pub fn example_rows(&self) -> Option<&ExampleRows> {
        self.dataset().err()
    }

    /// Writes the micro-batch at `at` to `batch`.
    ///
    /// # Errors
    /// Buffers of the wrong size, an invalid position, or a failed read.
    pub fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), DataError> {
        match self {
            Self::Stream(data) => data.batch(at, batch),
            Self::Rows(data) => data.batch(at, batch),
        }
    }
}

impl RowOptions {
    /// Those of validation data, whose rows are never packed or shuffled.
    pub fn for_validation(&self) -> Self {
        Self {
            pack: false,
            by_epochs: false,
            ..self.clone()
        }
    }
}

impl RowData {
    fn batch(&self, at: BatchAt, batch: &mut Batch) -> Result<(), DataError> {
        let seq_len = self.seq_len;
        let tokens = at.micro_batch * seq_len;
        let valid = at.seq_len == seq_len
            && batch.inputs.len() == tokens
            && batch.targets.len() == tokens
            && at.rank < at.world_size
            && at.micro_batch_index < at.grad_accum;
        if !valid {
            return Err(DataError::BadBatch {
                what: format!("{at:?} in rows of {seq_len} tokens"),
            });
        }

        let has_documents = matches!(&self.rows, RowSource::Examples(rows) if rows.is_packed());
        batch
            .starts
            .resize(if has_documents { tokens } else { 0 }, 0);
        let step = self.epochs.step(&at);
        for row in 0..at.micro_batch {
            let range = row * seq_len..(row + 1) * seq_len;
            let starts = batch.starts.get_mut(range.clone()).unwrap_or_default();
            let (inputs, targets) = (&mut batch.inputs[range.clone()], &mut batch.targets[range]);
            match step.get(place_in_step(&at, row)) {
                Some(row) => self.fill(row, inputs, targets, starts)?,
                None => pad(0, inputs, targets, starts),
            }
        }

        let trained: u64 = step.all().iter().map(|&row| self.trained(row)).sum();
        batch.divisor = trained as f64 / (at.world_size * at.grad_accum) as f64;
        debug_assert!(step.all().len() as u64 <= rows_of_step(&at));
        Ok(())
    }

    /// The trained targets of a row, at least one.
    fn trained(&self, row: u32) -> u64 {
        match &self.rows {
            RowSource::Examples(rows) => u64::from(rows.trained(row as usize)),
            RowSource::Windows(_) => self.seq_len as u64,
        }
    }

    fn fill(
        &self,
        row: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
        starts: &mut [u32],
    ) -> Result<(), DataError> {
        match &self.rows {
            RowSource::Examples(rows) => {
                rows.fill(row, inputs, targets, starts);
                Ok(())
            }
            RowSource::Windows(data) => data.window(row as u64, inputs, targets),
        }
    }
}

/// One line of text about examples.
fn describe(rows: &ExampleRows) -> String {
    let examples = rows.examples();
    let padding = 100.0 * rows.padding();
    format!(
        "{}: {} ({}), {} an epoch{}, {}, {padding:.1}% padding",
        examples.name,
        counted(examples.count() as u64, "example"),
        examples.form().keys(),
        counted(rows.count() as u64, "row"),
        if rows.is_packed() { ", packed" } else { "" },
        counted(rows.all_trained(), "trained token"),
    )
}

/// The beginning of what the first row trains, in quotes.
fn first_trained(rows: &ExampleRows) -> Result<Option<String>, DataError> {
    /// Characters that are shown. A token has one or more, but for parts of characters.
    const SHOWN: usize = 60;

    let Some(&index) = rows.members(0).first() else {
        return Ok(None);
    };
    let example = rows.examples().get(index as usize);
    let targets = (1..example.token_count()).map(|i| example.target(i));
    let trained = targets.filter(|&target| target != IGNORED);
    let trained: Vec<u32> = trained.take(4 * SHOWN).collect();
    let text = rows.examples().decode(&trained)?;
    Ok(Some(beginning(&text, SHOWN)))
}

fn notices(rows: &ExampleRows) -> Vec<String> {
    let (examples, seq_len) = (rows.examples(), rows.seq_len());
    let name = &examples.name;
    let mut notices = examples.notices.clone();
    if rows.truncated > 0 {
        notices.push(format!(
            "{name}: {} longer than --seq-len {seq_len}: only the beginning is trained",
            are(rows.truncated)
        ));
    }
    if rows.untrained > 0 {
        notices.push(format!(
            "{name}: {} left out: nothing of what would be trained is within --seq-len {seq_len}",
            are(rows.untrained)
        ));
    }
    if examples.moved > 0 {
        notices.push(format!(
            "{name}: the prompts of {} have other tokens before their completion than alone; to avoid this, begin \
             the completion and not end the prompt with a space",
            counted(examples.moved, "example")
        ));
    }
    if examples.encoder.end.is_none() && !examples.form().has_messages() {
        notices.push(format!(
            "{name}: the model's folder names no end token, so none is trained at the end of an example"
        ));
    }
    notices
}

/// `1 example is`, `2 examples are`.
fn are(n: u64) -> String {
    format!(
        "{} {}",
        counted(n, "example"),
        if n == 1 { "is" } else { "are" }
    )
}

impl ValidationData for TrainingData {
    fn fingerprint(&self) -> u64 {
        self.fingerprint()
    }

    fn describe(&self) -> &str {
        self.describe()
    }

    fn windows(&self, seq_len: usize) -> u64 {
        match self.dataset() {
            Ok(data) => data.windows(seq_len),
            Err(rows) => rows.count() as u64,
        }
    }

    fn window(
        &self,
        index: u64,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), ModelError> {
        match self.dataset() {
            Ok(data) => data.window(index, inputs, targets)?,
            Err(rows) => rows.fill(index as usize, inputs, targets, &mut []),
        }
        Ok(())
    }
}

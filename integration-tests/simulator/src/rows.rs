//! Measured steps in a CSV file.

use std::io;

use thiserror::Error;

use crate::{Attention, Machine, MachineError, Shape, Software};

/// The column that [`Table::to_csv`] adds.
pub const PREDICTED: &str = "predicted_tok_s_gpu";

/// A configuration of a training run and the speed that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Line in the file, from 1.
    pub line: usize,
    /// The publication of the figure. A name that begins with `vtrain` is of Megatron-DeepSpeed, one that begins with `zero` of our trainer.
    pub source: String,
    /// The GPU; [`Machine::preset`] knows some of them.
    pub gpu: String,
    /// Nodes of the run, at most as many as GPUs.
    pub nodes: u64,
    /// GPUs of the run.
    pub gpus: u64,
    /// The name of the model. One that begins with `llama` has gates.
    pub model: String,
    /// The sizes of the model and its sequences.
    pub shape: Shape,
    /// Sequences of a micro-batch of a GPU.
    pub micro_batch: u64,
    /// Sequences of a step of all GPUs.
    pub global_batch: u64,
    /// ZeRO stage, 0 to 3.
    pub stage: u8,
    /// Whether `act_ckpt` is `full`: the backward pass computes the forward pass again.
    pub recompute: bool,
    /// Data type. One that begins with `amp` reduces gradients in 32 bits; one that contains `fp8`
    /// computes products in 8 bits.
    pub dtype: String,
    /// Bytes per second between GPUs of a node, per GPU and direction (`intra_bw`, in GB/s).
    pub link_bytes_per_s: f64,
    /// Bytes per second between nodes, per GPU and direction (`inter_bw`, in GB/s); empty for a run
    /// on one node.
    pub network_bytes_per_s: Option<f64>,
    /// Tokens per second and GPU (`tok_s_gpu`); empty for a run that was not measured.
    pub measured: Option<f64>,
}

/// The rows of a CSV file, and its text, so that columns that are not known are written unchanged.
#[derive(Clone, Debug)]
pub struct Table {
    /// The rows in the order of the file.
    pub rows: Vec<Row>,
    header: Vec<String>,
    /// The fields of each row as they were read, with quotes.
    fields: Vec<Vec<String>>,
}

/// Why a CSV file was refused.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum RowsError {
    /// The file cannot be read.
    #[error("failed to read {file}: {source}")]
    Read { file: String, source: io::Error },
    /// The file is empty.
    #[error("{file}: no header; its first line must name the columns")]
    NoHeader { file: String },
    /// A column that a row needs.
    #[error("{file}, line 1: no column {column}; add it to the header and to every row")]
    MissingColumn { file: String, column: &'static str },
    /// Two columns of one name.
    #[error("{file}, line 1: two columns are named {column}; remove one")]
    TwoColumns { file: String, column: String },
    /// A row with more or fewer fields than the header.
    #[error("{file}, line {line}: {found} fields, but the header has {expected} columns")]
    Fields {
        file: String,
        line: usize,
        found: usize,
        expected: usize,
    },
    /// A quote that the line does not close.
    #[error("{file}, line {line}, column {column}: a quote is not closed before the line ends")]
    Quote {
        file: String,
        line: usize,
        column: usize,
    },
    /// A field with another content than its column needs.
    #[error("{file}, line {line}, column {column}: \"{value}\" is not {expected}")]
    Value {
        file: String,
        line: usize,
        column: &'static str,
        value: String,
        expected: &'static str,
    },
}

impl Row {
    /// Micro-batches of a step: `global_batch / (gpus micro_batch)`, rounded down, and at least 1.
    pub fn micro_batches(&self) -> u64 {
        (self.global_batch / self.gpus.saturating_mul(self.micro_batch).max(1)).max(1)
    }

    /// Tokens per second and GPU of a step of `step_s` seconds.
    pub fn tokens_per_s(&self, step_s: f64) -> f64 {
        self.global_batch as f64 * self.shape.seq as f64 / self.gpus as f64 / step_s
    }

    /// The facts about the software that follow from the columns.
    pub fn software(&self) -> Software {
        let dtype = self.dtype.to_ascii_lowercase();
        let attention = match &self.source {
            source if source.starts_with("vtrain") => Attention::Plain,
            source if source.starts_with("zero") => Attention::Fused,
            _ => Attention::Flash,
        };
        Software {
            attention,
            wide_reduce: dtype.starts_with("amp"),
            fp8: dtype.contains("fp8"),
            recompute: self.recompute,
        }
    }

    /// The preset of the GPU with the row's bandwidths.
    ///
    /// # Errors
    /// A GPU that no preset has.
    pub fn machine(&self) -> Result<Machine, MachineError> {
        let preset = Machine::preset(&self.gpu)?;
        Ok(Machine {
            link_bytes_per_s: self.link_bytes_per_s,
            network_bytes_per_s: self
                .network_bytes_per_s
                .unwrap_or(preset.network_bytes_per_s),
            ..preset
        })
    }
}

impl Table {
    /// Reads the text of `file`, which is only named in errors: a header, then a row a line. Columns
    /// may be in any order; others than those of [`Row`] are kept. Empty lines are skipped, and so
    /// is a column [`PREDICTED`] of an earlier run.
    ///
    /// # Errors
    /// A missing column or field, a value that its column cannot have.
    pub fn parse(text: &str, file: &str) -> Result<Self, RowsError> {
        let text = text.trim_start_matches('\u{feff}');
        let mut lines = (1..)
            .zip(text.lines())
            .filter(|(_, line)| !line.trim().is_empty());
        let Some((number, first)) = lines.next() else {
            return Err(RowsError::NoHeader { file: file.into() });
        };
        let mut header = split(first, file, number)?;
        for (column, name) in header.iter().enumerate() {
            if header[..column].contains(name) {
                return Err(RowsError::TwoColumns {
                    file: file.into(),
                    column: name.clone(),
                });
            }
        }

        let mut rows = Vec::new();
        let mut all_fields = Vec::new();
        for (line, text) in lines {
            let fields = split(text, file, line)?;
            if fields.len() != header.len() {
                return Err(RowsError::Fields {
                    file: file.into(),
                    line,
                    found: fields.len(),
                    expected: header.len(),
                });
            }
            rows.push(
                Fields {
                    file,
                    line,
                    header: &header,
                    fields: &fields,
                }
                .row()?,
            );
            all_fields.push(fields);
        }

        if let Some(old) = header.iter().position(|name| name == PREDICTED) {
            header.remove(old);
            for fields in &mut all_fields {
                fields.remove(old);
            }
        }
        Ok(Self {
            rows,
            header,
            fields: all_fields,
        })
    }

    /// Returns the table as CSV with one more column at the end, [`PREDICTED`], in tokens per second
    /// and GPU. The field of a row without a prediction is empty.
    pub fn to_csv(&self, predicted: &[f64]) -> String {
        let mut text = format!("{},{PREDICTED}\n", self.header.join(","));
        for (row, fields) in self.fields.iter().enumerate() {
            let value = predicted.get(row).filter(|value| value.is_finite());
            let value = value.map(|value| format!("{value:.2}")).unwrap_or_default();
            text += &format!("{},{value}\n", fields.join(","));
        }
        text
    }
}

/// Returns the indices of the rows of each pair of a source and a GPU, in order of first appearance:
/// a calibration holds for one such group.
pub fn groups(rows: &[Row]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let same = |group: &&mut Vec<usize>| {
            let first = &rows[group[0]];
            (&first.source, &first.gpu) == (&row.source, &row.gpu)
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    groups
}

/// The fields of a line, quotes included. A comma between quotes belongs to the field.
fn split(line: &str, file: &str, number: usize) -> Result<Vec<String>, RowsError> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for character in line.chars() {
        if character == ',' && !quoted {
            fields.push(String::new());
            continue;
        }
        quoted ^= character == '"';
        if let Some(field) = fields.last_mut() {
            field.push(character);
        }
    }
    if quoted {
        return Err(RowsError::Quote {
            file: file.into(),
            line: number,
            column: fields.len(),
        });
    }
    Ok(fields)
}

/// One line, to find fields by the name of their column.
struct Fields<'a> {
    file: &'a str,
    line: usize,
    header: &'a [String],
    fields: &'a [String],
}

impl Fields<'_> {
    fn row(&self) -> Result<Row, RowsError> {
        let model = self.text("model")?;
        let gpus = self.count("gpus")?;
        let nodes = self.count("nodes")?;
        if nodes > gpus {
            return Err(self.wrong("nodes", "at most the number of GPUs"));
        }
        let network = self.positive("inter_bw")?;
        if nodes > 1 && network.is_none() {
            return Err(self.wrong("inter_bw", "a number above 0, which several nodes need"));
        }
        let Some(link) = self.positive("intra_bw")? else {
            return Err(self.wrong("intra_bw", "a number above 0"));
        };

        Ok(Row {
            line: self.line,
            source: self.text("source")?,
            gpu: self.text("gpu")?,
            nodes,
            gpus,
            shape: Shape {
                layers: self.count("layers")?,
                width: self.count("width")?,
                heads: self.count("heads")?,
                kv_heads: self.count("kv_heads")?,
                ffn: self.count("ffn")?,
                gated: model.starts_with("llama"),
                vocab: self.count("vocab")?,
                seq: self.count("seq")?,
                sequence_ranks: 1,
                params: self.count("params")?,
                adapters: None,
            },
            model,
            micro_batch: self.count("micro_batch")?,
            global_batch: self.count("global_batch")?,
            stage: match self.text("stage")?.parse() {
                Ok(stage @ 0..=3) => stage,
                _ => return Err(self.wrong("stage", "a ZeRO stage, 0 to 3")),
            },
            recompute: match self.text("act_ckpt")?.as_str() {
                "full" => true,
                "none" | "" => false,
                _ => return Err(self.wrong("act_ckpt", "full, none or empty")),
            },
            dtype: self.text("dtype")?,
            link_bytes_per_s: link * 1e9,
            network_bytes_per_s: network.map(|network| network * 1e9),
            measured: self.positive("tok_s_gpu")?,
        })
    }

    /// The content of a field without spaces around it and without quotes.
    fn text(&self, column: &'static str) -> Result<String, RowsError> {
        let index = self.header.iter().position(|name| name.trim() == column);
        let Some(field) = index.and_then(|index| self.fields.get(index)) else {
            return Err(RowsError::MissingColumn {
                file: self.file.into(),
                column,
            });
        };
        let field = field.trim();
        let inner = field
            .strip_prefix('"')
            .and_then(|field| field.strip_suffix('"'));
        Ok(inner.map_or_else(|| field.into(), |inner| inner.replace("\"\"", "\"")))
    }

    fn count(&self, column: &'static str) -> Result<u64, RowsError> {
        match self.text(column)?.parse() {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(self.wrong(column, "a whole number above 0")),
        }
    }

    /// A number above 0, or `None` where the field is empty.
    fn positive(&self, column: &'static str) -> Result<Option<f64>, RowsError> {
        let text = self.text(column)?;
        match text.parse::<f64>() {
            _ if text.is_empty() => Ok(None),
            Ok(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.wrong(column, "a number above 0")),
        }
    }

    fn wrong(&self, column: &'static str, expected: &'static str) -> RowsError {
        RowsError::Value {
            file: self.file.into(),
            line: self.line,
            column,
            value: self.text(column).unwrap_or_default(),
            expected,
        }
    }
}

#[cfg(test)]
mod tests;

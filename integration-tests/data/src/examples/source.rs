//! The files of examples: rows of JSON, and rows of parquet as such rows.

use std::path::{Path, PathBuf};

use super::json;
use super::json::RowIterator;
use super::line::{Form, Line, as_lines};
use crate::DataError;

/// How a file stores its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// An object a line, or an array of objects.
    Json,
    Parquet,
}

/// A file of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowFile {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
}

impl RowFile {
    /// The rows, with the lines where they begin.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn rows(&self) -> Result<RowIterator, DataError> {
        match self.format {
            Format::Json => json::rows(&self.path),
            #[cfg(feature = "parquet")]
            Format::Parquet => super::parquet::rows(&self.path),
            #[cfg(not(feature = "parquet"))]
            Format::Parquet => Err(DataError::NoParquet {
                path: self.path.clone(),
            }),
        }
    }

    /// The line and the form of the first row; `start` is the beginning of the file, for messages.
    ///
    /// # Errors
    /// The file cannot be read, or the row is not an example.
    pub(crate) fn first(&self, start: &[u8]) -> Result<(u32, Form), DataError> {
        let Some(first) = self.rows()?.next() else {
            return Err(DataError::Empty {
                path: self.path.clone(),
            });
        };
        let (line, row) = first?;
        match Line::parse(&row) {
            Ok((form, _)) => Ok((line, form)),
            Err(message) => Err(DataError::Example {
                path: self.path.clone(),
                line,
                message: over_lines(&row, start).unwrap_or(message),
            }),
        }
    }

    /// Whether the beginning of a file of JSON is that of an array of objects or a whole object on
    /// a line, and not of another document.
    pub(crate) fn starts_with_row(path: &Path, start: &[u8]) -> bool {
        let row = json::first_row(path, start);
        row.is_some_and(|(_, row)| row.starts_with('{') && row.ends_with('}'))
    }
}

/// The error of an object over several lines, whose first line is `row`.
fn over_lines(row: &str, start: &[u8]) -> Option<String> {
    let is_open = row.starts_with('{') && row.len() < 64 && !row.contains('}');
    let start = String::from_utf8_lossy(start);
    let object = &start[start.find('{')?..];
    is_open.then(|| {
        format!(
            "an object over several lines: each line must be one row{}",
            as_lines(object)
        )
    })
}

impl Form {
    /// The form of the first row at the beginning of a file, if it is an example.
    pub(crate) fn of_start(path: &Path, start: &[u8]) -> Option<Self> {
        let (_, row) = json::first_row(path, start)?;
        Line::parse(&row).ok().map(|(form, _)| form)
    }
}

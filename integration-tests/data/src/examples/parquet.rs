//! Rows of a parquet file as rows of JSON, so that they are read as those are.

use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, List, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Value};
use zero_ckpt::files;

use super::json::RowIterator;
use super::line::{FORMS, KEYS};
use crate::DataError;

/// The columns of which a file must have one.
const OF_FORMS: [&str; 6] = [
    "text",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "instruction",
];

/// The rows of a file with the columns of [`KEYS`]; others are not read. A row group is decoded
/// page by page.
///
/// # Errors
/// The file is not parquet, or has no such column. An item is an error if a page cannot be read.
pub(super) fn rows(path: &Path) -> Result<RowIterator, DataError> {
    let (file, _) = files::open(path).map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    })?;
    let path = path.to_owned();
    let failed = move |message: String| DataError::Parquet {
        path: path.clone(),
        message,
    };
    let invalid = |error: ParquetError| format!("not a readable parquet file: {error}");

    let reader = SerializedFileReader::new(file).map_err(|e| failed(invalid(e)))?;
    let schema = reader.metadata().file_metadata().schema();
    let columns = known_columns(schema).map_err(&failed)?;
    let rows = reader.into_iter();
    let rows = rows
        .project(Some(columns))
        .map_err(|e| failed(invalid(e)))?;
    Ok(Box::new(rows.zip(1..).map(move |(row, number)| {
        let row = row.map_err(|e| failed(invalid(e)))?;
        Ok((number, object(&row).map_err(&failed)?.to_string()))
    })))
}

/// The schema with the columns that examples have.
fn known_columns(schema: &Type) -> Result<Type, String> {
    let fields = schema.get_fields().iter();
    let known: Vec<Arc<Type>> = fields
        .filter(|field| KEYS.contains(&field.name()))
        .cloned()
        .collect();
    if !known.iter().any(|field| OF_FORMS.contains(&field.name())) {
        let names: Vec<&str> = schema.get_fields().iter().map(|f| f.name()).collect();
        return Err(format!(
            "it has the columns {}, and must have {FORMS}; rename them",
            names.join(", ")
        ));
    }
    let builder = Type::group_type_builder(schema.name()).with_fields(known);
    builder.build().map_err(|e| e.to_string())
}

/// A row as an object, without what is null.
fn object(row: &Row) -> Result<Value, String> {
    let mut fields = Map::new();
    for (name, field) in row.get_column_iter() {
        let value = value(field).map_err(|error| format!("column {name:?}: {error}"))?;
        if !value.is_null() {
            fields.insert(name.clone(), value);
        }
    }
    Ok(fields.into())
}

fn list(list: &List) -> Result<Value, String> {
    let elements = list.elements().iter().map(value);
    elements.collect::<Result<Vec<_>, _>>().map(Value::from)
}

fn value(field: &Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(x) => Value::from(*x),
        Field::Byte(x) => Value::from(*x),
        Field::Short(x) => Value::from(*x),
        Field::Int(x) => Value::from(*x),
        Field::Long(x) => Value::from(*x),
        Field::UByte(x) => Value::from(*x),
        Field::UShort(x) => Value::from(*x),
        Field::UInt(x) => Value::from(*x),
        Field::ULong(x) => Value::from(*x),
        Field::Float(x) => Value::from(*x),
        Field::Double(x) => Value::from(*x),
        Field::Str(text) => Value::from(text.as_str()),
        // Some writers do not say that bytes are text.
        Field::Bytes(bytes) => {
            let text = std::str::from_utf8(bytes.data());
            Value::from(text.map_err(|_| "its bytes are not UTF-8 text")?)
        }
        Field::Group(row) => object(row)?,
        Field::ListInternal(elements) => list(elements)?,
        other => return Err(format!("a value {other} is not text, a number or a list")),
    })
}

#[cfg(test)]
mod tests {
    use integration_tests::{Folder, Printed};

    use super::*;

    fn file(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/data/parquet")
            .join(name)
    }

    fn read(name: &str) -> Vec<Value> {
        rows(&file(name))
            .unwrap()
            .map(|row| serde_json::from_str(&row.unwrap().1).unwrap())
            .collect()
    }

    /// By integration-tests/scripts/parquet_examples.py, which writes the same rows as JSONL.
    #[test]
    fn rows_are_those_of_jsonl() {
        let jsonl = std::fs::read_to_string(file("messages.jsonl")).unwrap();
        let expected: Vec<Value> = jsonl
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        // Snappy, gzip and no compression; by another writer with zstd and large strings.
        for name in ["snappy", "gzip", "none", "zstd"] {
            assert_eq!(read(&format!("{name}.parquet")), expected, "{name}");
        }
    }

    #[test]
    fn file_without_examples_names_its_columns() {
        let error = rows(&file("other.parquet")).err().unwrap().to_string();
        error.shows(&["it has the columns id, content, and"]);
    }

    #[test]
    fn other_file_is_an_error() {
        let dir = &Folder::on_disk();
        let path = dir.join("a.parquet");
        let whole = std::fs::read(file("snappy.parquet")).unwrap();
        for bytes in [
            &[][..],
            b"PAR1",
            b"{\"text\": \"a\"}\n",
            &whole[..whole.len() - 9],
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = rows(&path).err().unwrap().to_string();
            error.shows(&["not a readable parquet file"]);
        }

        // A damaged page is found when it is read.
        let mut damaged = whole;
        damaged[4..60].fill(0xff);
        std::fs::write(&path, damaged).unwrap();
        let found = rows(&path).unwrap().collect::<Result<Vec<_>, _>>();
        let error = found.unwrap_err().to_string();
        error.shows(&["not a readable parquet file"]);
    }
}

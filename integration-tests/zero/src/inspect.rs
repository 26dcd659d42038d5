//! `zero data`: a look at training data as a run reads it.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use console::Style;
use indicatif::HumanCount;
use serde_json::{Value, json};
use zero_models::hf::HfFolder;
use zero_trainer::IGNORED;

use crate::data::examples::{EncoderSource, ExampleRows, RowOptions};
use crate::data::{DataSource, TrainingData, check_tokenizer};
use crate::error::CliError;
use crate::flags::{find_model, model_help, parse_whole};
use crate::output::{print_note, print_text};

/// Look at training data
#[derive(Args, Clone, Debug)]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand, Clone, Debug)]
enum DataCommand {
    /// Show the first rows of examples as tokens and text, with what is trained marked
    Inspect(InspectArgs),
}

/// The flags of `zero data inspect`.
#[derive(Args, Clone, Debug)]
struct InspectArgs {
    /// A .jsonl file of examples, or a folder of them
    #[arg(long, value_name = "FILE|DIR")]
    data: PathBuf,
    /// The model.
    #[arg(long, value_name = "PRESET|DIR", help = model_help("or the model's folder, with its tokenizer \
        and chat template"))]
    model: Option<String>,
    /// Tokenizer: a tokenizer.json, or a folder [default: that of --model; none for bytes]
    #[arg(long, value_name = "FILE|DIR")]
    tokenizer: Option<PathBuf>,
    /// Tokens of a row
    #[arg(long, value_name = "T", value_parser = parse_whole::<usize>, default_value = "128")]
    seq_len: usize,
    /// Put several examples into a row
    #[arg(long)]
    pack: bool,
    /// Rows to show
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, default_value = "3")]
    rows: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `zero data`.
///
/// # Errors
/// Flags or data that cannot be used.
pub fn run(args: &DataArgs) -> Result<(), CliError> {
    let DataCommand::Inspect(args) = &args.command;
    crate::flags::check_positive(&[("--seq-len", Some(args.seq_len as u64))])?;
    let data = open(args)?;
    let Some(rows) = data.example_rows() else {
        return Err(CliError::Usage(format!(
            "{}: not examples: expected a .jsonl file whose lines have `text`, `prompt` and `completion`, or `messages`",
            args.data.display()
        )));
    };
    let shown = args.rows.min(rows.len());
    let pieces = (0..shown).map(|row| pieces(rows, row));
    let pieces = pieces.collect::<Result<Vec<_>, _>>()?;
    if args.json {
        return print_text(format!("{}\n", as_json(rows, &pieces)));
    }
    for notice in data.notices() {
        print_note(format_args!("note: {notice}"));
    }
    print_text(as_text(rows, data.describe(), &pieces))
}

fn open(args: &InspectArgs) -> Result<TrainingData, CliError> {
    let mut notices = Vec::new();
    let model = args.model.as_deref();
    let found = model
        .map(|name| find_model(name, &mut notices))
        .transpose()?;
    let folder = found.as_ref().and_then(|(_, folder)| folder.as_ref());
    let own = folder.map_or(Ok(None), HfFolder::tokenizer);
    let own = own.map_err(CliError::usage)?;
    let tokenizer = args.tokenizer.clone().or(own);
    if let Some((tokenizer, (config, _))) = tokenizer.as_ref().zip(found.as_ref()) {
        let checked = check_tokenizer(
            tokenizer,
            folder.and_then(HfFolder::companions),
            config.vocab_size(),
        );
        notices.extend(checked.map_err(CliError::usage)?);
    }
    for notice in &notices {
        print_note(format_args!("note: {notice}"));
    }

    let options = RowOptions {
        seq_len: args.seq_len,
        pack: args.pack,
        by_epochs: false,
        text: true,
        encoder: EncoderSource {
            tokenizer: tokenizer.clone(),
            folder: folder.and_then(HfFolder::companions).map(Path::to_owned),
            ..EncoderSource::now()
        },
    };
    let source = DataSource {
        path: Some(args.data.clone()),
        tokenizer,
        ..DataSource::default()
    };
    let data = TrainingData::open(&source, &options).map_err(CliError::usage)?;
    if let Some((config, _)) = &found {
        let checked = data.validate(config.vocab_size(), args.seq_len);
        checked.map_err(CliError::usage)?;
    }
    Ok(data)
}

/// Consecutive tokens of an example that are trained, or not.
struct Piece {
    /// The example, by index.
    example: usize,
    trained: bool,
    tokens: Vec<u32>,
    text: String,
}

/// The pieces of a row, without its padding.
fn pieces(rows: &ExampleRows, row: usize) -> Result<Vec<Piece>, CliError> {
    let mut pieces: Vec<Piece> = Vec::new();
    for &index in rows.members(row) {
        let example = rows.examples().get(index as usize);
        // The last token is a target only.
        for i in 0..example.len().min(rows.seq_len() + 1) {
            let trained = i > 0 && example.target(i) != IGNORED;
            let token = example.token(i);
            match pieces.last_mut() {
                Some(last) if last.example == index as usize && last.trained == trained => {
                    last.tokens.push(token);
                }
                _ => pieces.push(Piece {
                    example: index as usize,
                    trained,
                    tokens: vec![token],
                    text: String::new(),
                }),
            }
        }
    }
    for piece in &mut pieces {
        let text = rows.examples().decode(&piece.tokens);
        piece.text = text.map_err(CliError::failure)?;
    }
    Ok(pieces)
}

fn as_json(rows: &ExampleRows, shown: &[Vec<Piece>]) -> Value {
    let piece = |piece: &Piece| {
        let (file, line) = rows.examples().place(piece.example);
        json!({
            "file": file.display().to_string(),
            "line": line,
            "trained": piece.trained,
            "tokens": piece.tokens,
            "text": piece.text,
        })
    };
    let shown: Vec<Vec<Value>> = shown
        .iter()
        .map(|row| row.iter().map(piece).collect())
        .collect();
    json!({
        "examples": rows.examples().len(),
        "rows": rows.len(),
        "seq_len": rows.seq_len(),
        "packed": rows.is_packed(),
        "trained_tokens": rows.all_trained(),
        "padding": rows.padding(),
        "truncated": rows.truncated,
        "left_out": rows.untrained,
        "first_rows": shown,
    })
}

fn as_text(rows: &ExampleRows, description: &str, shown: &[Vec<Piece>]) -> String {
    let mut out = format!("{description}\n");
    let (truncated, left_out) = (HumanCount(rows.truncated), HumanCount(rows.untrained));
    let _ = writeln!(out, "truncated: {truncated}, left out: {left_out}");
    let is_terminal = console::colors_enabled();
    let legend = if is_terminal {
        format!("{} is trained", marked(true, "underlined text"))
    } else {
        "[[text in double brackets]] is trained".to_owned()
    };
    let _ = writeln!(out, "{legend}");
    for (row, pieces) in shown.iter().enumerate() {
        let _ = writeln!(out, "\nrow {row}");
        for of_example in pieces.chunk_by(|one, next| one.example == next.example) {
            let (file, line) = rows.examples().place(of_example[0].example);
            let _ = writeln!(out, "  {}, line {line}", name(file));
            let text: String = of_example
                .iter()
                .map(|piece| mark(piece, &printable(&piece.text), is_terminal))
                .collect();
            let _ = writeln!(out, "  text: {text}");
            let tokens: Vec<String> = of_example
                .iter()
                .map(|piece| mark(piece, &ids(&piece.tokens), is_terminal))
                .collect();
            let _ = writeln!(out, "  tokens: {}", tokens.join(" "));
        }
    }
    out
}

fn name(file: &Path) -> String {
    printable(&file.display().to_string())
}

fn ids(tokens: &[u32]) -> String {
    let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
    ids.join(" ")
}

fn mark(piece: &Piece, text: &str, is_terminal: bool) -> String {
    match (piece.trained, is_terminal) {
        (false, _) => text.to_owned(),
        (true, true) => marked(true, text),
        (true, false) => format!("[[{text}]]"),
    }
}

fn marked(force: bool, text: &str) -> String {
    let style = Style::new().green().underlined().force_styling(force);
    style.apply_to(text).to_string()
}

/// The text in one line, without control characters.
fn printable(text: &str) -> String {
    let escaped = |c: char| match c {
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

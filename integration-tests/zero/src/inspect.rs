//! `zero data`: a look at training data as a run reads it.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use console::Style;
use indicatif::HumanCount;
use serde_json::{Map, Value, json};
use zero_data::{
    DataKind, DataSource, EncoderSource, ExampleRows, RowOptions, TextTokenizer, TrainingData,
    check_tokenizer,
};
use zero_models::hf::HfFolder;
use zero_trainer::{IGNORED, ValidationData};

use crate::error::CliError;
use crate::flags::{find_model, model_help, parse_whole};
use crate::output::{print_note, print_text, printable};

/// Look at training data
#[derive(Args, Clone, Debug)]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand, Clone, Debug)]
enum DataCommand {
    /// Show what data is read as and why, and its first rows as tokens and text, with what is
    /// trained marked
    Inspect(InspectArgs),
}

/// The flags of `zero data inspect`.
#[derive(Args, Clone, Debug)]
struct InspectArgs {
    /// The data, as of `zero train`
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
    let inspected = open(args)?;
    let view = match inspected.data.example_rows() {
        Some(rows) => of_examples(rows, args.rows)?,
        None => of_stream(&inspected, args)?,
    };

    if args.json {
        let document = as_json(&inspected, &view);
        return print_text(format!("{document}\n"));
    }
    for notice in inspected.data.notices() {
        print_note(format_args!("note: {notice}"));
    }
    print_text(as_text(&inspected, &view))
}

/// Data, and what decided how it is read.
struct Inspected {
    data: TrainingData,
    kind: &'static str,
    why: String,
    tokenizer: Option<PathBuf>,
}

fn open(args: &InspectArgs) -> Result<Inspected, CliError> {
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
        encoder: EncoderSource {
            tokenizer: tokenizer.clone(),
            folder: folder.and_then(HfFolder::companions).map(ToOwned::to_owned),
            ..EncoderSource::now()
        },
    };
    let source = DataSource {
        path: Some(args.data.clone()),
        tokenizer: tokenizer.clone(),
        ..DataSource::default()
    };
    let kind = DataKind::of(&source).map_err(CliError::usage)?;
    let name = kind.name();
    let why = kind.why.clone();
    let data = TrainingData::open_as(&source, kind, &options).map_err(CliError::usage)?;
    if let Some((config, _)) = &found {
        let checked = data.validate(config.vocab_size(), args.seq_len);
        checked.map_err(CliError::usage)?;
    }
    Ok(Inspected {
        data,
        kind: name,
        why,
        tokenizer,
    })
}

/// The first rows of data.
struct View {
    rows: Vec<Vec<RowPart>>,
    /// Figures of all rows, for JSON.
    figures: Map<String, Value>,
    /// One line about all rows.
    summary: String,
}

/// The part of a row that is one example, or all of it.
struct RowPart {
    /// The file and the line, or the tokens.
    place: String,
    /// The same for JSON.
    keys: Map<String, Value>,
    pieces: Vec<Piece>,
}

/// Consecutive tokens that are trained, or not.
struct Piece {
    trained: bool,
    tokens: Vec<u32>,
    text: String,
}

/// The pieces of tokens, each with whether it is trained.
fn pieces(
    tokens: impl Iterator<Item = (u32, bool)>,
    decode: impl Fn(&[u32]) -> Result<String, CliError>,
) -> Result<Vec<Piece>, CliError> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (token, trained) in tokens {
        match pieces.last_mut() {
            Some(last) if last.trained == trained => last.tokens.push(token),
            _ => pieces.push(Piece {
                trained,
                tokens: vec![token],
                text: String::new(),
            }),
        }
    }
    for piece in &mut pieces {
        piece.text = decode(&piece.tokens)?;
    }
    Ok(pieces)
}

fn of_examples(rows: &ExampleRows, shown: usize) -> Result<View, CliError> {
    let examples = rows.examples();
    let part = |index: u32| {
        let example = examples.get(index as usize);
        // The last token is a target only.
        let tokens = (0..example.token_count().min(rows.seq_len() + 1)).map(|i| {
            let is_trained = i > 0 && example.target(i) != IGNORED;
            (example.token(i), is_trained)
        });
        let decode = |tokens: &[u32]| examples.decode(tokens).map_err(CliError::failure);
        let (file, line) = examples.place(index as usize);
        let file = file.display().to_string();
        Ok(RowPart {
            place: format!("{}, line {line}", printable(&file)),
            keys: object(json!({"file": file, "line": line})),
            pieces: pieces(tokens, decode)?,
        })
    };
    let row = |row: usize| rows.members(row).iter().map(|&index| part(index)).collect();
    let shown = (0..shown.min(rows.count())).map(row);

    let truncated = HumanCount(rows.truncated);
    let left_out = HumanCount(rows.untrained);
    Ok(View {
        rows: shown.collect::<Result<_, CliError>>()?,
        figures: object(json!({
            "examples": examples.count(),
            "rows": rows.count(),
            "seq_len": rows.seq_len(),
            "packed": rows.is_packed(),
            "trained_tokens": rows.all_trained(),
            "padding": rows.padding(),
            "truncated": rows.truncated,
            "left_out": rows.untrained,
        })),
        summary: format!("truncated: {truncated}, left out: {left_out}"),
    })
}

/// The first windows of a stream of tokens. Without a tokenizer, tokens have no text unless they
/// are bytes.
fn of_stream(inspected: &Inspected, args: &InspectArgs) -> Result<View, CliError> {
    let data = &inspected.data;
    let tokenizer = inspected.tokenizer.as_deref().map(TextTokenizer::open);
    let tokenizer = tokenizer.transpose().map_err(CliError::usage)?;
    let decode = |tokens: &[u32]| match &tokenizer {
        Some(tokenizer) => tokenizer.decode(tokens).map_err(CliError::failure),
        None if data.is_in_order() => Ok(String::new()),
        None => {
            let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        }
    };

    // Data that is shorter than a row is shown, too.
    let longest = data.len_tokens().saturating_sub(1).min(args.seq_len as u64);
    let windows = data.windows(longest as usize);
    let row = |row: u64| {
        let mut inputs = vec![0; longest as usize];
        let mut targets = vec![0; longest as usize];
        let read = data.window(row, &mut inputs, &mut targets);
        read.map_err(CliError::failure)?;
        let first = row * longest;
        let tokens = inputs.first().map(|&token| (token, false)).into_iter();
        let tokens = tokens.chain(targets.into_iter().map(|token| (token, true)));
        Ok(vec![RowPart {
            place: format!(
                "tokens {} to {}",
                HumanCount(first),
                HumanCount(first + longest)
            ),
            keys: object(json!({"first_token": first})),
            pieces: pieces(tokens, decode)?,
        }])
    };
    let shown = (0..windows.min(args.rows as u64)).map(row);

    let order = match data.is_in_order() {
        true => "rows are trained in this order",
        false => "rows are trained at random places",
    };
    Ok(View {
        rows: shown.collect::<Result<_, CliError>>()?,
        figures: object(json!({
            "tokens": data.len_tokens(),
            "rows": windows,
            "seq_len": longest,
        })),
        summary: order.to_owned(),
    })
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn as_json(inspected: &Inspected, view: &View) -> Value {
    let piece = |part: &RowPart, piece: &Piece| {
        let mut fields = part.keys.clone();
        fields.extend(object(json!({
            "trained": piece.trained,
            "tokens": piece.tokens,
            "text": piece.text,
        })));
        Value::Object(fields)
    };
    let of_part = |part: &RowPart| {
        part.pieces
            .iter()
            .map(|one| piece(part, one))
            .collect::<Vec<_>>()
    };
    let rows: Vec<Vec<Value>> = view
        .rows
        .iter()
        .map(|row| row.iter().flat_map(of_part).collect())
        .collect();

    let mut document = view.figures.clone();
    document.extend(object(json!({
        "kind": inspected.kind,
        "why": inspected.why,
        "first_rows": rows,
    })));
    Value::Object(document)
}

fn as_text(inspected: &Inspected, view: &View) -> String {
    let mut out = format!("{}\n", inspected.data.describe());
    out += &format!("read as {}: {}\n", inspected.kind, inspected.why);
    out += &format!("{}\n", view.summary);
    let is_terminal = console::colors_enabled();
    let legend = if is_terminal {
        format!("{} is trained", marked(true, "underlined text"))
    } else {
        "[[text in double brackets]] is trained".to_owned()
    };
    out += &format!("{legend}\n");

    for (row, parts) in view.rows.iter().enumerate() {
        out += &format!("\nrow {row}\n");
        for part in parts {
            out += &format!("  {}\n", part.place);
            let mark = |piece: &Piece, text: &str| mark(piece, text, is_terminal);
            let texts = part
                .pieces
                .iter()
                .map(|piece| mark(piece, &printable(&piece.text)));
            let texts: String = texts.collect();
            if part.pieces.iter().any(|piece| !piece.text.is_empty()) {
                out += &format!("  text: {texts}\n");
            }
            let tokens = part
                .pieces
                .iter()
                .map(|piece| mark(piece, &ids(&piece.tokens)));
            let tokens: Vec<String> = tokens.collect();
            out += &format!("  tokens: {}\n", tokens.join(" "));
        }
    }
    out
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

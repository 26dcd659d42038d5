//! `zero generate`: continues a text with the model of a folder or of a checkpoint, on the host.

use std::fs::File;
use std::io::Read;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::HumanCount;
use serde_json::json;
use zero_alloc::device::DType;
use zero_ckpt::Reader;
use zero_data::check_tokenizer;
use zero_models::generate::{Generator, GeneratorOptions, Sampling};
use zero_models::hf::adapters::{Adapters, adapted_model};
use zero_models::hf::{HfError, HfFolder, companions};
use zero_models::ops::Threads;

use crate::codec::{Codec, Decoder};
use crate::error::CliError;
use crate::flags::{check_positive, limit_of_positions, parse_whole};
use crate::model_files::base_of;
use crate::output::{bytes, print_note, print_text};
use crate::settings::record::RunRecord;

/// Longest file of a prompt.
const MAX_PROMPT_BYTES: u64 = 64 << 20;

/// Continue a text with a model, on the CPU
#[derive(Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("weights").required(true).args(["model", "checkpoint"])))]
#[command(group(clap::ArgGroup::new("text").required(true).args(["prompt", "prompt_file", "token_ids"])))]
pub struct GenerateArgs {
    /// A Hugging Face folder
    #[arg(long, value_name = "HF_DIR")]
    pub model: Option<PathBuf>,
    /// A checkpoint, or a folder of checkpoints, of which the newest whole one is taken
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Take the checkpoint of the lowest validation loss
    #[arg(long, requires = "checkpoint")]
    pub best: bool,
    /// A folder of PEFT, whose adapters are merged into the weights of --model
    #[arg(long, value_name = "DIR", requires = "model")]
    pub lora: Option<PathBuf>,
    /// The folder of the base of a --checkpoint with adapters [default: that of its run]
    #[arg(long, value_name = "HF_DIR", requires = "checkpoint")]
    pub base: Option<PathBuf>,
    /// The text to continue
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// A file with the text to continue
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// The tokens to continue, such as 1,2,3; without a tokenizer, those that follow are printed
    /// so, too
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = parse_whole::<u32>)]
    pub token_ids: Option<Vec<u32>>,
    /// Most tokens to generate; fewer if the model ends the text, or its positions end
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, default_value = "128")]
    pub tokens: u64,
    /// Divides the logits before tokens are drawn; 0 takes the most likely token
    #[arg(long, value_name = "X", default_value = "0")]
    pub temperature: f32,
    /// Draw from the K most likely tokens only; 0 for all
    #[arg(long, value_name = "K", value_parser = parse_whole::<usize>, default_value = "0")]
    pub top_k: usize,
    /// Draw from the most likely tokens that together have the probability P
    #[arg(long, value_name = "P", default_value = "1")]
    pub top_p: f32,
    /// Seed of what is drawn
    #[arg(long, value_name = "S", value_parser = parse_whole::<u64>, default_value = "0")]
    pub seed: u64,
    /// Tokenizer: a tokenizer.json, or a folder with it or with GPT-2's vocab.json and merges.txt
    /// [default: that of the folder or of the run; bytes for a model of bytes]
    #[arg(long, value_name = "FILE|DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Where to compute
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: GenerateDevice,
    /// Type of the weights in memory [default: bf16 if the folder's are, else fp32]
    #[arg(long, value_enum)]
    pub dtype: Option<GenerateDtype>,
    /// Threads [default: the cores]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>)]
    pub threads: Option<u64>,
    /// Print one JSON object with the tokens, at the end
    #[arg(long)]
    pub json: bool,
}

/// The devices of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GenerateDevice {
    /// The host.
    Cpu,
    /// A GPU: not yet.
    Cuda,
}

/// The types of weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GenerateDtype {
    /// IEEE single precision.
    Fp32,
    /// bfloat16.
    Bf16,
}

/// Runs `zero generate`.
///
/// # Errors
/// Flags, a folder or a prompt that cannot be used, or weights that cannot be read.
pub fn run(args: &GenerateArgs) -> Result<(), CliError> {
    let sampling = sampling(args)?;
    let source = WeightSource::open(args)?;
    for warning in source.folder.warnings() {
        print_note(format_args!("note: {warning}"));
    }

    let config = source.folder.config();
    let tokenizer = source.tokenizer(args)?;
    if let Some(path) = &tokenizer {
        let found = check_tokenizer(path, source.folder.companions(), config.vocab_size());
        if let Some(notice) = found.map_err(CliError::usage)? {
            print_note(format_args!("note: {notice}"));
        }
    }
    let codec = match args.token_ids {
        Some(_) => Codec::of_tokens(tokenizer, config.vocab_size())?,
        None => Codec::open(tokenizer, config.vocab_size())?,
    };
    let prompt = prompt(args, &codec)?;
    let positions = config.max_positions();
    if prompt.len() >= positions {
        return Err(usage!(
            "the prompt has {} tokens, and the model positions for {positions}: no token can follow; shorten the prompt{}",
            HumanCount(prompt.len() as u64),
            limit_of_positions(config)
        ));
    }

    let wanted = usize::try_from(args.tokens).unwrap_or(usize::MAX);
    let context = prompt.len().saturating_add(wanted).min(positions);
    let dtype = match args.dtype {
        Some(GenerateDtype::Bf16) => DType::Bf16,
        Some(GenerateDtype::Fp32) => DType::F32,
        None if source.folder.is_bf16() => DType::Bf16,
        None => DType::F32,
    };
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = args.threads.map_or(cores, |n| n as usize);
    let options = GeneratorOptions {
        context,
        dtype,
        threads: Threads::new(threads).map_err(CliError::failure)?,
    };
    let read = |name: &str, range, out: &mut [f32]| Ok(source.folder.read(name, range, out)?);
    let mut generator = Generator::new(config, &read, options).map_err(CliError::failure)?;

    let mut text = Text::new(&codec, !args.json);
    let ends = source.end_tokens()?;
    let done = generate(
        &mut generator,
        &prompt,
        context - prompt.len(),
        &sampling,
        &ends,
        &mut text,
    )?;
    report(args, &prompt, &done, &mut text, &generator, dtype)
}

fn sampling(args: &GenerateArgs) -> Result<Sampling, CliError> {
    check_positive(&[("--tokens", Some(args.tokens)), ("--threads", args.threads)])?;
    if args.device == GenerateDevice::Cuda {
        return Err(usage!(
            "--device cuda: generation runs on the CPU only so far; remove the flag"
        ));
    }
    if !(0.0..f32::INFINITY).contains(&args.temperature) {
        let got = args.temperature;
        return Err(usage!(
            "--temperature {got}: expected 0 or a positive number"
        ));
    }
    if !(0.0..=1.0).contains(&args.top_p) {
        let got = args.top_p;
        return Err(usage!("--top-p {got}: expected a probability from 0 to 1"));
    }
    Ok(Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    })
}

/// The tokens to continue.
fn prompt(args: &GenerateArgs, codec: &Codec) -> Result<Vec<u32>, CliError> {
    let text = match (&args.token_ids, &args.prompt, &args.prompt_file) {
        (Some(tokens), ..) => return Ok(tokens.clone()),
        (None, Some(text), _) => text.clone().into_bytes(),
        (None, None, Some(file)) => read_prompt(file)?,
        // The group of these flags requires one.
        (None, None, None) => Vec::new(),
    };
    let tokens = codec.encode(text)?;
    if tokens.is_empty() {
        return Err(usage!(
            "the prompt has no tokens: write at least a character"
        ));
    }
    Ok(tokens)
}

/// The text of a file or a pipe.
fn read_prompt(path: &Path) -> Result<Vec<u8>, CliError> {
    let failed = |why: &dyn std::fmt::Display| usage!("{}: {why}", path.display());
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| {
        file.take(MAX_PROMPT_BYTES + 1)
            .read_to_end(&mut text)
            .map(drop)
    });
    read.map_err(|e| failed(&format_args!("failed to read: {e}")))?;
    if text.len() as u64 > MAX_PROMPT_BYTES {
        return Err(failed(&format_args!(
            "the prompt is longer than {MAX_PROMPT_BYTES} bytes"
        )));
    }
    Ok(text)
}

/// The weights, and the run that made them.
struct WeightSource {
    folder: HfFolder,
    run: Option<RunRecord>,
}

impl WeightSource {
    fn open(args: &GenerateArgs) -> Result<Self, CliError> {
        let folder = match (&args.model, &args.checkpoint) {
            (Some(path), _) => HfFolder::open(path),
            (None, Some(path)) if args.best => HfFolder::open_best(path),
            (None, Some(path)) => HfFolder::open(path),
            (None, None) => return Err(usage!("name a model")),
        };
        let folder = match (folder, &args.lora) {
            (Err(HfError::OnlyAdapters { path }), _) => return Self::of_adapters(&path, args),
            (Ok(folder), Some(lora)) => {
                let adapters = Adapters::open(lora, folder.config());
                adapters.map(|adapters| folder.with_merged(adapters))
            }
            (folder, None) => folder,
            (Err(error), _) => Err(error),
        };
        let folder = folder.map_err(CliError::usage)?;
        let run = folder.checkpoint().map_or(Ok(None), RunRecord::of)?;
        Ok(Self { folder, run })
    }

    /// The adapters of a checkpoint, merged into their base.
    fn of_adapters(checkpoint: &Path, args: &GenerateArgs) -> Result<Self, CliError> {
        let reader = Reader::open(checkpoint).map_err(CliError::usage)?;
        let run = RunRecord::of(&reader)?;
        let base = base_of(&reader, args.base.as_deref(), "--base")?;
        let model = adapted_model(&reader).map_err(CliError::usage)?;
        let folder = match model {
            Some(model) => base.with_merged(Adapters::of_checkpoint(model, reader)),
            None => base,
        };
        Ok(Self { folder, run })
    }

    /// The tokenizer of the flag, of the folder, or of the run that saved the checkpoint.
    fn tokenizer(&self, args: &GenerateArgs) -> Result<Option<PathBuf>, CliError> {
        let found = match &args.tokenizer {
            Some(flag) => Some(flag.clone()),
            None => self.folder.tokenizer().map_err(CliError::usage)?,
        };
        let Some(recorded) = self
            .run
            .as_ref()
            .and_then(|run| run.data.tokenizer.as_ref())
        else {
            return Ok(found);
        };
        let recorded = PathBuf::from(recorded);
        if found.is_none() && !recorded.exists() {
            if args.token_ids.is_some() {
                return Ok(None);
            }
            return Err(usage!(
                "{}: the tokenizer of the run does not exist; pass its new path with --tokenizer",
                recorded.display()
            ));
        }
        Ok(found.or(Some(recorded)))
    }

    /// The tokens that end a text: of a checkpoint of an older version also those of the folder
    /// that the run started from, which may have more than its `config.json`.
    fn end_tokens(&self) -> Result<Vec<u32>, CliError> {
        let mut ends = self.folder.end_tokens().map_err(CliError::usage)?;
        if let (None, Some(run)) = (self.folder.companions(), &self.run) {
            let of_run = companions::end_tokens_in(run.model.weights.as_ref());
            ends.extend(of_run.map_err(CliError::usage)?);
        }
        Ok(ends)
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Token,
    Wanted,
}

/// What was generated.
struct Done {
    tokens: Vec<u32>,
    end: End,
    /// The time of the prompt, and of all tokens after the first.
    prompt: Duration,
    rest: Duration,
}

fn generate(
    generator: &mut Generator,
    prompt: &[u32],
    count: usize,
    sampling: &Sampling,
    ends: &[u32],
    text: &mut Text<'_>,
) -> Result<Done, CliError> {
    let start = Instant::now();
    let mut logits = generator.feed(prompt).map_err(CliError::usage)?;
    let prompt_time = start.elapsed();

    let start = Instant::now();
    let mut tokens = Vec::new();
    let mut end = End::Wanted;
    loop {
        let chosen = sampling.choose(&logits, tokens.len() as u64);
        let token = chosen.ok_or_else(|| {
            let at = tokens.len();
            failure!("the logits of token {at} are not finite: these weights are damaged; use another checkpoint")
        })?;
        if ends.contains(&token) {
            end = End::Token;
            break;
        }
        tokens.push(token);
        text.add(token)?;
        if tokens.len() == count {
            break;
        }
        logits = generator.feed(&[token]).map_err(CliError::failure)?;
    }
    Ok(Done {
        tokens,
        end,
        prompt: prompt_time,
        rest: start.elapsed(),
    })
}

/// The text so far, printed as it is made.
struct Text<'a> {
    decoder: Decoder<'a>,
    whole: Vec<u8>,
    prints: bool,
    /// Whether it is the text of the tokens, and not their numbers.
    has_text: bool,
}

impl<'a> Text<'a> {
    fn new(codec: &'a Codec, prints: bool) -> Self {
        Self {
            decoder: codec.decoder(),
            whole: Vec::new(),
            prints,
            has_text: codec.has_text(),
        }
    }

    fn add(&mut self, token: u32) -> Result<(), CliError> {
        let part = self.decoder.next(token)?;
        self.append(part)
    }

    fn append(&mut self, part: Vec<u8>) -> Result<(), CliError> {
        if self.prints {
            print_text(&part)?;
        }
        self.whole.extend(part);
        Ok(())
    }
}

fn report(
    args: &GenerateArgs,
    prompt: &[u32],
    done: &Done,
    text: &mut Text<'_>,
    generator: &Generator,
    dtype: DType,
) -> Result<(), CliError> {
    let rest = text.decoder.rest()?;
    text.append(rest)?;
    let end = match done.end {
        End::Token => "end_token",
        End::Wanted if (done.tokens.len() as u64) < args.tokens => "context",
        End::Wanted => "tokens",
    };
    // The first token is that of the prompt's pass.
    let passes = done.tokens.len().saturating_sub(1) + usize::from(done.end == End::Token);
    let passes = passes.min(generator.len() - prompt.len());
    let tokens_per_s = passes as f64 / done.rest.as_secs_f64().max(1e-9);
    if args.json {
        let document = json!({
            "prompt": prompt,
            "tokens": done.tokens,
            "text": text.has_text.then(|| String::from_utf8_lossy(&text.whole)),
            "end": end,
            "prompt_s": done.prompt.as_secs_f64(),
            "tokens_per_s": tokens_per_s,
            "dtype": dtype.to_string(),
            "weight_bytes_per_token": generator.bytes_of_token(),
        });
        return print_text(format!("{document}\n"));
    }

    print_text("\n")?;
    let read = tokens_per_s * generator.bytes_of_token() as f64;
    print_note(format_args!(
        "note: prompt of {} tokens in {:.3} s; then {tokens_per_s:.1} tokens/s, {}/s of {dtype} weights; ended by {}",
        prompt.len(),
        done.prompt.as_secs_f64(),
        bytes(read as u64),
        match end {
            "end_token" => "the model's end token",
            "context" => "the model's last position",
            _ => "--tokens",
        }
    ));
    Ok(())
}

//! Examples from files: tokens, what is trained, rows and errors.

use std::fs;
use std::path::{Path, PathBuf};

use integration_tests::{Files, Folder, Printed};
use serde_json::Value;
use zero_trainer::{Batch, BatchAt, IGNORED};

use super::conversation::Conversation;
use super::encode::Encoder;
use super::template::{ChatTemplate, Rendered, SpecialTokens};
use super::trace::Traced;
use super::{EncoderSource, Examples, RowOptions, TrainingData};
use crate::kind::{Content, DataKind};
use crate::{DataError, DataSource};

fn oracle(name: &str) -> PathBuf {
    integration_tests::data("../examples").join(name)
}

fn source() -> EncoderSource {
    EncoderSource {
        tokenizer: Some(oracle("tokenizer")),
        ..EncoderSource::default()
    }
}

fn open(path: &Path, encoder: EncoderSource) -> Result<Examples, DataError> {
    let kind = DataKind::of(&DataSource::at(path))?;
    let Content::Examples(files) = kind.content else {
        panic!("{}: {kind:?}", path.display());
    };
    Examples::open(path, files, &encoder)
}

/// The trained tokens of an example.
fn trained(examples: &Examples, index: usize) -> String {
    let example = examples.get(index);
    let targets = (0..example.token_count()).map(|i| example.target(i));
    let targets: Vec<u32> = targets.filter(|&target| target != IGNORED).collect();
    examples.decode(&targets).unwrap()
}

fn all(examples: &Examples, index: usize) -> String {
    let example = examples.get(index);
    let tokens: Vec<u32> = (0..example.token_count())
        .map(|i| example.token(i))
        .collect();
    examples.decode(&tokens).unwrap()
}

#[test]
fn tokens_are_those_of_transformers() {
    let examples = open(&oracle("examples.jsonl"), source()).unwrap();
    let text = fs::read_to_string(oracle("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    for (index, expected) in expected["examples"].as_object().unwrap() {
        let example = examples.get(index.parse().unwrap());
        let given = expected["given"].as_u64().unwrap() as usize;
        let tokens: Vec<u32> = serde_json::from_value(expected["tokens"].clone()).unwrap();
        for (i, &token) in tokens.iter().enumerate() {
            assert_eq!(example.token(i), token);
            let target = if i >= given { token } else { IGNORED };
            assert_eq!(example.target(i), target, "example {index}, token {i}");
        }
    }
    assert_eq!(examples.moved, 0);
    assert_eq!(examples.place(20).1, 21);
}

#[test]
fn assistant_is_trained() {
    let dir = &Folder::on_disk();
    let path = dir.join("chat.jsonl");
    let turn = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let messages = [
        turn("user", "Who waits?"),
        turn("assistant", "The host."),
        turn("user", "So?"),
        turn("assistant", "Yes."),
    ];
    let line = serde_json::json!({"messages": messages});
    let split = serde_json::json!({"prompt": messages[..3], "completion": messages[3..]});
    fs::write(&path, format!("{line}\n")).unwrap();

    let examples = open(&path, source()).unwrap();
    let whole = "<|im_start|>user\nWho waits?<|im_end|>\n<|im_start|>assistant\nThe host.<|im_end|>\n\
                 <|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n";
    assert_eq!(all(&examples, 0), whole);
    assert_eq!(
        trained(&examples, 0),
        "The host.<|im_end|>\nYes.<|im_end|>\n"
    );

    fs::write(&path, format!("{split}\n")).unwrap();
    let examples = open(&path, source()).unwrap();
    assert_eq!(all(&examples, 0), whole);
    assert_eq!(trained(&examples, 0), "Yes.<|im_end|>\n");

    let without = EncoderSource::default();
    let error = open(&path, without).err().unwrap().to_string();
    error.shows(&["chat.jsonl, line 1: messages need a chat template"]);
}

/// The end of a prompt is what the tokenizer adds, not what looks like it.
#[test]
fn end_token_in_a_prompt_is_given() {
    let dir = &Folder::on_disk();
    let path = dir.join("a.jsonl");
    fs::write(
        &path,
        r#"{"prompt": "Who waits?<|end|>", "completion": " The host."}"#,
    )
    .unwrap();
    let examples = open(&path, source()).unwrap();
    assert_eq!(all(&examples, 0), "Who waits?<|end|> The host.<|end|>");
    assert_eq!(trained(&examples, 0), " The host.<|end|>");

    // Tokenizers that put the same token behind each text, or before it.
    let folder = oracle("tokenizer");
    let json = folder.text("tokenizer.json");
    let mut json: Value = serde_json::from_str(&json).unwrap();
    let added = json["added_tokens"].as_array().unwrap();
    let end = added
        .iter()
        .find(|token| token["content"] == "<|end|>")
        .unwrap()["id"]
        .clone();
    let [text, token] = [
        serde_json::json!({"Sequence": {"id": "A", "type_id": 0}}),
        serde_json::json!({"SpecialToken": {"id": "<|end|>", "type_id": 0}}),
    ];
    let config = folder.bytes("tokenizer_config.json");
    for (single, expected) in [
        (
            [text.clone(), token.clone()],
            "Who waits?<|end|> The host.<|end|>",
        ),
        ([token, text], "<|end|>Who waits?<|end|> The host.<|end|>"),
    ] {
        json["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing", "single": single, "pair": [],
            "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [end], "tokens": ["<|end|>"]}},
        });
        let folder = dir.join("tokenizer");
        fs::create_dir_all(&folder).unwrap();
        folder.write("tokenizer.json", json.to_string());
        folder.write("tokenizer_config.json", &config);
        let source = EncoderSource {
            tokenizer: Some(folder),
            ..EncoderSource::default()
        };
        let examples = open(&path, source).unwrap();
        assert_eq!(all(&examples, 0), expected);
        assert_eq!(trained(&examples, 0), " The host.<|end|>");
    }
}

#[test]
fn text_is_trained_whole() {
    let dir = &Folder::on_disk();
    for name in ["a.jsonl", "b.jsonl"] {
        dir.write(name, "{\"text\": \"Who waits?\"}\n\n");
    }
    let examples = open(dir, source()).unwrap();
    assert_eq!(examples.count(), 2);
    assert_eq!(trained(&examples, 1), "Who waits?<|end|>");
    assert!(examples.place(1).0.ends_with("b.jsonl"));
}

/// As the lines of one file, whatever the layout of the rows.
#[test]
fn rows_are_read_from_lines_and_arrays() {
    let dir = &Folder::on_disk();
    let path = dir.join("a.json");
    let rows = [
        r#"{"prompt": "Who waits?", "completion": " The host."}"#,
        r#"{"prompt": "So?", "completion": " Yes.", "score": NaN}"#,
    ];
    for (content, line) in [
        (rows.join("\n"), 2),
        (format!("\u{feff}{}\r\n\r\n", rows.join("\r\n")), 2),
        (format!("[\n {}\n]\n", rows.join(",\n\n ")), 4),
        (format!("[{}]", rows.join(",")), 1),
    ] {
        fs::write(&path, &content).unwrap();
        let examples = open(&path, source()).unwrap();
        assert_eq!(examples.count(), 2);
        assert_eq!(all(&examples, 0), "Who waits? The host.<|end|>");
        assert_eq!(trained(&examples, 1), " Yes.<|end|>");
        assert_eq!(examples.place(1).1, line, "{content}");
    }
}

/// The rows of other trainers give the tokens of `messages` and of `prompt` and `completion`.
#[test]
fn rows_of_other_trainers_are_read() {
    let dir = &Folder::on_disk();
    let path = dir.join("a.jsonl");
    let conversation = r#"{"conversations": [{"from": "human", "value": "Who waits?"}, {"from": "gpt", "value": "The host."}]}"#;
    fs::write(&path, conversation).unwrap();
    let examples = open(&path, source()).unwrap();
    let whole =
        "<|im_start|>user\nWho waits?<|im_end|>\n<|im_start|>assistant\nThe host.<|im_end|>\n";
    assert_eq!(all(&examples, 0), whole);
    assert_eq!(trained(&examples, 0), "The host.<|im_end|>\n");

    fs::write(
        &path,
        r#"{"instruction": "Who waits?", "input": "", "output": "The host."}"#,
    )
    .unwrap();
    let examples = open(&path, source()).unwrap();
    let prompt = "Below is an instruction that describes a task. Write a response that appropriately completes the \
                  request.\n\n### Instruction:\nWho waits?\n\n### Response:";
    assert_eq!(all(&examples, 0), format!("{prompt}The host.<|end|>"));
    assert_eq!(trained(&examples, 0), "The host.<|end|>");
}

#[test]
fn split_keeps_all_examples() {
    let whole = open(&oracle("examples.jsonl"), source()).unwrap();
    let (first, last) = open(&oracle("examples.jsonl"), source())
        .unwrap()
        .split(0.2);
    assert_eq!((first.count(), last.count()), (16, 5));
    for index in 0..5 {
        assert_eq!(all(&last, index), all(&whole, 16 + index));
        assert_eq!(last.place(index), whole.place(16 + index));
    }
    assert_ne!(first.fingerprint, whole.fingerprint);
}

#[test]
fn token_outside_the_vocabulary_is_named() {
    let examples = open(&oracle("examples.jsonl"), source()).unwrap();
    examples.validate(256).unwrap();
    let error = examples.validate(100).unwrap_err().to_string();
    error.shows(&["examples.jsonl, line 1: token ", "vocabulary of 100"]);
}

/// The trained tokens of all batches of a step, divided by their divisors, sum to ranks x
/// micro-batches, also in the last step of an epoch.
#[test]
fn divisor_is_the_mean_over_the_step() {
    let source = DataSource::at(oracle("examples.jsonl")).with_tokenizer(oracle("tokenizer"));
    for pack in [false, true] {
        let options = RowOptions {
            seq_len: 24,
            pack,
            encoder: self::source(),
            ..RowOptions::default()
        };
        let data = TrainingData::open(&source, &options).unwrap();
        assert!(
            data.describe()
                .contains("21 examples (`prompt` and `completion`)")
        );
        assert!(
            data.notices()[0].contains("are longer than --seq-len 24")
                || data.notices()[0].contains("is longer")
        );
        for step in 0..2 * data.pace(12).steps_of_epoch().unwrap() {
            let mut sum = 0.0;
            for (micro_batch_index, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let at = BatchAt {
                    step,
                    micro_batch_index,
                    grad_accum: 2,
                    rank,
                    world_size: 2,
                    micro_batch: 3,
                    seq_len: 24,
                    seed: 1,
                };
                let mut batch = Batch::zeros(72);
                data.batch(at, &mut batch).unwrap();
                assert_eq!(batch.starts.len(), if pack { 72 } else { 0 });
                sum += batch.trained(72) as f64 / batch.divisor;
            }
            assert!((sum - 4.0).abs() < 1e-12, "{sum}");
        }
    }
}

#[test]
fn plain_data_has_epochs() {
    let dir = &Folder::on_disk();
    let path = dir.join("text.txt");
    let text: Vec<u8> = (1..42).collect();
    fs::write(&path, &text).unwrap();
    let options = RowOptions {
        seq_len: 4,
        by_epochs: true,
        ..RowOptions::default()
    };
    let data = TrainingData::open(&DataSource::at(&path), &options).unwrap();
    assert_eq!(data.pace(4).steps_of_epoch(), Some(3));
    let mut first = Vec::new();
    for step in 0..3 {
        let at = BatchAt {
            step,
            micro_batch_index: 0,
            grad_accum: 1,
            rank: 0,
            world_size: 1,
            micro_batch: 4,
            seq_len: 4,
            seed: 1,
        };
        let mut batch = Batch::zeros(16);
        data.batch(at, &mut batch).unwrap();
        assert_eq!(batch.divisor, if step < 2 { 16.0 } else { 8.0 });
        let trained = batch
            .inputs
            .iter()
            .zip(&batch.targets)
            .filter(|(_, target)| **target != IGNORED);
        for (input, target) in trained {
            assert_eq!(input + 1, *target);
            first.push(*input);
        }
    }
    assert_ne!(first[..4], [1, 2, 3, 4]);
    first.sort_unstable();
    assert_eq!(first, (1..41).collect::<Vec<u32>>());
}

/// The cases of the oracle: the template, the rendering, the messages and tools.
fn chat_cases() -> Vec<(
    ChatTemplate,
    Value,
    Vec<minijinja::Value>,
    Option<minijinja::Value>,
)> {
    let text = fs::read_to_string(oracle("chat.json")).unwrap();
    let oracle: Value = serde_json::from_str(&text).unwrap();
    // The order of keys counts.
    let ordered: minijinja::Value = serde_json::from_str(&text).unwrap();
    let special = [("bos_token", "<|im_start|>"), ("eos_token", "<|end|>")];
    let special: SpecialTokens = special
        .map(|(name, text)| (name.into(), text.into()))
        .into();
    let mut cases = Vec::new();
    for (index, case) in oracle["renderings"].as_array().unwrap().iter().enumerate() {
        let name = case["template"].as_str().unwrap();
        let template = oracle["templates"][name].as_str().unwrap();
        let now = oracle["now"].as_i64().unwrap();
        let template =
            ChatTemplate::new(PathBuf::from(name), template, special.clone(), now).unwrap();
        let messages = ordered.get_attr("conversations").unwrap();
        let messages = messages
            .get_attr(case["conversation"].as_str().unwrap())
            .unwrap();
        let messages = messages.try_iter().unwrap().collect();
        let rendering = ordered
            .get_attr("renderings")
            .unwrap()
            .get_item_by_index(index)
            .unwrap();
        let tools = rendering.get_attr("tools").unwrap();
        cases.push((
            template,
            case.clone(),
            messages,
            Some(tools).filter(|tools| !tools.is_none()),
        ));
    }
    cases
}

#[test]
fn templates_render_as_by_transformers() {
    for (template, case, messages, tools) in chat_cases() {
        let what = format!("{}, {}", case["template"], case["conversation"]);
        let unmarked = |text: Traced| text.text.replace(['\u{fdd0}', '\u{fdd1}'], "");
        let text = template
            .text(&messages, tools.as_ref(), false)
            .map(unmarked);
        if let Some(error) = case["error"].as_str() {
            let got = text.unwrap_err();
            assert!(got.contains(error), "{what}: {got}");
            continue;
        }
        assert_eq!(text.unwrap(), case["text"].as_str().unwrap(), "{what}");
        let prompt = template.text(&messages[..messages.len() - 1], tools.as_ref(), true);
        assert_eq!(
            unmarked(prompt.unwrap()),
            case["prompt"].as_str().unwrap(),
            "{what}"
        );
    }
}

#[test]
fn assistant_spans_are_those_of_transformers() {
    let encoder = Encoder::open(&source()).unwrap();
    for (template, case, messages, tools) in chat_cases() {
        let what = format!("{}, {}", case["template"], case["conversation"]);
        let conversation = Conversation {
            messages: messages.clone(),
            given: 0,
            tools,
        };
        let rendered = template.render(&conversation);
        if let (Some(tokens), Ok(rendered)) = (case["tokens"].as_array(), &rendered) {
            let encoded = encoder.rendered(rendered).unwrap();
            assert_eq!(
                Value::from(encoded.tokens),
                Value::from(tokens.clone()),
                "{what}"
            );
            let mask: Vec<u32> = encoded.trained.into_iter().map(u32::from).collect();
            assert_eq!(Value::from(mask), case["mask"], "{what}");
            continue;
        }
        let Ok(rendered) = rendered else { continue };
        // By prefixes: each span has the content of its message, and the last ends the text.
        let assistant = messages
            .iter()
            .filter(|message| super::messages::is_assistant(message));
        let contents: Vec<String> = assistant
            .map(|message| message.get_attr("content").unwrap().to_string())
            .collect();
        assert_eq!(rendered.spans.len(), contents.len(), "{what}");
        for (span, content) in rendered.spans.iter().zip(contents) {
            let content = content.split("</think>").last().unwrap().trim();
            assert!(rendered.text[span.clone()].contains(content), "{what}");
        }
        assert_eq!(rendered.spans.last().unwrap().end, rendered.text.len());
    }
}

/// Masks of templates that render a message otherwise by its place, of which transformers has the
/// masks by generation blocks.
#[test]
fn masks_of_histories_are_those_of_transformers() {
    let encoder = Encoder::open(&source()).unwrap();
    let text = fs::read_to_string(oracle("chat.json")).unwrap();
    let oracle: Value = serde_json::from_str(&text).unwrap();
    for (name, history) in oracle["histories"].as_object().unwrap() {
        let template = chat_template(history["template"].as_str().unwrap());
        for (title, mask) in history["masks"].as_object().unwrap() {
            let mut line = serde_json::json!({"messages": oracle["turns"][title]});
            if title.contains("tool") {
                line["tools"] = oracle["renderings"][3]["tools"].clone();
            }
            let rendered = render(&template, &line);
            let Some(mask) = mask.as_str() else {
                assert!(rendered.is_err(), "{name}, {title}");
                continue;
            };
            let encoded = encoder.rendered(&rendered.unwrap()).unwrap();
            let got = encoded.trained.iter().map(|&one| u8::from(one).to_string());
            assert_eq!(got.collect::<String>(), mask, "{name}, {title}");
        }
    }
}

fn chat_template(text: &str) -> ChatTemplate {
    let special = [("bos_token", "<|im_start|>"), ("eos_token", "<|end|>")];
    let special: SpecialTokens = special
        .map(|(name, text)| (name.into(), text.into()))
        .into();
    ChatTemplate::new(PathBuf::from("t"), text, special, 1_722_000_000).unwrap()
}

fn render(template: &ChatTemplate, line: &Value) -> Result<Rendered, String> {
    template.render(&Conversation::parse(&line.to_string())?)
}

/// The text with what is trained in brackets.
fn shown(template: &str, line: &Value) -> String {
    match render(&chat_template(template), line) {
        Ok(Rendered { text, spans, .. }) => {
            let mut out = text;
            for span in spans.iter().rev() {
                out.insert(span.end, ']');
                out.insert(span.start, '[');
            }
            out
        }
        Err(error) => format!("error: {error}"),
    }
}

/// The loop writes into a variable, so that only beginnings tell which text is whose.
#[test]
fn captured_turns_are_found_by_beginnings() {
    let template = |turn: &str| {
        format!(
            "{{% set all %}}{{% for m in messages %}}{turn}{{% endfor %}}{{% endset %}}{{{{ all }}}}\
             {{% if add_generation_prompt %}}assistant:{{% endif %}}"
        )
    };
    let line = serde_json::json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "a"},
    ]});
    assert_eq!(
        shown(&template("{{ m.role }}:{{ m.content }};"), &line),
        "user:a;assistant:[b;]user:b;assistant:[a;]"
    );
    let error = shown(
        &template("{{ loop.length }}{{ m.role }}:{{ m.content }};"),
        &line,
    );
    error.shows(&["the text of message 2 is not found"]);
}

/// Text that is written at another message is an error, and not a guess.
#[test]
fn turns_that_are_written_later_are_errors() {
    let line = serde_json::json!({"messages": [
        {"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]});
    // The question is in the text of the reply, and the reply in that of the next question.
    for template in [
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ loop.length }}Q: {{ messages[loop.index0 - 1].content }} A: \
         {{ m.content }};{% endif %}{% endfor %}",
        "{% set ns = namespace(last='') %}{{ messages | length }}{% for m in messages %}{{ ns.last }};\
         {% set ns.last = m.content %}{% endfor %}{{ ns.last }}",
    ] {
        let error = shown(template, &line);
        error.shows(&["message 2 is not found"]);
    }
}

#[test]
fn headers_are_what_prompts_and_turns_share() {
    let line = serde_json::json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "thinking": "e"},
    ]});
    let history = |turn: &str, prompt: &str| {
        format!(
            "{{{{ messages | length }}}}{{% for m in messages %}}{{% if m.role == 'user' %}}<u>{{{{ m.content }}}}{{% else %}}{turn}\
             {{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
        )
    };
    for (turn, prompt, expected) in [
        (
            "<a>{{ m.content }}</s>",
            "<a>",
            "4<u>a<a>[b</s>]<u>c<a>[d</s>]",
        ),
        // A thought is the message's, also where the prompt opens it.
        (
            "<a>{% if loop.last %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}",
            "<a><think>",
            "4<u>a<a>[b]<u>c<a>[<think>e</think>d]",
        ),
        // The prompt ends in another tag than the message has, or within a header.
        (
            "<a><b>{{ m.content }}",
            "<a><c>",
            "4<u>a<a>[<b>b]<u>c<a>[<b>d]",
        ),
        ("<a b>{{ m.content }}", "<a", "4<u>a[<a b>b]<u>c[<a b>d]"),
        // No header, and one of which the content is a part.
        ("{{ m.content }}</s>", "<a>", "4<u>a[b</s>]<u>c[d</s>]"),
        ("b:{{ m.content }}", "b:", "4<u>ab:[b]<u>cb:[d]"),
    ] {
        assert_eq!(shown(&history(turn, prompt), &line), expected);
    }
}

/// A completion begins behind its prompt, also where the prompt is rendered otherwise alone.
#[test]
fn completion_begins_behind_its_header() {
    let template = "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}\
                    {% if add_generation_prompt %}<assistant>{% endif %}";
    let turn = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let line = serde_json::json!({
        "prompt": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")],
        "completion": [turn("assistant", "d")],
    });
    assert_eq!(
        shown(template, &line),
        "4<user>a;<assistant>b;<user>c;<assistant>[d;]"
    );
}

#[test]
fn characters_that_mark_blocks_are_refused() {
    let line = serde_json::json!({"messages": [
        {"role": "assistant", "content": [{"type": "text", "text": "a\u{fdd0}"}]},
    ]});
    let plain = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}";
    assert_eq!(shown(plain, &line), "[a\u{fdd0}]");
    let marked = "{% generation %}{{ messages[0].content[0].text }}{% endgeneration %}";
    let error = shown(marked, &line);
    error.shows(&["U+FDD0"]);
}

/// The token that ends a turn may be the header of the next message.
#[test]
fn next_header_that_ends_a_turn_is_trained() {
    let dir = &Folder::on_disk();
    for file in fs::read_dir(oracle("tokenizer")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.join(file.file_name())).unwrap();
    }
    let line = serde_json::json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]});
    let template = "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '\n' }}{{ m.content }}{% endfor %}\
                    {% if add_generation_prompt %}{{ '\n' }}{% endif %}";
    let rendered = render(&chat_template(template), &line).unwrap();
    let trained = |ends: &str| {
        dir.write("generation_config.json", ends);
        let source = EncoderSource {
            tokenizer: Some(dir.to_path_buf()),
            ..EncoderSource::default()
        };
        let encoder = Encoder::open(&source).unwrap();
        let encoded = encoder.rendered(&rendered).unwrap();
        let tokens = encoded.tokens.iter().zip(&encoded.trained);
        let tokens: Vec<u32> = tokens
            .filter(|(_, is)| **is)
            .map(|(token, _)| *token)
            .collect();
        encoder.decode(&tokens).unwrap()
    };
    assert_eq!(trained("{}"), "b");
    let tokenizer = crate::TextTokenizer::open(&oracle("tokenizer")).unwrap();
    let start = tokenizer.token("<|im_start|>").unwrap();
    assert_eq!(
        trained(&format!("{{\"eos_token_id\": [0, {start}]}}")),
        "b<|im_start|>"
    );
}

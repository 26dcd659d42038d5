//! Valid folders are read as written, and each defect of a folder is a distinct error.

use std::fs;
use std::path::Path;

use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use super::{HfError, HfFolder};
use crate::ModelConfig;
use crate::gpt2::config::GptConfig;

/// Name, shape and values of a tensor.
type Tensor = (String, Vec<u64>, Vec<f32>);

fn tiny() -> GptConfig {
    let nano = GptConfig::preset("nano").unwrap();
    GptConfig {
        vocab_size: 11,
        n_positions: 6,
        n_embd: 4,
        n_layer: 2,
        n_head: 2,
        n_inner: 12,
        ..nano
    }
}

/// All parameters with their initial values.
fn params(config: &GptConfig) -> Vec<Tensor> {
    let specs = ModelConfig::from(config.clone())
        .units()
        .into_iter()
        .flat_map(|u| u.params);
    let fill = |p: zero_shard::ParamSpec| {
        let n: u64 = p.shape.iter().product();
        let mut values = vec![0.0; n as usize];
        let model = ModelConfig::from(config.clone());
        model.fill_initial(3, &p.name, 0..n, &mut values).unwrap();
        (p.name, p.shape, values)
    };
    specs.map(fill).collect()
}

/// Writes a safetensors file.
fn write_file(path: &Path, tensors: &[Tensor], dtype: Dtype) {
    let encode = |x: &f32| match dtype {
        Dtype::F64 => f64::from(*x).to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        Dtype::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    };
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, _, values)| values.iter().flat_map(encode).collect())
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        let shape = shape.iter().map(|n| *n as usize).collect();
        (name.clone(), TensorView::new(dtype, shape, bytes).unwrap())
    });
    let metadata = std::collections::HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize_to_file(views, Some(metadata), path).unwrap();
}

/// Writes a folder with these tensors in one file.
pub(crate) fn write_folder(dir: &Path, config: &GptConfig, tensors: &[Tensor], dtype: Dtype) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), config.to_hf_json("float32")).unwrap();
    write_file(&dir.join("model.safetensors"), tensors, dtype);
}

fn folder_of(config: &GptConfig, tensors: &[Tensor]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), config, tensors, Dtype::F32);
    dir
}

fn assert_holds(folder: &HfFolder, expected: &[Tensor]) {
    for (name, _, values) in expected {
        let mut got = vec![f32::NAN; values.len()];
        folder.read(name, 0..values.len() as u64, &mut got).unwrap();
        assert_eq!(&got, values, "{name}");
    }
}

fn open_error(dir: &Path) -> String {
    match HfFolder::open(dir) {
        Ok(_) => panic!("the folder opened"),
        Err(error) => {
            let text = error.to_string();
            assert!(!text.contains('\n'), "more than one line: {text}");
            text.replace(&dir.display().to_string(), "DIR")
        }
    }
}

#[test]
fn folder_reads_as_written() {
    for tied_head in [true, false] {
        let config = GptConfig {
            tied_head,
            ..tiny()
        };
        let dir = folder_of(&config, &params(&config));
        let folder = HfFolder::open(dir.path()).unwrap();
        assert_eq!(folder.config(), &ModelConfig::from(config.clone()));
        assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
        assert!(folder.tokenizer().unwrap().is_none());
        assert_eq!(folder.path(), dir.path());
        assert_holds(&folder, &params(&config));
    }
}

#[test]
fn sixteen_bit_weights_are_exact() {
    let round_f16 = |x: f32| f16::from_f32(x).to_f32();
    let round_bf16 = |x: f32| bf16::from_f32(x).to_f32();
    let cases: [(Dtype, &dyn Fn(f32) -> f32); 2] =
        [(Dtype::F16, &round_f16), (Dtype::BF16, &round_bf16)];
    for (dtype, round) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut expected = params(&tiny());
        write_folder(dir.path(), &tiny(), &expected, dtype);
        expected
            .iter_mut()
            .for_each(|(_, _, values)| values.iter_mut().for_each(|x| *x = round(*x)));
        assert_holds(&HfFolder::open(dir.path()).unwrap(), &expected);
    }
}

#[test]
fn fp64_weights_are_converted() {
    let dir = tempfile::tempdir().unwrap();
    let expected = params(&tiny());
    write_folder(dir.path(), &tiny(), &expected, Dtype::F64);
    let folder = HfFolder::open(dir.path()).unwrap();
    assert_holds(&folder, &expected);
    assert!(!folder.is_bf16());
}

#[test]
fn lfs_pointers_are_named() {
    use super::companions::COMPANIONS;

    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    let files = ["config.json", "model.safetensors"];
    for name in COMPANIONS.into_iter().chain(files) {
        let dir = folder_of(&tiny(), &params(&tiny()));
        fs::write(dir.path().join(name), pointer).unwrap();
        let error = open_error(dir.path());
        assert!(error.contains(&format!("DIR/{name}: ")), "{error}");
        assert!(error.contains("`git lfs pull`"), "{error}");
    }
}

/// A model is planned before its weights are downloaded.
#[test]
fn configuration_needs_no_weights() {
    let dir = tempfile::tempdir().unwrap();
    let error = |dir: &Path| HfFolder::config_in(dir).unwrap_err().to_string();
    assert!(error(&dir.path().join("none")).contains("does not exist"));
    assert!(error(dir.path()).contains("config.json: failed to read"));
    fs::write(dir.path().join("config.json"), tiny().to_hf_json("float32")).unwrap();
    let (config, warnings) = HfFolder::config_in(dir.path()).unwrap();
    assert_eq!((config, warnings), (ModelConfig::from(tiny()), vec![]));
    fs::write(dir.path().join("config.json"), "[").unwrap();
    assert!(error(dir.path()).contains("not a JSON object"));
}

#[test]
fn bare_names_masks_and_tied_heads_are_accepted() {
    let config = tiny();
    let expected = params(&config);
    let mut stored = expected.clone();
    stored
        .iter_mut()
        .for_each(|(name, _, _)| *name = name.replace("transformer.", ""));
    let embedding = stored
        .iter()
        .find(|(name, ..)| name.ends_with("wte.weight"))
        .unwrap()
        .2
        .clone();
    stored.push(("lm_head.weight".into(), vec![11, 4], embedding));
    stored.push(("h.0.attn.bias".into(), vec![1, 1, 6, 6], vec![1.0; 36]));
    stored.push(("h.0.attn.masked_bias".into(), vec![], vec![-1e4]));
    let dir = folder_of(&config, &stored);
    let folder = HfFolder::open(dir.path()).unwrap();
    assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
    assert_holds(&folder, &expected);
}

/// transformers 5 loads such a head and unties it; older versions ignore the tensor.
#[test]
fn tied_head_that_differs_is_an_error() {
    let config = tiny();
    let embedding = params(&config)
        .into_iter()
        .find(|(name, ..)| name.ends_with("wte.weight"))
        .unwrap()
        .2;
    let mut other = embedding.clone();
    *other.last_mut().unwrap() += 1.0;
    for (shape, head) in [(vec![11, 4], other), (vec![4, 11], embedding)] {
        let mut stored = params(&config);
        stored.push(("lm_head.weight".into(), shape, head));
        let error = open_error(folder_of(&config, &stored).path());
        assert!(
            error.contains("lm_head.weight") && error.contains("\"tie_word_embeddings\": false"),
            "{error}"
        );
    }
}

/// Wrappers of a model put their names before those of its tensors.
#[test]
fn prefix_of_all_tensors_is_left_out() {
    let config = tiny();
    let expected = params(&config);
    for wrapper in [
        "module.",
        "_orig_mod.",
        "base_model.model.",
        "a.b.",
        "transformer.",
    ] {
        for bare in [true, false] {
            let mut stored = expected.clone();
            for (name, ..) in &mut stored {
                let own = match bare {
                    true => name.replace("transformer.", ""),
                    false => name.clone(),
                };
                *name = format!("{wrapper}{own}");
            }
            let is_own = wrapper == "transformer." && bare;
            let dir = folder_of(&config, &stored);
            let folder = HfFolder::open(dir.path()).unwrap();
            assert_holds(&folder, &expected);
            assert_eq!(folder.warnings().is_empty(), is_own, "{wrapper} {bare}");
            let found = folder.unit_and_param(&stored[0].0).unwrap();
            assert_eq!(found.1, expected[0].0, "{wrapper} {bare}");
        }
    }
}

#[test]
fn head_behind_a_prefix_is_compared() {
    let mut stored = params(&tiny());
    let mut head = stored[0].2.clone();
    head[0] += 1.0;
    stored.push(("lm_head.weight".into(), vec![11, 4], head));
    for (name, ..) in &mut stored {
        *name = format!("module.{name}");
    }
    let error = open_error(folder_of(&tiny(), &stored).path());
    assert!(error.contains("tie_word_embeddings"), "{error}");
}

#[test]
fn ambiguous_prefix_is_named() {
    let named = |wrapper: &str| {
        let mut stored = params(&tiny());
        for (name, ..) in &mut stored {
            *name = format!("{wrapper}{name}");
        }
        stored
    };
    // Two models, or one of which a part has the prefix.
    let two = [named("student."), named("teacher.")].concat();
    let mut part = named("module.");
    part.push(("epoch".into(), vec![1], vec![1.0]));
    for (stored, wrapper) in [(two, "student."), (part, "module.")] {
        let error = open_error(folder_of(&tiny(), &stored).path());
        let hint = format!("names that start with {wrapper:?}, and others: save the model's");
        assert!(error.contains(&hint), "{error}");
        assert!(error.contains("; and 25 more; the files"), "{error}");
    }
}

#[test]
fn adapter_is_named() {
    let lora = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight";
    let stored = [(lora.to_owned(), vec![2, 4], vec![0.0; 8])];
    let error = open_error(folder_of(&tiny(), &stored).path());
    let remedy = "pass its model as --model, and this folder as --lora";
    assert!(error.contains(remedy), "{error}");
}

#[test]
fn unused_tensors_are_named_in_a_warning() {
    let mut stored = params(&tiny());
    stored.push(("score.weight".into(), vec![2, 4], vec![0.0; 8]));
    stored.push(("transformer.h.9.ln_1.bias".into(), vec![4], vec![0.0; 4]));
    let dir = folder_of(&tiny(), &stored);
    let warnings = HfFolder::open(dir.path()).unwrap().warnings().to_vec();
    let expected = "/model.safetensors: 2 tensors do not belong to the model and are ignored, the first is \"score.weight\"";
    assert!(
        matches!(&warnings[..], [w] if w.ends_with(expected)),
        "{warnings:?}"
    );
}

#[test]
fn several_files_read_as_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), tiny().to_hf_json("float32")).unwrap();
    let all = params(&tiny());
    let mut map = serde_json::Map::new();

    for (i, part) in all.chunks(10).enumerate() {
        let name = format!("model-{i}.safetensors");
        write_file(&dir.path().join(&name), part, Dtype::F32);
        map.extend(
            part.iter()
                .map(|(tensor, _, _)| (tensor.clone(), name.clone().into())),
        );
    }

    let index = dir.path().join("model.safetensors.index.json");
    let write_index = |map: &serde_json::Map<_, _>| {
        fs::write(
            &index,
            serde_json::json!({ "metadata": {}, "weight_map": map }).to_string(),
        )
        .unwrap();
    };

    write_index(&map);
    assert_holds(&HfFolder::open(dir.path()).unwrap(), &all);

    let mut without = map.clone();
    without.remove("transformer.ln_f.bias");
    write_index(&without);
    let expected = "DIR/model.safetensors.index.json: tensor \"transformer.ln_f.bias\" of shape [4] is missing";
    assert_eq!(open_error(dir.path()), expected);

    let mut misplaced = map.clone();
    misplaced.insert("transformer.ln_f.bias".into(), "model-0.safetensors".into());
    write_index(&misplaced);
    assert!(
        open_error(dir.path()).contains("\"transformer.ln_f.bias\" is not in model-0.safetensors")
    );

    for escape in ["../model-0.safetensors", "/etc/passwd", "a/b", "..", ""] {
        misplaced.insert("transformer.ln_f.bias".into(), escape.into());
        write_index(&misplaced);
        let error = open_error(dir.path());
        assert!(
            error.contains("is not a plain file name"),
            "{escape:?}: {error}"
        );
    }

    misplaced.insert("transformer.ln_f.bias".into(), "gone.safetensors".into());
    write_index(&misplaced);
    assert!(open_error(dir.path()).starts_with("cannot open DIR/gone.safetensors: "));

    fs::write(&index, "{}").unwrap();
    assert!(open_error(dir.path()).starts_with("DIR/model.safetensors.index.json: invalid JSON: "));
}

#[test]
fn missing_folder_config_or_weights_is_named() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(
        open_error(&dir.path().join("none")),
        "DIR: the model folder does not exist or is not a folder"
    );
    assert!(open_error(dir.path()).starts_with("DIR/config.json: failed to read the file: "));
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    assert_eq!(
        open_error(dir.path()),
        "DIR/config.json: the key \"n_embd\" is missing"
    );
    fs::write(dir.path().join("config.json"), tiny().to_hf_json("float32")).unwrap();
    let expected = "DIR: neither model.safetensors nor model.safetensors.index.json exists";
    assert_eq!(open_error(dir.path()), expected);
    fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    assert!(
        open_error(dir.path()).contains("pytorch_model.bin is not supported: save the model with")
    );
}

#[test]
fn unreadable_companion_is_an_error() {
    use super::companions::COMPANIONS;

    for name in COMPANIONS.into_iter().chain(["config.json"]) {
        let dir = folder_of(&tiny(), &params(&tiny()));
        let file = dir.path().join(name);
        let _absent = fs::remove_file(&file);
        std::os::unix::fs::symlink("../../blobs/0123", &file).unwrap();
        let error = open_error(dir.path());
        assert!(error.starts_with(&format!("DIR/{name}: ")), "{error}");
        assert!(error.contains("a symbolic link to a file that does not exist"));
    }
}

#[test]
fn missing_misshapen_or_mistyped_tensor_is_named() {
    let mut stored = params(&tiny());
    let removed = stored.remove(2);
    let dir = folder_of(&tiny(), &stored);
    let expected =
        "DIR/model.safetensors: tensor \"transformer.h.0.ln_1.weight\" of shape [4] is missing";
    assert_eq!(open_error(dir.path()), expected);

    stored.insert(2, (removed.0.clone(), vec![2, 2], removed.2.clone()));
    let dir = folder_of(&tiny(), &stored);
    let expected = "DIR/model.safetensors: tensor \"transformer.h.0.ln_1.weight\" has shape [2, 2]; \
                    config.json requires [4]";
    assert_eq!(open_error(dir.path()), expected);

    let mut stored = params(&tiny());
    for (_, _, values) in &mut stored {
        values.iter_mut().for_each(|x| *x = 1.0);
    }
    write_file(&dir.path().join("model.safetensors"), &stored, Dtype::I32);
    // All tensors are of this type: the first are listed, the rest counted.
    let expected = "DIR/model.safetensors: tensor \"transformer.wte.weight\" has type I32; \
                    supported are F32, F16, BF16 and F64; tensor \"transformer.wpe.weight\" has";
    let error = open_error(dir.path());
    assert!(error.starts_with(expected), "{error}");
    assert!(error.ends_with("and 25 more"), "{error}");
}

#[test]
fn truncated_or_other_file_is_an_error() {
    let dir = folder_of(&tiny(), &params(&tiny()));
    let path = dir.path().join("model.safetensors");
    let good = fs::read(&path).unwrap();
    let n = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut huge = good.clone();
    huge[7] = 0x7f;
    let mut broken = good.clone();
    broken[8] = b'[';
    let longer = [&good[..], &[0; 4]].concat();

    let cases = [
        (&good[..0], "it has 0 bytes"),
        (&good[..7], "it has 7 bytes"),
        (&good[..8 + n - 1], "the header has"),
        (&good[..good.len() - 1], "the tensors end at byte"),
        (&longer[..], "the tensors end at byte"),
        (&huge[..], "the header has"),
        (&broken[..], "the header does not start with"),
        (b"PK\x03\x04 a zip file of torch.save", "the header has"),
    ];

    for (bytes, part) in cases {
        fs::write(&path, bytes).unwrap();
        let error = open_error(dir.path());
        assert!(
            error.starts_with("DIR/model.safetensors: invalid safetensors file: "),
            "{error}"
        );
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn unknown_parameter_and_wrong_range_are_errors() {
    let dir = folder_of(&tiny(), &params(&tiny()));
    let folder = HfFolder::open(dir.path()).unwrap();
    let error = folder
        .read("lm_head.weight", 0..1, &mut [0.0])
        .unwrap_err()
        .to_string();
    assert_eq!(error, "the model has no parameter \"lm_head.weight\"");
    for (range, len) in [(0..5, 5), (4..5, 1), (0..3, 4), (u64::MAX - 1..u64::MAX, 1)] {
        let error = folder
            .read("transformer.ln_f.bias", range, &mut vec![0.0; len])
            .unwrap_err();
        assert!(
            matches!(
                error,
                HfError::Weights(zero_ckpt::CkptError::BadArgument { .. })
            ),
            "{error}"
        );
    }
}

proptest! {
    #[test]
    fn any_range_reads_as_written(a in 0u64..=44, b in 0u64..=44) {
        let all = params(&tiny());
        let dir = folder_of(&tiny(), &all);
        let folder = HfFolder::open(dir.path()).unwrap();
        let (a, b) = (a.min(b), a.max(b));
        let mut part = vec![0.0; (b - a) as usize];
        folder.read(&all[0].0, a..b, &mut part).unwrap();
        prop_assert_eq!(&part[..], &all[0].2[a as usize..b as usize]);
    }
}

/// Hugging Face transformers loads such a folder without missing or unexpected tensors, and the
/// folder that it saves opens here.
#[test]
#[ignore = "needs Python with torch and transformers"]
fn transformers_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let ours = dir.path().join("ours");
    let theirs = dir.path().join("theirs");
    for tied_head in [true, false] {
        let config = GptConfig {
            tied_head,
            ..tiny()
        };
        write_folder(&ours, &config, &params(&config), Dtype::F32);
        let script = "import sys; from transformers import GPT2LMHeadModel as Model
model, info = Model.from_pretrained(sys.argv[1], output_loading_info=True, dtype='auto')
assert not any(info[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info
model.save_pretrained(sys.argv[2])";
        let status = std::process::Command::new("python3")
            .args(["-c", script])
            .args([&ours, &theirs])
            .status();
        assert!(status.unwrap().success());
        let folder = HfFolder::open(&theirs).unwrap();
        assert_eq!(folder.config(), &ModelConfig::from(config.clone()));
        assert_holds(&folder, &params(&config));
        fs::remove_dir_all(&theirs).unwrap();
    }
}

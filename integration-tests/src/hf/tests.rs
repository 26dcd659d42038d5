//! A folder that is written reads back, and each way in which a folder can be wrong is its own error.

use std::fs;
use std::path::Path;

use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;
use zero_alloc::device::DType;

use super::{FolderWriter, HfError, HfFolder, write_folder};
use crate::model::config::GptConfig;

fn tiny() -> GptConfig {
    GptConfig {
        vocab_size: 11,
        n_positions: 6,
        n_embd: 4,
        n_layer: 2,
        n_head: 2,
        n_inner: 12,
        ..GptConfig::preset("nano").unwrap()
    }
}

/// All parameters with their initial values.
fn params(config: &GptConfig) -> Vec<(String, Vec<u64>, Vec<f32>)> {
    let specs = config.units().into_iter().flat_map(|u| u.params);
    let fill = |p: zero_shard::ParamSpec| {
        let n: u64 = p.shape.iter().product();
        let mut values = vec![0.0; n as usize];
        config.fill_initial(3, &p.name, 0..n, &mut values).unwrap();
        (p.name, p.shape, values)
    };
    specs.map(fill).collect()
}

fn write(dir: &Path, config: &GptConfig, dtype: DType) {
    let items = params(config).into_iter().map(|(name, _, values)| Ok::<_, HfError>((name, values)));
    write_folder(dir, config, dtype, items).unwrap();
}

/// Writes one safetensors file by the safetensors crate, from (name, shape, values).
fn write_file(path: &Path, tensors: &[(String, Vec<u64>, Vec<f32>)], dtype: Dtype) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, _, values)| match dtype {
            Dtype::F64 => values.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        let shape = shape.iter().map(|n| *n as usize).collect();
        (name.clone(), TensorView::new(dtype, shape, bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A folder with these tensors in one file.
fn folder_of(config: &GptConfig, tensors: &[(String, Vec<u64>, Vec<f32>)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_hf_json("float32")).unwrap();
    write_file(&dir.path().join("model.safetensors"), tensors, Dtype::F32);
    dir
}

fn assert_holds(folder: &HfFolder, expected: &[(String, Vec<u64>, Vec<f32>)]) {
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
fn what_is_written_reads_back() {
    for tied_head in [true, false] {
        let config = GptConfig { tied_head, ..tiny() };
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &config, DType::F32);
        let folder = HfFolder::open(dir.path()).unwrap();
        assert_eq!(folder.config(), &config);
        assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
        assert!(folder.tokenizer().is_none());
        assert_eq!(folder.path(), dir.path());
        assert_holds(&folder, &params(&config));
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["config.json", "model.safetensors"], "nothing else is left in the folder");
    }
}

#[test]
fn sixteen_bit_weights_are_rounded_to_nearest_and_read_back_exactly() {
    let round_f16 = |x: f32| f16::from_f32(x).to_f32();
    let round_bf16 = |x: f32| bf16::from_f32(x).to_f32();
    let cases: [(DType, &dyn Fn(f32) -> f32); 2] = [(DType::F16, &round_f16), (DType::Bf16, &round_bf16)];
    for (dtype, round) in cases {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &tiny(), dtype);
        let mut expected = params(&tiny());
        expected.iter_mut().for_each(|(_, _, values)| values.iter_mut().for_each(|x| *x = round(*x)));
        assert_holds(&HfFolder::open(dir.path()).unwrap(), &expected);
    }
}

#[test]
fn names_without_prefix_masks_and_the_head_of_a_tied_model_are_understood() {
    let config = tiny();
    let expected = params(&config);
    let mut stored = expected.clone();
    stored.iter_mut().for_each(|(name, _, _)| *name = name.replace("transformer.", ""));
    let embedding = stored.iter().find(|(name, ..)| name.ends_with("wte.weight")).unwrap().2.clone();
    stored.push(("lm_head.weight".into(), vec![11, 4], embedding));
    stored.push(("h.0.attn.bias".into(), vec![1, 1, 6, 6], vec![1.0; 36]));
    stored.push(("h.0.attn.masked_bias".into(), vec![], vec![-1e4]));
    let dir = folder_of(&config, &stored);
    let folder = HfFolder::open(dir.path()).unwrap();
    assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
    assert_holds(&folder, &expected);
}

/// transformers 5 takes such a head and unties it; older ones pass it over.
#[test]
fn a_head_that_is_tied_and_yet_another_is_an_error() {
    let config = tiny();
    let embedding = params(&config).into_iter().find(|(name, ..)| name.ends_with("wte.weight")).unwrap().2;
    let mut other = embedding.clone();
    *other.last_mut().unwrap() += 1.0;
    for (shape, head) in [(vec![11, 4], other), (vec![4, 11], embedding)] {
        let mut stored = params(&config);
        stored.push(("lm_head.weight".into(), shape, head));
        let error = open_error(folder_of(&config, &stored).path());
        assert!(error.contains("lm_head.weight") && error.contains("\"tie_word_embeddings\": false"), "{error}");
    }
}

#[test]
fn tensors_that_are_not_used_are_named_in_a_warning() {
    let mut stored = params(&tiny());
    stored.push(("score.weight".into(), vec![2, 4], vec![0.0; 8]));
    stored.push(("transformer.h.9.ln_1.bias".into(), vec![4], vec![0.0; 4]));
    let dir = folder_of(&tiny(), &stored);
    let warnings = HfFolder::open(dir.path()).unwrap().warnings().to_vec();
    let expected = "/model.safetensors: 2 tensors are not of the model and not read, the first is \"score.weight\"";
    assert!(matches!(&warnings[..], [w] if w.ends_with(expected)), "{warnings:?}");
}

#[test]
fn a_folder_of_several_files_reads_as_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), tiny().to_hf_json("float32")).unwrap();
    let all = params(&tiny());
    let mut map = serde_json::Map::new();
    for (i, part) in all.chunks(10).enumerate() {
        let name = format!("model-{i}.safetensors");
        write_file(&dir.path().join(&name), part, Dtype::F32);
        map.extend(part.iter().map(|(tensor, _, _)| (tensor.clone(), name.clone().into())));
    }
    let index = dir.path().join("model.safetensors.index.json");
    let write_index = |map: &serde_json::Map<_, _>| {
        fs::write(&index, serde_json::json!({ "metadata": {}, "weight_map": map }).to_string()).unwrap();
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
    assert!(open_error(dir.path()).contains("\"transformer.ln_f.bias\" in model-0.safetensors, which does not"));

    for escape in ["../model-0.safetensors", "/etc/passwd", "a/b", "..", ""] {
        misplaced.insert("transformer.ln_f.bias".into(), escape.into());
        write_index(&misplaced);
        let error = open_error(dir.path());
        assert!(error.contains("is not the name of a file in the folder"), "{escape:?}: {error}");
    }

    misplaced.insert("transformer.ln_f.bias".into(), "gone.safetensors".into());
    write_index(&misplaced);
    assert!(open_error(dir.path()).starts_with("DIR/gone.safetensors: cannot read: "));

    fs::write(&index, "{}").unwrap();
    assert!(open_error(dir.path()).starts_with("DIR/model.safetensors.index.json: not an index"));
}

#[test]
fn a_missing_folder_config_or_weights_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(open_error(&dir.path().join("none")), "DIR: no model folder here");
    assert!(open_error(dir.path()).starts_with("DIR/config.json: cannot read: "));
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    assert_eq!(open_error(dir.path()), "DIR/config.json: the key \"n_embd\" is missing");
    fs::write(dir.path().join("config.json"), tiny().to_hf_json("float32")).unwrap();
    let expected = "DIR: neither model.safetensors nor model.safetensors.index.json is there";
    assert_eq!(open_error(dir.path()), expected);
    fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    assert!(open_error(dir.path()).contains("pytorch_model.bin is not read: save the model with"));
}

#[test]
fn a_missing_misshapen_or_mistyped_tensor_is_an_error_that_names_it() {
    let mut stored = params(&tiny());
    let removed = stored.remove(2);
    let dir = folder_of(&tiny(), &stored);
    let expected = "DIR/model.safetensors: tensor \"transformer.h.0.ln_1.weight\" of shape [4] is missing";
    assert_eq!(open_error(dir.path()), expected);

    stored.insert(2, (removed.0.clone(), vec![2, 2], removed.2.clone()));
    let dir = folder_of(&tiny(), &stored);
    let expected = "DIR/model.safetensors: tensor \"transformer.h.0.ln_1.weight\" has shape [2, 2]; \
                    config.json asks for [4]";
    assert_eq!(open_error(dir.path()), expected);

    write_file(&dir.path().join("model.safetensors"), &params(&tiny()), Dtype::F64);
    let expected = "DIR/model.safetensors: tensor \"transformer.wte.weight\" has type F64; \
                    F32, F16 and BF16 are read";
    assert_eq!(open_error(dir.path()), expected);
}

#[test]
fn a_file_that_is_cut_short_or_not_safetensors_is_an_error() {
    let dir = folder_of(&tiny(), &params(&tiny()));
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let n = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut huge = whole.clone();
    huge[7] = 0x7f;
    let mut broken = whole.clone();
    broken[8] = b'[';
    let longer = [&whole[..], &[0; 4]].concat();
    let cases = [
        (&whole[..0], "it has 0 bytes, and the header's length takes 8"),
        (&whole[..7], "it has 7 bytes, and the header's length takes 8"),
        (&whole[..8 + n - 1], "the header claims"),
        (&whole[..whole.len() - 1], "its header describes"),
        (&longer[..], "its header describes"),
        (&huge[..], "the header claims"),
        (&broken[..], "its header: "),
        (b"PK\x03\x04 a zip file of torch.save", "the header claims"),
    ];
    for (bytes, part) in cases {
        fs::write(&path, bytes).unwrap();
        let error = open_error(dir.path());
        assert!(error.starts_with("DIR/model.safetensors: not a whole safetensors file: "), "{error}");
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn an_unknown_parameter_and_a_wrong_range_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &tiny(), DType::F32);
    let folder = HfFolder::open(dir.path()).unwrap();
    let error = folder.read("lm_head.weight", 0..1, &mut [0.0]).unwrap_err().to_string();
    assert_eq!(error, "the model has no parameter \"lm_head.weight\"");
    for (range, len) in [(0..5, 5), (4..5, 1), (0..3, 4), (u64::MAX - 1..u64::MAX, 1)] {
        let error = folder.read("transformer.ln_f.bias", range, &mut vec![0.0; len]).unwrap_err();
        assert!(matches!(error, HfError::BadRange { numel: 4, .. }), "{error}");
    }
}

#[test]
fn an_unfinished_or_wrong_write_leaves_the_old_folder() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &tiny(), DType::F32);
    let before = fs::read(dir.path().join("model.safetensors")).unwrap();

    let other = GptConfig { n_layer: 1, ..tiny() };
    let mut writer = FolderWriter::create(dir.path(), &other, DType::Bf16).unwrap();
    writer.write("transformer.ln_f.bias", &[1.0; 3]).unwrap();
    let error = writer.write("transformer.ln_f.bias", &[1.0; 2]).unwrap_err().to_string();
    assert_eq!(error, "5 values written to \"transformer.ln_f.bias\", which has 4 elements");
    let error = writer.write("transformer.h.1.ln_1.bias", &[1.0]).unwrap_err().to_string();
    assert_eq!(error, "the model has no parameter \"transformer.h.1.ln_1.bias\"");
    let error = writer.finish().unwrap_err().to_string();
    assert_eq!(error, "parameter \"transformer.wte.weight\" has 0 of its 44 values; the folder is not written");

    assert_eq!(fs::read(dir.path().join("model.safetensors")).unwrap(), before);
    assert_eq!(HfFolder::open(dir.path()).unwrap().config(), &tiny());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the temporary file is gone");
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = FolderWriter::create(&file, &tiny(), DType::F32).err().unwrap();
    assert!(matches!(&error, HfError::Write { path, .. } if *path == file), "{error}");
    let error = FolderWriter::create(dir.path(), &tiny(), DType::U8).err().unwrap().to_string();
    assert_eq!(error, "weights are written as fp32, fp16 or bf16, not as u8");
    let bad = GptConfig { n_head: 3, ..tiny() };
    let error = FolderWriter::create(dir.path(), &bad, DType::F32).err().unwrap();
    assert!(matches!(error, HfError::Config { .. }), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no folder was begun");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_range_written_in_any_parts_reads_back(cut in 0usize..=44, a in 0u64..=44, b in 0u64..=44) {
        let config = tiny();
        let dir = tempfile::tempdir().unwrap();
        let mut writer = FolderWriter::create(dir.path(), &config, DType::F32).unwrap();
        let all = params(&config);
        // The last parameter first, and the first in two parts around the others.
        writer.write(&all[0].0, &all[0].2[..cut]).unwrap();
        for (name, _, values) in all[1..].iter().rev() {
            writer.write(name, values).unwrap();
        }
        writer.write(&all[0].0, &all[0].2[cut..]).unwrap();
        writer.finish().unwrap();
        let folder = HfFolder::open(dir.path()).unwrap();
        let (a, b) = (a.min(b), a.max(b));
        let mut part = vec![0.0; (b - a) as usize];
        folder.read(&all[0].0, a..b, &mut part).unwrap();
        prop_assert_eq!(&part[..], &all[0].2[a as usize..b as usize]);
    }
}

/// transformers loads a folder of ours with every parameter found, and saves one that reads back here.
#[test]
#[ignore = "needs Python with torch and transformers"]
fn transformers_reads_what_is_written_and_writes_what_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    for (dtype, tied_head) in [(DType::F32, true), (DType::Bf16, false)] {
        let config = GptConfig { tied_head, ..tiny() };
        write(&ours, &config, dtype);
        let script = "import sys; from transformers import GPT2LMHeadModel as Model
model, info = Model.from_pretrained(sys.argv[1], output_loading_info=True, dtype='auto')
assert not any(info[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info
model.save_pretrained(sys.argv[2])";
        let status = std::process::Command::new("python3").args(["-c", script]).args([&ours, &theirs]).status();
        assert!(status.unwrap().success());
        let mut expected = params(&config);
        if dtype == DType::Bf16 {
            expected.iter_mut().flat_map(|p| &mut p.2).for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        let folder = HfFolder::open(&theirs).unwrap();
        assert_eq!(folder.config(), &config);
        assert_holds(&folder, &expected);
        fs::remove_dir_all(&theirs).unwrap();
    }
}

/// `/dev/full` stands for a disk without room.
#[test]
fn a_full_disk_is_an_error_that_names_the_file_and_leaves_the_old_folder() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &tiny(), DType::F32);
    let temporary = dir.path().join(format!(".model.safetensors.{}.tmp", std::process::id()));
    std::os::unix::fs::symlink("/dev/full", &temporary).unwrap();
    let error = FolderWriter::create(dir.path(), &tiny(), DType::F32).err().unwrap();
    assert!(matches!(&error, HfError::Write { path, .. } if *path == temporary), "{error}");
    assert_holds(&HfFolder::open(dir.path()).unwrap(), &params(&tiny()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the temporary file is gone");
}

//! Checkpoints of tensor-parallel runs: they load at any number of tensor-parallel ranks, and
//! export the whole tensors.

use std::collections::HashMap;
use std::path::Path;

use proptest::prelude::*;
use zero_ckpt::{
    CkptError, ExportOptions, Reader, SaveMeta, ShardData, Store, StoreOptions,
    TENSOR_PARALLEL_JSON, TensorFolder, TensorParallel, assemble, resolve,
};
use zero_shard::{Layout, ParamSpec, ShardError, TensorCut, TensorPart, UnitSpec};

use crate::common::{STATES, bits, cases, fails, flip, on_ranks, open, read, says, value};

const ALIGN: u64 = 16;

/// Cuts by name.
type Cuts = HashMap<String, TensorCut>;

/// Whole units, and the cut of each of their parameters.
#[derive(Clone, Debug)]
struct Model {
    units: Vec<UnitSpec>,
    cuts: Cuts,
}

/// A small GPT-2: a vocabulary that no number of ranks divides, fused columns, rows, replicated
/// vectors, a scalar.
fn gpt2() -> Model {
    let whole = TensorCut::Replicated;
    let rows = TensorCut::Dim { dim: 0, blocks: 1 };
    let columns = |blocks| TensorCut::Dim { dim: 1, blocks };
    let embedding = [("wte", vec![31, 12], rows), ("wpe", vec![5, 12], whole)];
    let block = [
        ("ln_1", vec![12], whole),
        ("c_attn.weight", vec![12, 36], columns(3)),
        (
            "c_attn.bias",
            vec![36],
            TensorCut::Dim { dim: 0, blocks: 3 },
        ),
        ("scale", vec![], whole),
        ("c_fc", vec![12, 24], columns(1)),
        ("c_proj", vec![24, 12], rows),
    ];

    let mut cuts = Cuts::new();
    let mut unit = |name: &str, params: &[(&str, Vec<u64>, TensorCut)]| {
        let param = |(param, shape, cut): &(&str, Vec<u64>, TensorCut)| {
            let param = format!("{name}.{param}");
            cuts.insert(param.clone(), *cut);
            ParamSpec::new(param, shape.as_slice())
        };
        UnitSpec::new(name, params.iter().map(param).collect::<Vec<_>>())
    };
    let units = vec![
        unit("embedding", &embedding),
        unit("h.0", &block),
        unit("nothing", &[]),
        unit("head", &[("ln_f", vec![3], whole)]),
    ];
    Model { units, cuts }
}

fn shard<'a>(layout: &'a Layout, rank: u64, states: &'a [Vec<f32>; 3]) -> ShardData<'a> {
    let mut shard = ShardData::new(layout, rank).unwrap();
    for (state, values) in STATES.iter().zip(states) {
        shard.storage_f32(state, values).unwrap();
    }
    shard
}

impl Model {
    fn cut_of(&self) -> impl Fn(&ParamSpec) -> TensorCut + '_ {
        |param| self.cuts[&param.name]
    }

    fn params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|unit| &unit.params)
    }

    fn described(&self, tensor_ranks: u64) -> TensorParallel {
        TensorParallel::new(&self.units, tensor_ranks, self.cut_of()).unwrap()
    }

    /// The layout of one rank's part over `data_ranks` ranks.
    fn local(&self, part: TensorPart, data_ranks: u64) -> Layout {
        let unit = |unit| part.unit(unit, self.cut_of()).unwrap();
        let units: Vec<_> = self.units.iter().map(unit).collect();
        Layout::new(&units, data_ranks, ALIGN).unwrap()
    }

    /// The shard storage of a data-parallel rank of a part, by the indices of the whole parameters.
    fn storage(&self, part: TensorPart, layout: &Layout, rank: u64, state: &str) -> Vec<f32> {
        let whole: HashMap<_, _> = self.params().map(|param| (&param.name, param)).collect();
        let mut out = vec![0.0; layout.shard_elems() as usize];
        for piece in layout.rank_pieces(rank).unwrap() {
            let name = &layout.param(piece.id).unwrap().name;
            let first = piece.in_param.start;
            let runs = part.runs(whole[name], self.cuts[name], piece.in_param);
            for run in runs.unwrap() {
                let at = (piece.in_storage.start + run.in_part.start - first) as usize;
                for (i, elem) in run.in_whole.into_iter().flatten().enumerate() {
                    out[at + i] = value(9, state, name, elem);
                }
            }
        }
        out
    }

    /// The layout of the joined units, and the states of each rank in it.
    fn joined(&self, [tensor_ranks, data_ranks]: [u64; 2]) -> (Layout, Vec<[Vec<f32>; 3]>) {
        let joined = self.described(tensor_ranks).joined_units(data_ranks, ALIGN);
        let joined = Layout::new(&joined.unwrap(), tensor_ranks * data_ranks, ALIGN).unwrap();
        let mut ranks = Vec::new();
        for m in 0..tensor_ranks {
            let part = TensorPart::new(m, tensor_ranks).unwrap();
            let layout = self.local(part, data_ranks);
            for d in 0..data_ranks {
                ranks.push(STATES.map(|state| self.storage(part, &layout, d, state)));
            }
        }
        (joined, ranks)
    }

    /// Saves a checkpoint of M times D ranks.
    fn save_with(&self, dir: &Path, ranks: [u64; 2], meta: SaveMeta) -> Result<(), CkptError> {
        let (layout, states) = self.joined(ranks);
        let stage = |(rank, states): (usize, &[Vec<f32>; 3])| {
            let store = Store::create(dir, rank as u64, StoreOptions::default()).unwrap();
            store.stage(meta.step, &shard(&layout, rank as u64, states))
        };
        let staged = states.iter().enumerate().map(stage).collect();
        let store = Store::create(dir, 0, StoreOptions::default()).unwrap();
        store.publish(&meta, &layout, staged).map(drop)
    }

    fn meta(&self, tensor_ranks: u64) -> SaveMeta {
        let documents = [self.described(tensor_ranks).document().unwrap()].into();
        SaveMeta::default().step(1).documents(documents)
    }

    fn save(&self, dir: &Path, ranks: [u64; 2]) {
        self.save_with(dir, ranks, self.meta(ranks[0])).unwrap();
    }

    /// A directory with a checkpoint of M times D ranks.
    fn saved(&self, ranks: [u64; 2]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.save(dir.path(), ranks);
        dir
    }

    /// Asserts that all ranks of `tensor_ranks` times `data_ranks` load what they would have saved.
    fn assert_parts_load(&self, reader: &Reader, [tensor_ranks, data_ranks]: [u64; 2]) {
        for m in 0..tensor_ranks {
            let part = TensorPart::new(m, tensor_ranks).unwrap();
            let layout = self.local(part, data_ranks);
            let view = reader.view_of_part(&layout, part, self.cut_of()).unwrap();
            for rank in 0..data_ranks {
                for state in STATES {
                    let mut got = vec![f32::NAN; layout.shard_elems() as usize];
                    view.read_storage(state, rank, &mut got).unwrap();
                    let expected = self.storage(part, &layout, rank, state);
                    assert!(
                        bits(&got) == bits(&expected),
                        "part {m} of {tensor_ranks}, rank {rank} of {data_ranks}, {state}"
                    );
                }
            }
        }
    }
}

#[test]
fn any_part_loads_from_any_other() {
    let model = gpt2();
    for from in [1, 2, 4] {
        for data_ranks in [1, 2, 3] {
            let dir = model.saved([from, data_ranks]);
            let reader = Reader::open(dir.path()).unwrap();
            assert_eq!(reader.tensor_parallel().unwrap().ranks, from);
            assert!(reader.verify().problems.is_empty());
            for to in [1, 2, 3, 4] {
                model.assert_parts_load(&reader, [to, 4 - data_ranks]);
            }
        }
    }
}

#[test]
fn part_of_a_plain_checkpoint_loads() {
    let model = gpt2();
    let dir = tempfile::tempdir().unwrap();
    model
        .save_with(dir.path(), [1, 3], SaveMeta::default())
        .unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!(reader.tensor_parallel(), None);
    for to in [1, 2, 4] {
        model.assert_parts_load(&reader, [to, 2]);
    }
}

#[test]
fn reader_of_a_part_has_views_of_it() {
    let model = gpt2();
    let dir = model.saved([2, 2]);
    let part = TensorPart::new(2, 3).unwrap();
    let layout = model.local(part, 2);
    let reader = Reader::open(dir.path()).unwrap();
    let reader = reader.of_part(part, model.cut_of()).unwrap();
    let got = read(&reader, &layout, "master", 1).unwrap();
    let expected = model.storage(part, &layout, 1, "master");
    assert_eq!(bits(&got), bits(&expected));

    // Parameters by name stay whole, and the part of one rank is the whole model.
    let mut row = [0.0; 12];
    reader
        .read_param("master", "embedding.wte", 360..372, &mut row)
        .unwrap();
    let reader = reader.of_part(TensorPart::whole(), model.cut_of()).unwrap();
    assert!(
        reader
            .view(&Layout::new(&model.units, 3, 1).unwrap())
            .is_ok()
    );
}

#[test]
fn export_joins_the_parts() {
    let model = gpt2();
    let dir = tempfile::tempdir().unwrap();
    let exported = |tensor_ranks: u64, data_ranks, max_file_bytes| {
        let name = format!("{tensor_ranks}-{data_ranks}-{max_file_bytes}");
        let saved = dir.path().join(&name);
        let out = dir.path().join(name + ".out");
        let plain = SaveMeta::default().step(1);
        let meta = match tensor_ranks {
            1 => plain,
            _ => model.meta(tensor_ranks),
        };
        model
            .save_with(&saved, [tensor_ranks, data_ranks], meta)
            .unwrap();
        let options = ExportOptions::default().max_file_bytes(max_file_bytes);
        let report = Reader::open(&saved)
            .unwrap()
            .export(&out, &options)
            .unwrap();
        let files = report.files.iter().map(|file| std::fs::read(file).unwrap());
        (files.collect::<Vec<_>>(), out)
    };

    for max_file_bytes in [4000, u64::MAX] {
        let (expected, out) = exported(1, 2, max_file_bytes);
        for (tensor_ranks, data_ranks) in [(2, 1), (2, 3), (4, 2)] {
            assert!(exported(tensor_ranks, data_ranks, max_file_bytes).0 == expected);
        }
        let folder = TensorFolder::open(&out).unwrap();
        for param in model.params() {
            let elems = param.numel_elems().unwrap();
            let mut got = vec![0.0; elems as usize];
            folder.read(&param.name, 0..elems, &mut got).unwrap();
            let expected: Vec<_> = (0..elems)
                .map(|elem| value(9, "master", &param.name, elem))
                .collect();
            assert_eq!(bits(&got), bits(&expected), "{}", param.name);
        }
    }
}

#[test]
fn description_lists_whole_parameters() {
    let model = gpt2();
    let dir = model.saved([2, 1]);
    let text = Reader::open(dir.path()).unwrap().describe();
    let elements: u64 = model
        .params()
        .map(|param| param.numel_elems().unwrap())
        .sum();
    let expected = [
        "cut over 2 ranks",
        "stage 0, fp32, 2 ranks",
        "[12, 36]  cut along dimension 1 in 3 blocks",
        "[31, 12]  cut along dimension 0",
        "on every rank",
    ];
    for part in expected {
        assert!(text.contains(part), "{part}\n{text}");
    }
    says(&text, &[&format!("elements      1,{}", elements - 1000)]);
    assert!(!text.contains('@') && !text.contains("pad."), "{text}");
}

#[test]
fn resume_at_other_ranks_saves_into_the_same_directory() {
    let model = gpt2();
    let dir = tempfile::tempdir().unwrap();
    for (step, ranks) in [[1, 2], [2, 1], [4, 1]].into_iter().enumerate() {
        let meta = model.meta(ranks[0]).step(step as u64);
        model.save_with(dir.path(), ranks, meta).unwrap();
    }
    let store = Store::create(dir.path(), 0, StoreOptions::default()).unwrap();
    let whole = zero_ckpt::ModelSpec {
        units: model.units.clone(),
    };
    store.check_model(&whole).unwrap();
    drop(store);

    let mut other = model;
    other.units[3].params[0].shape = vec![4];
    let error = other.save_with(dir.path(), [2, 1], other.meta(2).step(9));
    let error = error.unwrap_err().to_string();
    says(
        &error,
        &["has shape [3] in the checkpoint and [4] in the model"],
    );
}

#[test]
fn staged_save_is_assembled() {
    let model = gpt2();
    let dir = tempfile::tempdir().unwrap();
    let (layout, states) = model.joined([2, 1]);
    let save = |run: &str| {
        on_ranks(2, |rank, world| {
            let store = open(dir.path(), rank, &crate::common::run(run), world);
            let shard = shard(&layout, rank, &states[rank as usize]);
            let meta = model.meta(2);
            store.save(&meta, &shard, &mut world.rank(rank)).is_ok()
        })
    };
    assert_eq!(save("a"), [true, true]);
    // Refused, because the checkpoint of this step is of another run; its files stay staged.
    assert_eq!(save("b"), [false, false]);
    let new = dir.path().join("new");
    assemble(&new, &[dir.path()]).unwrap();
    let reader = Reader::open(&new).unwrap();
    assert_eq!(reader.manifest().run.as_deref(), Some("b"));
    model.assert_parts_load(&reader, [3, 1]);
}

#[test]
fn contradicting_document_is_not_published() {
    let model = gpt2();
    let dir = tempfile::tempdir().unwrap();
    let error = |document: serde_json::Value| {
        let documents = [(TENSOR_PARALLEL_JSON.to_owned(), document)].into();
        let meta = SaveMeta::default().step(1).documents(documents);
        let saved = model.save_with(dir.path(), [2, 3], meta);
        let error = saved.unwrap_err().to_string();
        assert!(error.contains(TENSOR_PARALLEL_JSON), "{error}");
        error
    };
    let good = model.described(2);
    let changed = |change: &dyn Fn(&mut TensorParallel)| {
        let mut document = good.clone();
        change(&mut document);
        let error = error(document.document().unwrap().1);
        assert!(error.contains("contradicts the manifest"), "{error}");
        assert!(error.contains("load another checkpoint"), "{error}");
        error
    };

    assert!(error(serde_json::json!({"ranks": 2})).contains("invalid description"));
    assert!(changed(&|d| d.ranks = 0).contains("0 tensor-parallel ranks do not divide"));
    assert!(changed(&|d| d.ranks = 4).contains("4 tensor-parallel ranks do not divide"));
    assert!(changed(&|d| d.ranks = 3).contains("on each of 3 ranks"));
    assert!(changed(&|d| drop(d.units.pop())).contains("3 units, the manifest 4"));
    assert!(changed(&|d| drop(d.units[1].params.pop())).contains("has 5 parameters"));
    let name = changed(&|d| d.units[1].params[1].name = "w".into());
    says(&name, &["\"w@0/2\"", "\"h.0.c_attn.weight@0/2\""]);
    let unit = changed(&|d| d.units[1].name = "h.1".into());
    says(&unit, &["unit \"h.1\"", "unit \"h.0\""]);
    let shape = changed(&|d| d.units[0].params[0].shape = vec![33, 12]);
    says(&shape, &["[17, 12]", "[16, 12]"]);
    let cut = changed(&|d| d.units[0].params[0].cut = TensorCut::Replicated);
    assert!(cut.contains("embedding.wte@0/2"), "{cut}");
    let dim = changed(&|d| d.units[0].params[0].cut = TensorCut::Dim { dim: 2, blocks: 1 });
    assert!(dim.contains("it has 2 dimensions"), "{dim}");
    let twice = changed(&|d| d.units[1].params[1].name = "embedding.wte".into());
    assert!(twice.contains("used twice"), "{twice}");
}

#[test]
fn damaged_or_missing_document_is_an_error() {
    let model = gpt2();
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        let meta = model.meta(2).step(step);
        model.save_with(dir.path(), [2, 1], meta).unwrap();
    }
    let newest = dir.path().join("step-00000002");
    let path = newest.join(TENSOR_PARALLEL_JSON);
    flip(&path, 20);
    let damaged = Reader::open(&newest).err().unwrap();
    assert!(matches!(damaged, CkptError::Corrupt { .. }), "{damaged}");
    says(&damaged, &[TENSOR_PARALLEL_JSON]);

    // The checkpoint before it is opened instead, and saves go on.
    let reader = Reader::open(dir.path()).unwrap();
    assert_eq!(reader.manifest().step, 1);
    assert!(reader.notices()[0].contains(TENSOR_PARALLEL_JSON));
    assert_eq!(
        resolve(dir.path()).unwrap().passed_over[0].0,
        "step-00000002"
    );
    let meta = model.meta(4).step(3);
    model.save_with(dir.path(), [4, 1], meta).unwrap();

    std::fs::remove_file(&path).unwrap();
    fails(Reader::open(&newest), &[TENSOR_PARALLEL_JSON]);
}

#[test]
fn checkpoint_without_a_document_says_so() {
    let model = gpt2();
    let dir = tempfile::tempdir().unwrap();
    model
        .save_with(dir.path(), [2, 1], SaveMeta::default())
        .unwrap();
    let reader = Reader::open(dir.path()).unwrap();
    let layout = Layout::new(&model.units, 1, 1).unwrap();
    fails(
        reader.view(&layout),
        &[
            "is missing in the checkpoint",
            &format!("no {TENSOR_PARALLEL_JSON}"),
            "TensorParallel::document",
        ],
    );
}

#[test]
fn wrong_parts_are_rejected() {
    let mut model = gpt2();
    let dir = model.saved([2, 2]);
    let reader = Reader::open(dir.path()).unwrap();
    let part = TensorPart::new(1, 3).unwrap();
    let layout = model.local(part, 2);

    let other = TensorPart::new(1, 2).unwrap();
    let error = reader
        .view_of_part(&layout, other, model.cut_of())
        .err()
        .unwrap();
    let text = error.to_string();
    assert!(matches!(error, CkptError::AnotherModel { .. }), "{text}");
    says(&text, &["part of tensor-parallel rank 1 of 2"]);
    says(
        &text,
        &["[16, 12] in the checkpoint and [11, 12] in the model"],
    );
    fails(reader.view(&layout), &["[31, 12] in the checkpoint"]);

    let view = reader.view_of_part(&layout, part, model.cut_of()).unwrap();
    let mut out = [0.0; 4];
    let text = |result: Result<(), CkptError>| result.unwrap_err().to_string();
    assert!(text(view.read_range("momentum", 1, 0..4, &mut out)).contains("it has master"));
    assert!(text(view.read_range("master", 4, 0..4, &mut out)).contains("below 4"));
    assert!(text(view.read_range("master", 3, 0..4, &mut out)).contains("within 0..3"));
    assert!(text(view.read_shard("master", 3, 2, &mut out)).contains("below 2"));
    assert!(text(view.read_shard("master", 3, 1, &mut out)).contains("shard of unit"));

    // 24 columns over 5 ranks.
    let five = TensorPart::new(1, 5).unwrap();
    for error in [
        reader
            .view_of_part(&layout, five, model.cut_of())
            .err()
            .unwrap(),
        Reader::open(dir.path())
            .unwrap()
            .of_part(five, model.cut_of())
            .err()
            .unwrap(),
    ] {
        assert!(
            matches!(
                error,
                CkptError::NoPart {
                    rank: 1,
                    ranks: 5,
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("h.0.c_attn.weight"), "{error}");
    }

    model
        .cuts
        .insert("h.0.c_fc".into(), TensorCut::Dim { dim: 2, blocks: 1 });
    let none = TensorParallel::new(&model.units, 0, model.cut_of());
    assert!(matches!(
        none,
        Err(ShardError::UnknownRank { world_size: 0, .. })
    ));
    let new = TensorParallel::new(&model.units, 2, model.cut_of());
    assert!(matches!(
        new,
        Err(ShardError::UnknownDim {
            dim: 2,
            dims: 2,
            ..
        })
    ));
}

/// A matrix of which a row is longer than a block, and one of single columns, whose elements are
/// more pieces than a list of reads holds.
#[test]
fn long_rows_and_single_columns_load() {
    let columns = TensorCut::Dim { dim: 1, blocks: 1 };
    let units = vec![UnitSpec::new(
        "u",
        [
            ParamSpec::new("long", [3, 4 * 70_000]),
            ParamSpec::new("single", [140_000, 4]),
        ],
    )];
    let cuts = [("long".into(), columns), ("single".into(), columns)].into();
    let model = Model { units, cuts };
    for from in [1, 4] {
        let dir = model.saved([from, 1]);
        let reader = Reader::open(dir.path()).unwrap();
        let part = TensorPart::new(1, 2).unwrap();
        let layout = model.local(part, 1);
        let view = reader.view_of_part(&layout, part, model.cut_of()).unwrap();
        let mut got = vec![f32::NAN; layout.shard_elems() as usize];
        view.read_storage("master", 0, &mut got).unwrap();
        assert!(bits(&got) == bits(&model.storage(part, &layout, 0, "master")));
    }
}

/// Parameters that 1 to 4 ranks can divide, and their cuts.
fn model() -> impl Strategy<Value = Model> {
    let param = (0usize..3, 1u64..4, 0u64..4, 0u64..40, any::<bool>());
    let unit = prop::collection::vec(param, 0..4);
    prop::collection::vec(unit, 1..4).prop_map(|drawn| {
        let mut cuts = Cuts::new();
        let mut units = Vec::new();
        for (u, drawn) in drawn.into_iter().enumerate() {
            let mut params = Vec::new();
            for (p, (dim, blocks, outer, inner, is_cut)) in drawn.into_iter().enumerate() {
                let name = format!("{u}.{p}");
                // Single blocks of 10 and 13 rows leave every one of four ranks a row.
                let extent = if blocks == 1 {
                    10 + 3 * (inner % 2)
                } else {
                    12 * blocks
                };
                let mut shape = vec![outer, inner];
                shape.insert(dim, extent);
                let cut = TensorCut::Dim { dim, blocks };
                cuts.insert(
                    name.clone(),
                    if is_cut { cut } else { TensorCut::Replicated },
                );
                params.push(ParamSpec::new(name, shape));
            }
            units.push(UnitSpec::new(format!("u{u}"), params));
        }
        Model { units, cuts }
    })
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn any_model_loads_at_any_ranks(
        model in model(), from in 1u64..5, from_data in 1u64..4, to in 1u64..5, to_data in 1u64..4,
        a in any::<u64>(), b in any::<u64>(),
    ) {
        let dir = model.saved([from, from_data]);
        let reader = Reader::open(dir.path()).unwrap();
        model.assert_parts_load(&reader, [to, to_data]);

        // Any range of a unit of a part, which has no padding behind its parameters on one rank.
        let part = TensorPart::new(a % to, to).unwrap();
        let layout = model.local(part, 1);
        let view = reader.view_of_part(&layout, part, model.cut_of()).unwrap();
        let expected = model.storage(part, &layout, 0, "master");
        for (u, unit) in layout.units().iter().enumerate() {
            let (a, b) = (a % (unit.numel_elems + 1), b % (unit.numel_elems + 1));
            let range = a.min(b)..a.max(b);
            let mut got = vec![f32::NAN; (range.end - range.start) as usize];
            view.read_range("master", u, range.clone(), &mut got).unwrap();
            let at = (unit.shard_offset_elems + range.start) as usize;
            prop_assert_eq!(bits(&got), bits(&expected[at..at + got.len()]));
        }

        for param in model.params() {
            let elems = param.numel_elems().unwrap();
            let (a, b) = (a % (elems + 1), b % (elems + 1));
            let range = a.min(b)..a.max(b);
            let mut got = vec![f32::NAN; (range.end - range.start) as usize];
            reader.read_param("master", &param.name, range.clone(), &mut got).unwrap();
            let expected: Vec<_> = range.map(|elem| value(9, "master", &param.name, elem)).collect();
            prop_assert_eq!(bits(&got), bits(&expected));
        }
    }
}

//! States in blocks: whatever layouts save and load them, every element is the one of the blocks of
//! its whole parameter.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use zero_ckpt::{
    BackgroundStore, CkptError, Manifest, PublishedCheckpoint, Reader, SaveMeta, ShardData,
    StagingSlice, StateDtype, StateEncoding, StateSpec, Store, StoreOptions,
};
use zero_shard::{BlockFormat, Layout, LayoutOptions, ParamSpec, TensorCut, TensorPart, UnitSpec};

use crate::common::{ThreadRank, as_stored, bits, cases, fails, on_ranks, read, value};

/// Parameters of at least this many elements are in blocks.
const PLAIN_BELOW: u64 = 200;

/// A state, how it is stored, and the whole parameters of the model, by unit.
struct State {
    spec: StateSpec,
    params: Vec<Vec<Vec<f32>>>,
}

impl State {
    /// Values of any bits, or moderate ones.
    fn new(spec: StateSpec, layout: &Layout, seed: u64, hostile: bool) -> Self {
        let is_positive = matches!(
            spec.encoding,
            StateEncoding::Blocks {
                format: BlockFormat::PositiveDynamic8 | BlockFormat::PositiveLinear4,
                ..
            }
        );
        let value = |param: &str, elem| {
            let any = value(seed, &spec.name, param, elem);
            let value = match hostile {
                true => any,
                false => f32::from_bits(any.to_bits() & 0x83ff_ffff | 0x3800_0000),
            };
            if is_positive { value.abs() } else { value }
        };
        let units = layout.units().iter().map(|unit| {
            let params = unit.params.iter().map(|param| {
                let elems = 0..param.numel_elems;
                elems.map(|elem| value(&param.name, elem)).collect()
            });
            params.collect()
        });
        let params = units.collect();
        Self { spec, params }
    }

    /// The state that is loaded after a save.
    fn as_stored(&self) -> Self {
        let mut params = self.params.clone();
        let all = params.iter_mut().flatten();
        all.for_each(|values| as_stored(self.spec.encoding, values));
        Self {
            spec: self.spec.clone(),
            params,
        }
    }

    /// The shard storage of a rank, with this value in the padding.
    fn storage(&self, layout: &Layout, rank: u64, padding: f32) -> Vec<f32> {
        let mut out = vec![padding; layout.shard_elems() as usize];
        for piece in layout.rank_pieces(rank).unwrap() {
            let values = &self.params[piece.id.unit][piece.id.param];
            out[range(&piece.in_storage)].copy_from_slice(&values[range(&piece.in_param)]);
        }
        out
    }

    /// Elements of a unit, without padding.
    fn unit(&self, unit: usize) -> Vec<f32> {
        self.params[unit].concat()
    }
}

fn range(elems: &Range<u64>) -> Range<usize> {
    elems.start as usize..elems.end as usize
}

/// A way to save.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Shard storage in fp32.
    Storage,
    /// Slices of fp32 in any order.
    Streamed,
    /// A copy of shard storage into staging memory.
    Background,
    /// Blocks that the caller encodes, in staging memory.
    Encoded,
}

const WAYS: [Way; 4] = [Way::Storage, Way::Streamed, Way::Background, Way::Encoded];

/// Every rank saves the states.
fn save(dir: &Path, layout: &Layout, step: u64, states: &[State], way: Way) {
    let saved = on_ranks(layout.world_size(), |rank, world| {
        save_rank(dir, layout, step, states, way, &mut world.rank(rank), rank)
    });
    saved.into_iter().for_each(|saved| drop(saved.unwrap()));
}

fn save_rank(
    dir: &Path,
    layout: &Layout,
    step: u64,
    states: &[State],
    way: Way,
    exchange: &mut ThreadRank<'_>,
    rank: u64,
) -> Result<PublishedCheckpoint, CkptError> {
    let store = Store::create(dir, rank, StoreOptions::default()).unwrap();
    let meta = SaveMeta::default().step(step);
    let storage: Vec<_> = states
        .iter()
        .map(|state| state.storage(layout, rank, f32::NAN))
        .collect();
    let mut shard = ShardData::new(layout, rank)?;
    for (state, storage) in states.iter().zip(&storage) {
        shard.storage_as(&state.spec.name, state.spec.encoding, storage)?;
    }

    let specs: Vec<_> = states.iter().map(|state| state.spec.clone()).collect();
    let of_slice = |slice: &StagingSlice<'_>| {
        let mut states = states.iter().zip(&storage);
        let (_, storage) = states
            .find(|(state, _)| state.spec == *slice.state)
            .unwrap();
        &storage[range(&layout.units()[slice.unit].shard_range())]
    };
    let fill = |slice: StagingSlice<'_>| {
        let values = of_slice(&slice);
        slice.fill_f32(|in_shard, out| {
            out.copy_from_slice(&values[range(&in_shard)]);
            Ok::<_, String>(())
        })
    };
    let background =
        |store| BackgroundStore::new(store, Arc::new(layout.clone()), specs.clone(), 1).unwrap();

    match way {
        Way::Storage => store.save(&meta, &shard, exchange),
        Way::Streamed => {
            let stage = || store.stage_streamed(step, layout, specs.clone(), fill);
            store.save_with(&meta, layout, stage, exchange)
        }
        Way::Background => {
            let mut store = background(store);
            store.begin_copy(meta, &shard)?;
            store.complete(exchange)
        }
        Way::Encoded => {
            let mut store = background(store);
            store.begin(meta, |slices| {
                for slice in slices {
                    let values = &of_slice(&slice)[range(&slice.in_shard)];
                    match slice.blocks() {
                        Some(format) => format.encode(values, slice.bytes),
                        None => fill(slice)?,
                    }
                }
                Ok(Box::new(|| Ok(())))
            })?;
            store.complete(exchange)
        }
    }
}

/// The bytes of the files of the newest checkpoint, without their headers.
fn state_bytes(dir: &Path) -> Vec<Vec<u8>> {
    let reader = Reader::open(dir).unwrap();
    let files = reader.manifest().files.iter().map(|file| {
        let bytes = std::fs::read(reader.path().join(&file.name)).unwrap();
        let header = u64::from_le_bytes(*bytes.first_chunk().unwrap());
        bytes[8 + header as usize..].to_vec()
    });
    files.collect()
}

fn blocks(format: BlockFormat) -> StateEncoding {
    blocks_of(format, 1)
}

fn blocks_of(format: BlockFormat, multiple_of: u64) -> StateEncoding {
    StateEncoding::Blocks {
        format,
        plain_below: PLAIN_BELOW,
        multiple_of,
    }
}

fn specs(format: BlockFormat, multiple_of: u64) -> [StateSpec; 4] {
    // Files hold the wider ones first.
    [
        StateSpec::new("half", StateDtype::BF16),
        StateSpec::new("master", StateDtype::F32),
        StateSpec::new("moment", blocks_of(format, multiple_of)),
        StateSpec::new(
            "average",
            blocks_of(BlockFormat::PositiveLinear4, multiple_of),
        ),
    ]
}

fn units(sizes: &[Vec<u64>]) -> Vec<UnitSpec> {
    let unit = |(u, sizes): (usize, &Vec<u64>)| {
        let params = sizes.iter().enumerate();
        let params = params.map(|(p, elems)| ParamSpec::new(format!("{u}.{p}"), [*elems]));
        UnitSpec::new(format!("u{u}"), params.collect::<Vec<_>>())
    };
    sizes.iter().enumerate().map(unit).collect()
}

/// The sizes of the parameters of each unit.
fn model() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let size = prop_oneof![
        Just(0u64),
        1u64..9,
        1u64..3000,
        199u64..202,
        (1u64..160).prop_map(|blocks| blocks * BlockFormat::ALIGN_ELEMS),
    ];
    prop::collection::vec(prop::collection::vec(size, 0..4), 1..4)
}

/// Ranks, and alignments in units of 256.
fn cut() -> impl Strategy<Value = (u64, LayoutOptions)> {
    (1u64..6, 1u64..4, 1u64..3).prop_map(|(ranks, shard_align, param_align)| {
        let options = LayoutOptions::default()
            .shard_align_elems(shard_align * param_align * BlockFormat::ALIGN_ELEMS)
            .param_align_elems(param_align * BlockFormat::ALIGN_ELEMS);
        (ranks, options)
    })
}

/// [`cut`], or with parameters that are not whole blocks of 256 packed.
fn packed_cut() -> impl Strategy<Value = (u64, LayoutOptions)> {
    let cut = (cut(), any::<bool>());
    cut.prop_map(|((ranks, options), is_packed)| match is_packed {
        true => {
            let options = options.param_align_elems(BlockFormat::ALIGN_ELEMS);
            (ranks, options.packed_below_elems(PLAIN_BELOW))
        }
        false => (ranks, options),
    })
}

/// Two layouts that save, and the rule of parameters in blocks.
fn cuts() -> impl Strategy<Value = ([(u64, LayoutOptions); 2], u64)> {
    prop_oneof![
        ([cut(), cut()], Just(1)),
        ([packed_cut(), packed_cut()], Just(BlockFormat::ALIGN_ELEMS)),
    ]
}

/// A layout that loads, of any alignment.
fn any_cut() -> impl Strategy<Value = (u64, LayoutOptions)> {
    let cut = (1u64..6, 1u64..300, 1u64..40).prop_map(|(ranks, shard_align, param_align)| {
        let options = LayoutOptions::default()
            .shard_align_elems(shard_align)
            .param_align_elems(param_align);
        (ranks, options)
    });
    prop_oneof![cut, self::cut()]
}

proptest! {
    #![proptest_config(cases(30))]

    #[test]
    fn blocks_are_those_of_whole_parameters(
        sizes in model(), ([from, again], multiple_of) in cuts(), to in any_cut(),
        format in prop::sample::select(&BlockFormat::ALL[..]),
        ways in [prop::sample::select(&WAYS[..]), prop::sample::select(&WAYS[..])],
        (seed, hostile) in any::<(u64, bool)>(),
        ranges in prop::collection::vec(any::<[prop::sample::Index; 3]>(), 8),
    ) {
        let units = units(&sizes);
        let layout = |(ranks, options): &(u64, LayoutOptions)| {
            Layout::with_options(&units, *ranks, options.clone()).unwrap()
        };
        let [from, again, to] = [layout(&from), layout(&again), layout(&to)];
        let states = specs(format, multiple_of).map(|spec| State::new(spec, &from, seed, hostile));
        let stored = states.each_ref().map(State::as_stored);
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &from, 1, &states, ways[0]);
        let first = state_bytes(dir.path());
        let reader = Reader::open(dir.path()).unwrap();
        prop_assert!(reader.verify().problems.is_empty());

        for state in &stored {
            for rank in 0..to.world_size() {
                let got = read(&reader, &to, &state.spec.name, rank).unwrap();
                prop_assert_eq!(bits(&got), bits(&state.storage(&to, rank, 0.0)));
            }
            let view = reader.view(&to).unwrap();
            for [unit, a, b] in &ranges {
                let unit = unit.index(to.units().len());
                let values = state.unit(unit);
                let [a, b] = [a, b].map(|at| at.index(values.len() + 1));
                let part = a.min(b)..a.max(b);
                let mut got = vec![f32::NAN; part.len()];
                let in_unit = part.start as u64..part.end as u64;
                view.read_range(&state.spec.name, unit, in_unit, &mut got).unwrap();
                prop_assert_eq!(bits(&got), bits(&values[part]));
            }
        }

        // A save of the loaded state changes nothing: at any layout, in any way.
        save(dir.path(), &again, 2, &stored, ways[1]);
        let reader = Reader::open(dir.path()).unwrap();
        for state in &stored {
            for rank in 0..to.world_size() {
                let got = read(&reader, &to, &state.spec.name, rank).unwrap();
                prop_assert_eq!(bits(&got), bits(&state.storage(&to, rank, 0.0)));
            }
        }
        save(dir.path(), &from, 3, &stored, ways[1]);
        let third = state_bytes(dir.path());
        save(dir.path(), &from, 4, &stored, ways[0]);
        prop_assert!(third == state_bytes(dir.path()), "{:?}", ways);
        // Scales among the smallest numbers have few multiples, which several codes share.
        prop_assert!(hostile || third == first);
    }
}

/// Chunks of writers and readers split blocks.
#[test]
fn large_parameters_are_stored_in_whole_blocks() {
    let units = units(&[vec![300, 5_000_000, 7]]);
    let layout = |ranks| {
        let options = LayoutOptions::default()
            .in_blocks()
            .packed_below_elems(PLAIN_BELOW);
        Layout::with_options(&units, ranks, options).unwrap()
    };
    let from = layout(1);
    let specs = [StateSpec::new("moment", blocks(BlockFormat::Int8))];
    let states = specs.map(|spec| State::new(spec, &from, 5, false));
    let dir = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for (step, way) in WAYS.into_iter().enumerate() {
        save(dir.path(), &from, step as u64, &states, way);
        files.push(state_bytes(dir.path()));
    }
    assert!(files.windows(2).all(|pair| pair[0] == pair[1]));

    let reader = Reader::open(dir.path()).unwrap();
    let stored = states[0].as_stored();
    let to = layout(3);
    for rank in 0..3 {
        let got = read(&reader, &to, "moment", rank).unwrap();
        assert!(bits(&got) == bits(&stored.storage(&to, rank, 0.0)));
    }
}

#[test]
fn shard_within_a_block_is_rejected() {
    let unit = UnitSpec::new("u", [ParamSpec::new("w", [700])]);
    let layout = Layout::new(&[unit], 2, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path(), 0, StoreOptions::default()).unwrap();
    let values = vec![1.0; 350];
    let mut shard = ShardData::new(&layout, 0).unwrap();
    let encoding = blocks(BlockFormat::Dynamic8);
    shard.storage_as("moment", encoding, &values).unwrap();
    let parts = [
        "a shard ends at element 350 of parameter \"w\"",
        "within a block of 256 elements of state \"moment\"",
        "multiples of 256",
    ];
    fails(store.stage(1, &shard), &parts);
    let specs = vec![StateSpec::new("moment", encoding)];
    let fill = |_: StagingSlice<'_>| Ok(());
    fails(
        store.stage_streamed(1, &layout, specs.clone(), fill),
        &parts,
    );
    fails(
        BackgroundStore::new(store, Arc::new(layout), specs, 1),
        &parts,
    );
}

/// Readers name what they do not know.
#[test]
fn unknown_encodings_are_named() {
    let with_dtype = |dtype: &str| {
        let body = format!(
            r#"{{"step":1,"sequence":1,"stage":3,"dtype":"bf16","trainer":null,"model_config":null,"model":{{"units":[]}},"layout":{{"world_size":1,"align_elems":1}},"states":[{{"name":"moment","dtype":{dtype}}}],"files":[]}}"#
        );
        let crc64 = crc_fast::crc64_nvme(body.as_bytes());
        let text = format!(
            r#"{{"format":"zero-ckpt","version":2,"crc64":"{crc64:016x}","manifest":{body}}}"#
        );
        Manifest::decode(text.as_bytes(), Path::new("m"))
    };
    let blocks = |rest: &str| with_dtype(&format!(r#"{{"blocks":{{{rest}}}}}"#));
    let (manifest, _) = blocks(r#""format":"dynamic8","plain_below":200,"multiple_of":1"#).unwrap();
    assert_eq!(
        manifest.states[0].encoding,
        self::blocks(BlockFormat::Dynamic8)
    );
    assert!(with_dtype("\"BF16\"").is_ok());

    fails(
        with_dtype("\"F8\""),
        &["unknown variant `F8`, expected one of `F32`"],
    );
    fails(with_dtype(r#"{"tiles":{}}"#), &["unknown variant `tiles`"]);
    let unknown = blocks(r#""format":"dynamic3","plain_below":200,"multiple_of":1"#);
    fails(unknown, &["unknown variant `dynamic3`", "`dynamic8`"]);
    fails(
        blocks(r#""format":"nf4""#),
        &["missing field `plain_below`"],
    );
    let unknown = blocks(r#""format":"nf4","plain_below":0,"multiple_of":1,"doubled":true"#);
    fails(unknown, &["unknown field `doubled`"]);
}

/// Columns are a few elements of every block, rows end within one.
#[test]
fn parts_of_matrices_in_blocks_are_those_of_the_whole() {
    let cases = [
        (BlockFormat::Int8, [4200, 300], 3, 1),
        (BlockFormat::Nf4, [500, 4], 4, 1),
        (BlockFormat::Dynamic4, [50, 1024], 2, 1),
        (BlockFormat::Dynamic8, [51, 70], 5, 0),
    ];
    for (format, shape, ranks, dim) in cases {
        let whole = ParamSpec::new("w", shape);
        let cut = TensorCut::Dim { dim, blocks: 1 };
        let units = [UnitSpec::new("u", [whole.clone()])];
        let layout = Layout::new(&units, 2, 256).unwrap();
        let state = State::new(StateSpec::new("moment", blocks(format)), &layout, 3, false);
        let dir = tempfile::tempdir().unwrap();
        save(
            dir.path(),
            &layout,
            1,
            std::slice::from_ref(&state),
            Way::Storage,
        );
        let values = state.as_stored().unit(0);
        let reader = Reader::open(dir.path()).unwrap();

        for rank in 0..ranks {
            let part = TensorPart::new(rank, ranks).unwrap();
            let local = Layout::new(&[part.unit(&units[0], |_| cut).unwrap()], 1, 1).unwrap();
            let elems = local.numel_elems();
            let mut expected = vec![0.0; elems as usize];
            for run in part.runs(&whole, cut, 0..elems).unwrap() {
                if let Some(in_whole) = run.in_whole {
                    let values = &values[range(&in_whole)];
                    expected[range(&run.in_part)].copy_from_slice(values);
                }
            }
            let view = reader.view_of_part(&local, part, |_| cut).unwrap();
            let mut got = vec![f32::NAN; elems as usize];
            view.read_storage("moment", 0, &mut got).unwrap();
            assert!(bits(&got) == bits(&expected), "{format:?}, rank {rank}");
        }
    }
}

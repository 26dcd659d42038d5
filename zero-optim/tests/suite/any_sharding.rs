//! Moments of 8 and 4 bits, and Muon: with the same gradients the same state to the bit, at any
//! number of ranks, stage and home, and through a change of the ranks, since a block is a range of a
//! parameter, and matrices are updated whole. Muon also with tensor parallelism.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use zero_alloc::Purpose;
use zero_alloc::device::{AnySlice, DType, Device, Reduced, Stream};
use zero_alloc::host::HostDevice;
use zero_comm::CommOptions;
use zero_comm::threads::{ThreadsComm, World};
use zero_kernels::Muon;
use zero_optim::{
    CommExchange, Divisor, GatheredStats, GroupRules, Masters, Matrices, Matrix, MatrixParam,
    Moments, OptimError, OptimizerConfig, ParamGroups, RankStats, Segment, ShardedOptimizer,
    StateFormat, StateHome, StateKind, StateRange, UnitSlices,
};
use zero_shard::{Layout, LayoutOptions, ParamId, ParamSpec, TensorCut, TensorPart, UnitSpec};

use super::common::{Buffer, Host, LIMIT, Random, bits, cases};

/// A model and how it is trained.
#[derive(Clone, Debug)]
struct Model {
    units: Vec<UnitSpec>,
    dtype: DType,
    format: StateFormat,
    /// The rule of some parameters.
    muon: Option<Muon>,
    seed: u64,
}

/// The state of every parameter: for each kind, the bits of its elements.
type State = BTreeMap<(String, &'static str), Vec<Option<u32>>>;

/// The ranks that train a model, and the place of their state.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Ranks with a shard of each part.
    ranks: u64,
    /// Parts of tensor parallelism.
    parts: u64,
    whole: bool,
    in_pieces: bool,
}

/// One rank.
struct One {
    part: TensorPart,
    shard: u64,
    optim: ShardedOptimizer<HostDevice>,
    params: Vec<Buffer>,
    host: Host,
    /// Its range of each unit's flat parameter.
    held: Vec<Range<u64>>,
}

/// Elements of a parameter in a range of a unit.
struct Run {
    /// The parameter's position in the whole unit.
    param: usize,
    /// Their place in the range.
    at: Range<usize>,
    /// Their place in the whole parameter.
    in_whole: Range<u64>,
}

impl Model {
    /// The layout of each part.
    fn layout(&self, ranks: u64, parts: u64) -> Layout {
        let options = self.format.moments.layout_options(LayoutOptions::default());
        let part = TensorPart::new(0, parts).unwrap();
        let units = self.units.iter();
        let units = units.map(|unit| part.unit(unit, |param| cut_of(param, parts)).unwrap());
        Layout::with_options(&units.collect::<Vec<_>>(), ranks, options).unwrap()
    }

    /// The runs of whole parameters in `range` of a unit; the rest is padding.
    fn runs(
        &self,
        layout: &Layout,
        part: TensorPart,
        (unit, range): (usize, Range<u64>),
    ) -> Vec<Run> {
        let placed = &layout.units()[unit];
        let mut runs = Vec::new();
        for piece in placed.params_in(range.clone()).unwrap() {
            let id = ParamId {
                unit,
                param: piece.param,
            };
            let (param, spec) = self.spec(layout, id);
            let first = (piece.in_flat.start - range.start) as usize;
            let cut = cut_of(spec, part.ranks());
            for run in part.runs(spec, cut, piece.in_param.clone()).unwrap() {
                let at = |elem: u64| first + (elem - piece.in_param.start) as usize;
                let Some(in_whole) = run.in_whole else {
                    continue;
                };
                runs.push(Run {
                    param,
                    at: at(run.in_part.start)..at(run.in_part.end),
                    in_whole,
                });
            }
        }
        runs
    }

    /// The position of a parameter in the whole unit, and its whole.
    fn spec(&self, layout: &Layout, id: ParamId) -> (usize, &ParamSpec) {
        let name = &layout.units()[id.unit].params[id.param].name;
        let mut params = self.units[id.unit].params.iter().enumerate();
        params.find(|(_, param)| param.name == *name).unwrap()
    }

    /// Values of the elements `range` of a unit, the same wherever they are; 0 in padding.
    fn values(
        &self,
        layout: &Layout,
        part: TensorPart,
        (unit, range): (usize, Range<u64>),
        seed: u64,
    ) -> Vec<f32> {
        let mut values = vec![0.0; (range.end - range.start) as usize];
        for run in self.runs(layout, part, (unit, range)) {
            let first = (unit as u64) << 40 | (run.param as u64) << 32;
            for (value, at) in values[run.at].iter_mut().zip(run.in_whole) {
                let mut random = Random(seed ^ (first + at).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let scale = 10_f32.powi(((first + at) % 7) as i32 - 5);
                random.value();
                *value = random.value() * scale;
            }
        }
        values
    }

    fn one(&self, place: Place, rank: u64, comm: ThreadsComm) -> Result<One, OptimError> {
        let layout = self.layout(place.ranks, place.parts);
        let part = TensorPart::new(rank % place.parts, place.parts).unwrap();
        let rank = rank / place.parts;
        let host = Host::on(HostDevice::new());
        let rules = vec![
            GroupRules::default(),
            GroupRules::default().weight_decay(Some(0.1)),
            GroupRules::frozen(),
        ];
        let stored = (!place.whole).then_some(rank);
        let group_of = |id: ParamId| [0, 1, 0, 2, 1][(id.unit + self.spec(&layout, id).0) % 5];
        let groups = ParamGroups::of_layout(rules, &layout, stored, group_of).unwrap();
        let groups = match self.muon {
            Some(muon) => groups.update(1, Arc::new(muon)),
            None => groups,
        };
        let segments = match place.whole {
            true => Segment::wholes(&layout, rank),
            false => Segment::shards(&layout),
        };
        let builder = host.builder().param_dtype(self.dtype).groups(&groups);
        let config = OptimizerConfig::default().sub_group_elems(3000);
        let builder = builder.config(config).format(self.format);
        let builder = match self.muon {
            Some(_) => {
                let of = |id: ParamId| {
                    let (param, spec) = self.spec(&layout, id);
                    (group_of(id) == 1).then(|| matrices(id.unit, param, spec, place.parts))
                };
                let matrices = Matrices::new(&layout, (rank, part), place.whole, false, of)?;
                let exchanges = host.pool.device().create_stream("exchanges")?;
                let exchange = CommExchange::new(Arc::new(comm), exchanges);
                builder.matrices(matrices, exchange)
            }
            None => builder,
        };
        let mut optim = match place.in_pieces {
            true => builder.offload(StateHome::Memory).build(segments)?,
            false => builder.build(segments)?,
        };

        let held = layout.units().iter().map(|unit| match place.whole {
            true => 0..unit.padded_elems,
            false => unit.shard(rank),
        });
        let held: Vec<_> = held.collect();
        let init = |(unit, range): (usize, &Range<u64>)| {
            let values = self.values(&layout, part, (unit, range.clone()), self.seed);
            Buffer::new(&values, self.dtype)
        };
        let mut params: Vec<_> = held.iter().enumerate().map(init).collect();
        optim.init_masters(&host.stream, &slices(&mut params))?;
        host.stream.synchronize(LIMIT)?;
        Ok(One {
            part,
            shard: rank,
            optim,
            params,
            host,
            held,
        })
    }

    fn world(&self, place: Place) -> Vec<One> {
        let ranks = place.ranks * place.parts;
        let comms = World::new(ranks as usize, CommOptions::default());
        let ranks = (0..ranks).zip(comms.unwrap());
        ranks
            .map(|(rank, comm)| self.one(place, rank, comm).unwrap())
            .collect()
    }

    /// A step of all ranks, whose gradients have the same sum wherever they are.
    fn step(&self, world: &mut [One], step: u64) {
        let layout = self.layout_of(world);
        // Without clipping no sum over ranks changes the update.
        let stats = vec![RankStats::new(&[], 0.0); world.len()];
        let mut kept = Vec::new();
        for one in world.iter_mut() {
            let grads = one.held.iter().enumerate().map(|(unit, range)| {
                let of = (unit, range.clone());
                let seed = self.seed ^ (step + 1) << 32;
                Buffer::new(&self.values(&layout, one.part, of, seed), DType::F32)
            });
            let mut grads: Vec<_> = grads.collect();
            // SAFETY: written before; kept until the stream is drained.
            let reduced = grads.iter_mut().map(|grad| unsafe {
                Reduced::new(grad.slice(), one.host.stream.record().unwrap())
            });
            let reduced: Vec<_> = reduced.collect();
            let params = slices(&mut one.params);
            let units = reduced.iter().zip(&params);
            let units: Vec<_> = units
                .map(|(grad, param)| UnitSlices { grad, param })
                .collect();
            let gathered = GatheredStats::new(&stats, Divisor::Sum(4.0));
            let outcome = one.optim.step(&one.host.stream, &units, gathered, LIMIT);
            assert!(!outcome.unwrap().is_skipped());
            kept.push(grads);
        }
        // Ranks exchange matrices: the last one's step ends the waits of the first.
        for one in world {
            one.host.stream.synchronize(LIMIT).unwrap();
        }
    }

    fn layout_of(&self, world: &[One]) -> Layout {
        let parts = world[0].part.ranks();
        self.layout(world.len() as u64 / parts, parts)
    }

    /// All state, of the ranks that own it, parameter by parameter. Parts that have the same
    /// elements have the same state of them, and padding has 0.
    fn state(&self, world: &mut [One]) -> State {
        let layout = self.layout_of(world);
        let mut state = State::new();
        for one in world {
            for (unit, placed) in layout.units().iter().enumerate() {
                let shard = placed.shard(one.shard);
                for kind in one.optim.kinds() {
                    let mut values = one.read(kind, unit, shard.clone());
                    for run in self.runs(&layout, one.part, (unit, shard.clone())) {
                        let spec = &self.units[unit].params[run.param];
                        let of_param = state.entry((spec.name.clone(), kind.name()));
                        let elems = spec.numel_elems().unwrap() as usize;
                        let of_param = of_param.or_insert_with(|| vec![None; elems]);
                        let of_run = &mut values[run.at];
                        for (at, bits) in run.in_whole.zip(bits(of_run)) {
                            let of_other = of_param[at as usize].replace(bits);
                            assert!(of_other.is_none_or(|other| other == bits), "{spec:?}");
                        }
                        of_run.fill(0.0);
                    }
                    assert!(values.iter().all(|value| *value == 0.0), "{kind:?}");
                }
            }
        }
        state
    }

    /// Writes all state of `from` to `to`, which may have another number of ranks.
    fn copy(&self, state: &State, to: &mut [One]) {
        let layout = self.layout_of(to);
        for one in to {
            for unit in 0..layout.units().len() {
                let held = one.held[unit].clone();
                for kind in one.optim.kinds() {
                    let mut values = vec![0.0; (held.end - held.start) as usize];
                    for run in self.runs(&layout, one.part, (unit, held.clone())) {
                        let name = self.units[unit].params[run.param].name.clone();
                        let all = &state[&(name, kind.name())];
                        for (value, at) in values[run.at].iter_mut().zip(run.in_whole) {
                            *value = f32::from_bits(all[at as usize].unwrap());
                        }
                    }
                    one.write(kind, unit, &values);
                }
            }
        }
    }
}

/// The first element that differs.
fn difference(ours: &State, expected: &State) -> Option<String> {
    assert!(ours.keys().eq(expected.keys()));
    ours.iter().find_map(|(name, ours)| {
        let expected = &expected[name];
        let at = (0..expected.len()).find(|at| ours.get(*at) != expected.get(*at))?;
        let [ours, expected] = [ours, expected].map(|of| of[at].map(f32::from_bits));
        Some(format!(
            "{name:?}, element {at}: {ours:?}, expected {expected:?}"
        ))
    })
}

/// The cut of a parameter in `parts` parts: along one dimension or the other, in one block or two,
/// or none.
fn cut_of(param: &ParamSpec, parts: u64) -> TensorCut {
    let [rows, cols] = [param.shape[0], param.shape.get(1).copied().unwrap_or(0)];
    let part = TensorPart::new(0, parts).unwrap();
    let cuts = [(0, 1), (1, 2), (1, 1), (0, 2)].map(|(dim, blocks)| TensorCut::Dim { dim, blocks });
    let mut tried = cuts.iter().cycle().skip((rows + cols) as usize % 5).take(3);
    let fits = tried.find(|cut| part.shape(param, **cut).is_ok());
    fits.copied().unwrap_or(TensorCut::Replicated)
}

/// Matrices of a parameter: those of a Linear, of a Conv1D, or, of fused layers, several.
fn matrices(unit: usize, param: usize, spec: &ParamSpec, parts: u64) -> MatrixParam {
    let [rows, cols] = spec.shape[..] else {
        unreachable!("all are of two dimensions")
    };
    let [rows, cols] = [rows as usize, cols as usize];
    let conv = Matrix::conv1d(rows, cols);
    let matrices = match (unit + 2 * param) % 3 {
        0 => vec![Matrix::linear(rows, cols)],
        1 => vec![conv],
        _ => conv.split(&[cols / 2, cols - cols / 2]),
    };
    MatrixParam {
        group: 1,
        matrices,
        cut: (parts > 1).then(|| (spec.clone(), cut_of(spec, parts))),
    }
}

fn slices(params: &mut [Buffer]) -> Vec<[(AnySlice, usize); 1]> {
    params.iter_mut().map(|p| [(p.slice(), 0)]).collect()
}

impl One {
    fn read(&mut self, kind: StateKind, unit: usize, range: Range<u64>) -> Vec<f32> {
        let first = self.held[unit].start;
        let elems = (range.start - first) as usize..(range.end - first) as usize;
        let mut values = vec![0.0; elems.len()];
        let params = slices(&mut self.params);
        let range = StateRange { kind, unit, elems };
        let read = (&range, &params[unit][..]);
        let optim = &mut self.optim;
        let stream = &self.host.stream;
        optim
            .read_state(stream, read.0, read.1, &mut values, LIMIT)
            .unwrap();
        values
    }

    fn write(&mut self, kind: StateKind, unit: usize, values: &[f32]) {
        let params = slices(&mut self.params);
        let elems = 0..values.len();
        let range = StateRange { kind, unit, elems };
        let optim = &mut self.optim;
        let stream = &self.host.stream;
        optim
            .write_state(stream, &range, &params[unit], values, LIMIT)
            .unwrap();
        optim
            .write_unit_params(stream, unit, &params[unit])
            .unwrap();
        stream.synchronize(LIMIT).unwrap();
    }
}

fn models() -> impl Strategy<Value = Model> {
    let whole = (16..40_u64).prop_map(|blocks| 256 * blocks);
    let elems = prop_oneof![1..300_u64, 4000..5000_u64, whole];
    let unit = prop::collection::vec(elems, 0..5);
    let formats = (
        prop_oneof![
            Just(Moments::Fp32),
            Just(Moments::EightBit),
            Just(Moments::FourBit)
        ],
        prop_oneof![Just(None), Just(Some(Muon::default()))],
        prop_oneof![
            Just((DType::F32, Masters::Fp32)),
            Just((DType::F16, Masters::Fp32)),
            Just((DType::Bf16, Masters::Remainder)),
        ],
    );
    let all = (prop::collection::vec(unit, 1..4), formats, any::<u64>());
    all.prop_map(|(units, (moments, muon, (dtype, masters)), seed)| {
        let unit = |(u, sizes): (usize, Vec<u64>)| {
            let shape = |elems: u64| match elems.is_multiple_of(16) {
                true => [16, elems / 16],
                false => [1, elems],
            };
            let param = |(p, elems)| ParamSpec::new(format!("{u}.{p}"), shape(elems));
            UnitSpec::new(
                format!("unit{u}"),
                sizes.into_iter().enumerate().map(param).collect::<Vec<_>>(),
            )
        };
        Model {
            units: units.into_iter().enumerate().map(unit).collect(),
            dtype,
            format: StateFormat::default().masters(masters).moments(moments),
            muon,
            seed,
        }
    })
}

const fn shards(ranks: u64) -> Place {
    Place {
        ranks,
        parts: 1,
        whole: false,
        in_pieces: false,
    }
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn state_does_not_depend_on_the_sharding(model in models()) {
        let train = |place: Place| {
            let mut world = model.world(place);
            for step in 0..4 {
                model.step(&mut world, step);
            }
            model.state(&mut world)
        };
        let expected = train(shards(1));
        for ranks in [2, 3, 4, 7] {
            prop_assert_eq!(difference(&train(shards(ranks)), &expected), None, "{} ranks", ranks);
        }
        // The moments of a parameter's blocks are not those of its parts.
        let most = if model.format.moments == Moments::Fp32 { 4 } else { 1 };
        for parts in 1..=most {
            for (whole, in_pieces) in [(false, false), (true, false), (false, true), (true, true)] {
                let place = Place { ranks: 2, parts, whole, in_pieces };
                prop_assert_eq!(difference(&train(place), &expected), None, "{:?}", place);
            }
        }

        // 4 ranks, 3, 7: a change of the ranks before each of the last steps.
        let mut world = model.world(shards(4));
        model.step(&mut world, 0);
        model.step(&mut world, 1);
        for (step, ranks) in [(2, 3), (3, 7)] {
            let state = model.state(&mut world);
            let progress = world[0].optim.progress();
            world = model.world(shards(ranks));
            model.copy(&state, &mut world);
            for one in &mut world {
                one.optim.restore(&progress).unwrap();
            }
            model.step(&mut world, step);
        }
        prop_assert_eq!(difference(&model.state(&mut world), &expected), None);
    }
}

/// Small parameters and frozen ones, and what the state takes.
#[test]
fn small_parameters_have_moments_in_fp32() {
    let params = [
        ("large", 4096),
        ("bias", 4095),
        ("odd", 5000),
        ("whole", 5120),
    ];
    let params = params.map(|(name, elems)| ParamSpec::new(name, [elems]));
    let model = Model {
        units: vec![UnitSpec::new("unit", params)],
        dtype: DType::Bf16,
        format: StateFormat::default()
            .masters(Masters::Remainder)
            .moments(Moments::EightBit),
        muon: None,
        seed: 7,
    };
    let layout = model.layout(1, 1);
    let places = layout.units()[0].params.iter().map(|param| param.range());
    let expected = [0..4096, 4096..8191, 8191..13191, 13312..18432];
    assert_eq!(places.collect::<Vec<_>>(), expected);

    let one = &model.world(shards(1))[0];
    let state = one.host.pool.report().of(Purpose::Optimizer).live_bytes;
    // The last one is frozen. Remainders, moments of 16 blocks, and of the others with padding in
    // fp32.
    let expected = 2 * 13312 + 2 * (16 * 260 + 4 * (13312 - 4096));
    assert!(
        state.abs_diff(expected) < 6 * 512,
        "{state} bytes, expected {expected}"
    );
}

#[test]
fn blocks_are_never_cut() {
    let host = Host::on(HostDevice::new());
    let build = |segment: Segment| {
        let format = StateFormat::default().moments(Moments::EightBit);
        let built = host.builder().format(format).build(vec![segment]);
        built.err().map(|error| error.to_string())
    };
    assert_eq!(build(Segment::shard("a", 0..512)), None);
    let error = build(Segment::shard("a", 0..500)).unwrap();
    let expected = "unit a: elements 0..500 have state in blocks of 256, but do not begin and end with blocks; make the \
                    layout with param_align_elems and shard_align_elems of 256, and the groups with ParamGroups::of_layout";
    assert_eq!(error, expected);
}

#[test]
fn parts_of_blocks_are_read_but_not_written() {
    let params = [ParamSpec::new("a", [5120])];
    let model = Model {
        units: vec![UnitSpec::new("unit", params)],
        dtype: DType::F32,
        format: StateFormat::default().moments(Moments::FourBit),
        muon: None,
        seed: 3,
    };
    for in_pieces in [false, true] {
        let place = Place {
            in_pieces,
            ..shards(1)
        };
        let mut world = model.world(place);
        model.step(&mut world, 0);
        let one = &mut world[0];
        let kind = StateKind::Slot("first_moment");
        let all = one.read(kind, 0, 0..5120);
        assert!(all.iter().any(|x| *x != 0.0));
        for range in [0..5120, 100..101, 127..129, 2900..3100] {
            let part = one.read(kind, 0, range.start as u64..range.end as u64);
            assert_eq!(bits(&part), bits(&all[range]));
        }

        let params = slices(&mut one.params);
        let range = StateRange {
            kind,
            unit: 0,
            elems: 128..200,
        };
        let optim = &mut one.optim;
        let stream = &one.host.stream;
        let written = optim.write_state(stream, &range, &params[0], &[0.0; 72], LIMIT);
        let expected = "unit unit: first_moment is in blocks of 128 elements; write whole blocks, not elements 128..200";
        assert_eq!(written.unwrap_err().to_string(), expected);
        let range = StateRange {
            elems: 128..256,
            ..range
        };
        let written = optim.write_state(stream, &range, &params[0], &[1.0; 128], LIMIT);
        written.unwrap();
        assert_eq!(one.read(kind, 0, 127..257)[1..129], [1.0; 128]);
    }
}

#[test]
fn parts_have_the_layouts_shapes() {
    let layout = Layout::new(
        &[UnitSpec::new("unit", [ParamSpec::new("a", [4, 6])])],
        1,
        1,
    );
    let of = |dim, whole: [u64; 2]| {
        let part = TensorPart::new(1, 2).unwrap();
        let cut = Some((
            ParamSpec::new("a", whole),
            TensorCut::Dim { dim, blocks: 1 },
        ));
        let matrices = vec![Matrix::linear(whole[0] as usize, whole[1] as usize)];
        let param = MatrixParam {
            group: 0,
            matrices,
            cut,
        };
        let all = |_| Some(param.clone());
        let matrices = Matrices::new(layout.as_ref().unwrap(), (0, part), false, false, all);
        matrices.err().map(|error| error.to_string())
    };
    assert_eq!(of(0, [8, 6]), None);
    assert_eq!(of(1, [4, 11]), None);
    let expected = "a: its cut leaves a part of shape [8, 3], and the layout has [4, 6]; make the layout of the \
                    units of TensorPart::unit";
    assert_eq!(of(1, [8, 6]).as_deref(), Some(expected));
    let expected = "\"a\" cannot be cut along dimension 2: it has 2 dimensions";
    assert_eq!(of(2, [8, 6]).as_deref(), Some(expected));
}

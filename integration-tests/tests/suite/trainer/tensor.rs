//! Tensor parallelism: the numbers of the ranks that each have all parameters, and bytes by the
//! formulas.
//!
//! Bits differ from those of whole parameters where a sum over a cut dimension is split between
//! ranks: in the outputs of second matrices, the gradients of norms' outputs, and the sum of
//! exponentials. In fp32 these are sums in another order, so losses agree within 1e-6, relative.
//! Stages, and switches that do not change the order of a sum, have the same bits.

use integration_tests::{GPT2, LLAMA, Oracle, QWEN2};
use proptest::prelude::*;
use zero::workload::{ModelWorkload, Weights};
use zero_alloc::device::DType;
use zero_models::ModelConfig;
use zero_models::gpt2::config::GptConfig;
use zero_models::llama::config::{Family, LlamaConfig};
use zero_optim::{DynamicScaling, LossScaling, OptimizerConfig};
use zero_shard::Sharding;
use zero_trainer::param_groups::ParamGroup;
use zero_trainer::{Home, MeshSettings};

use super::identical::{all_same, cases};
use super::resume::continued;
use super::support::{Case, Outcome, groups_of, homes, parts, shared};
use super::toy::Toy;
use super::ulysses::{close, linear, packed, sample, stages_agree, validation_agrees};

/// Two steps of micro-batches of 2 rows, on `data_ranks` times `ranks` ranks.
pub(super) fn case(oracle: Oracle, data_ranks: usize, ranks: usize) -> Case {
    Case {
        oracle,
        ranks: data_ranks * ranks,
        steps: 2,
        micro_batch: 2,
        reduce_every_micro_batch: true,
        optimizer: linear(),
        mesh: parts(ranks),
        ..Case::default()
    }
}

/// The same batches with whole parameters.
fn without_parts(case: &Case) -> Case {
    Case {
        ranks: case.ranks / case.mesh.ranks_of_batch(),
        mesh: MeshSettings::default(),
        partition_activations: false,
        sequence_parallel: false,
        ..case.clone()
    }
}

pub(super) fn whole(case: &Case) -> Outcome {
    without_parts(case).run_tiny()
}

/// Every stage has the numbers of whole parameters, with sequence parallelism and without.
fn stages_of(oracle: Oracle, data_ranks: usize, ranks: usize) {
    for sequence_parallel in [false, true] {
        let base =
            case(oracle, data_ranks, ranks).with(|case| case.sequence_parallel = sequence_parallel);
        stages_agree(&base, &whole(&base));
    }
}

#[test]
fn gpt2_at_every_stage() {
    for (data_ranks, ranks) in [(1, 2), (2, 2), (1, 4)] {
        stages_of(GPT2, data_ranks, ranks);
    }
}

#[test]
fn llama_at_every_stage() {
    stages_of(LLAMA, 1, 2);
    stages_of(LLAMA, 3, 2);
    stages_of(QWEN2, 2, 4);
}

/// Switches that keep the order of each sum keep the bits.
#[test]
fn switches_keep_the_bits() {
    for oracle in [GPT2, LLAMA] {
        let base = case(oracle, 2, 2).with(|case| case.grad_accum = 2);
        let whole = whole(&base);
        let dividing = base.with(|case| case.sequence_parallel = true);
        let checkpointing = |case: &Case| case.with(|case| case.activation_checkpointing = true);
        let divided = all_same([dividing.clone(), checkpointing(&dividing)]);
        close(&divided, &whole, 1e-6, "dividing tokens");

        let partitioning = checkpointing(&base).with(|case| case.partition_activations = true);
        let serial = base.with(|case| case.overlap = false);
        let offloading = base.with(|case| case.offload = homes(Home::Host, Home::Host));
        let cases = [
            base.clone(),
            checkpointing(&base),
            partitioning,
            serial,
            offloading,
        ];
        close(&all_same(cases), &whole, 1e-6, "accumulating");
    }
}

#[test]
fn bf16_agrees() {
    let base = case(LLAMA, 2, 2).with(|case| case.dtype = DType::Bf16);
    close(&base.run_tiny(), &whole(&base), 3e-3, "bf16");
}

/// A loss scale falls on all ranks in the same steps, though one part of the parameters overflows.
#[test]
fn overflow_skips_on_all_ranks() {
    let scaling = DynamicScaling::default()
        .initial_scale_power(20)
        .hysteresis(1);
    let base = Case {
        steps: 8,
        dtype: DType::F16,
        optimizer: OptimizerConfig::default().loss_scaling(LossScaling::Dynamic(scaling)),
        ..case(GPT2, 2, 2)
    };
    for stage in [1, 3] {
        let case = base.with(|case| case.stage = stage);
        let outcome = case.run_tiny();
        let skipped = |skips| outcome.steps.iter().any(|step| step.skipped == skips);
        assert!(skipped(true) && skipped(false), "{case:?}");
        let scales = outcome.summaries.iter().map(|summary| {
            let last = summary.last.as_ref().unwrap();
            (last.loss_scale, last.loss.to_bits())
        });
        let scales: Vec<_> = scales.collect();
        assert!(scales.iter().all(|scale| *scale == scales[0]), "{scales:?}");
    }
}

/// The other axes: groups over which states are sharded, and ranks that share sequences.
#[test]
fn with_other_axes() {
    let also_parts = |mesh| MeshSettings {
        tensor_ranks: Some(2),
        ..mesh
    };
    let two_level = MeshSettings {
        two_level: Some(2),
        ..shared(2)
    };
    for (oracle, mesh) in [
        (LLAMA, groups_of(2, Sharding::Hybrid)),
        (GPT2, groups_of(1, Sharding::Replicated)),
        (LLAMA, groups_of(2, Sharding::Secondary)),
        (LLAMA, shared(2)),
        (GPT2, shared(2)),
        (GPT2, two_level),
    ] {
        let mesh = also_parts(mesh);
        for sequence_parallel in [false, true] {
            let case = Case {
                mesh,
                activation_checkpointing: true,
                partition_activations: !sequence_parallel,
                sequence_parallel,
                ..case(oracle, 4, 2)
            };
            close(&case.run_tiny(), &whole(&case), 1e-6, &format!("{case:?}"));
        }
    }
}

/// Dropout with both axes that share micro-batches, whose ranks draw the masks of the whole rows.
#[test]
fn dropout_is_that_of_whole_parameters() {
    for (oracle, sequence_ranks, sequence_parallel) in [
        (GPT2, 2, false),
        (GPT2, 1, false),
        (GPT2, 2, true),
        (GPT2, 1, true),
        (LLAMA, 2, false),
    ] {
        let case = Case {
            sequence_parallel,
            mesh: MeshSettings {
                sequence_ranks: Some(sequence_ranks),
                ..parts(2)
            },
            ..case(oracle, sequence_ranks, 2)
        };
        let run = |case: &Case| {
            let mut workload = case.tiny();
            workload.config = workload.config.with_dropout(0.2);
            case.run(&workload)
        };
        let flat = run(&without_parts(&case));
        close(&run(&case), &flat, 1e-6, &format!("{case:?}"));
    }
}

/// Frozen tensors and rules of groups, by the names and shapes of whole parameters.
#[test]
fn groups_of_parameters() {
    let json = r#"[{"names": ["transformer.h.0.*"], "trainable": false},
        {"kinds": ["norm", "bias"], "weight_decay": 0.5}, {"max_dims": 1, "lr_scale": 2.0}]"#;
    let groups: Vec<ParamGroup> = serde_json::from_str(json).unwrap();
    let mut base = case(GPT2, 2, 2);
    base.groups.groups = groups[..2].to_vec();
    base.optimizer.hyper.weight_decay = 0.1;
    close(&base.run_tiny(), &whole(&base), 1e-6, "groups");
}

/// A checkpoint of any number of parts loads at any other, with its bits.
#[test]
fn checkpoints_load_at_any_number_of_parts() {
    // 8 rows a step at any number of data ranks.
    let at = |(data_ranks, ranks, stage)| Case {
        stage,
        micro_batch: 8 / data_ranks,
        ..case(QWEN2, data_ranks, ranks)
    };
    let cases = [(2, 2, 3), (1, 4, 2), (4, 1, 3), (1, 2, 1), (2, 4, 3)].map(at);
    continued(&cases, Some(&at((4, 1, 3))));
}

/// Bytes of activations that a rank holds and exchanges, with partitioned activations or without.
#[test]
fn bytes_held_and_sent() {
    for (oracle, ranks) in [(GPT2, 4), (LLAMA, 2)] {
        for (checkpoints, partitions, divides) in [
            (false, false, false),
            (true, false, false),
            (true, true, false),
            (false, false, true),
            (true, false, true),
        ] {
            let case = Case {
                activation_checkpointing: checkpoints,
                partition_activations: partitions,
                sequence_parallel: divides,
                ..case(oracle, 2, ranks)
            };
            let workload = case.tiny();
            held_and_exchanged_are_the_formulas(&workload, &case, &case.run(&workload));
        }
    }

    // By hand: 3 blocks, 2 rows of 32 tokens of 64 elements. Kept are the inputs of the blocks and of
    // the head; of four ranks each keeps a quarter of them, and two whole rows.
    let base = case(GPT2, 1, 4).with(|case| case.activation_checkpointing = true);
    let of = |partition_activations, sequence_parallel| {
        let case = Case {
            partition_activations,
            sequence_parallel,
            ..base.clone()
        };
        let last = case.run_tiny().summaries[0].last.clone().unwrap();
        (last.memory.activations_bytes, last.comm_bytes)
    };
    let (all_held, all_sent) = of(false, false);
    let (part_held, part_sent) = of(true, false);
    let (divided_held, divided_sent) = of(false, true);
    let row = 4 * 2 * 32 * 64;
    assert_eq!(all_held - part_held, 4 * row - (2 * row + 4 * row / 4));
    // Two sums in each forward of a block, of which one is not repeated in its backward; two in its
    // backward; one each of the embedding and the head. Of two of the four rows, backward finds the
    // whole: those in the ring.
    assert_eq!(all_sent.all_reduce, row * 2 * 3 / 4 * (5 * 3 + 2));
    assert_eq!(part_sent.all_gather - all_sent.all_gather, 2 * row * 3 / 4);
    // A quarter of the inputs, of the stream behind attention, and of the statistics of two norms of
    // a block and one of the head, each two numbers a token. The norms' outputs are whole.
    let stats = 4 * 2 * 32 * 2;
    assert_eq!(all_held - divided_held, (5 * row + 3 * stats) * 3 / 4);
    // Each sum above is a reduce-scatter; a block's forward has two gathers, which are repeated, and
    // its backward two of gradients; one each of the embedding and the head.
    let sums = divided_sent.reduce_scatter - all_sent.reduce_scatter;
    assert_eq!(sums, row * 3 / 4 * (5 * 3 + 2));
    let gathers = divided_sent.all_gather - all_sent.all_gather;
    assert_eq!(gathers, row * 3 / 4 * (6 * 3 + 2));
    // The gradients of two norms a block, and of the head's: gain and bias of 64 elements each.
    assert_eq!(divided_sent.all_reduce, 4 * 2 * 3 / 4 * (3 * 4 + 2) * 64);
}

/// Compares the bytes that ranks exchange in a step, and those of their activations, with the
/// model's formulas.
fn held_and_exchanged_are_the_formulas(workload: &ModelWorkload, case: &Case, outcome: &Outcome) {
    let ModelWorkload {
        config, options, ..
    } = workload;
    for summary in &outcome.summaries {
        let last = summary.last.as_ref().unwrap();
        let planned = config.activations_bytes(options);
        assert_eq!(last.memory.activations_bytes, planned, "{case:?}");

        // Stages 1 to 3 enqueue no all-reduce themselves. Activations on the host are in fp32.
        let row = options.micro_batch * options.seq_len * config.hidden();
        let ranks = options.tensor_ranks * options.sequence_ranks;
        let partial = match config {
            ModelConfig::Llama(config) => 2 * config.head_dim,
            ModelConfig::Gpt2(_) => 0,
        };
        let sizes = [partial, config.hidden()];
        let divides = |size: &usize| size.is_multiple_of(options.tensor_ranks);
        if case.stage > 0 && row.is_multiple_of(ranks) && sizes.iter().all(divides) {
            let sent = config.tensor_elems(options, false).bytes(4);
            assert_eq!(last.comm_bytes.all_reduce, sent.all_reduce, "{case:?}");
        }
    }
}

/// A random model, and the ranks that cut it.
#[derive(Clone, Debug)]
struct Shape {
    config: ModelConfig,
    data_ranks: usize,
    ranks: usize,
    sequence_ranks: usize,
    stage: u64,
    checkpoints: bool,
    partitions: bool,
    divides: bool,
    documents: bool,
}

fn gpt2() -> impl Strategy<Value = (ModelConfig, usize)> {
    // Wide enough for norms: one of two elements multiplies rounding errors.
    let sizes = (1usize..5, 1usize..3, 8usize..13, 1usize..3, 37usize..60);
    sizes.prop_map(|(ranks, heads, d, layers, vocab)| {
        let heads = heads * ranks;
        let config = GptConfig {
            vocab_size: vocab + 220,
            n_positions: 32,
            n_inner: 6 * ranks,
            tied_head: d % 2 == 0,
            ..GptConfig::gpt2(heads * d, layers, heads)
        };
        (config.into(), ranks)
    })
}

fn llama() -> impl Strategy<Value = (ModelConfig, usize)> {
    let sizes = (1usize..5, 1usize..3, 1usize..3, 4usize..7, 1usize..3);
    let variant = (37usize..60, any::<bool>(), any::<bool>());
    (sizes, variant).prop_map(
        |((ranks, kv_heads, group, half, layers), (vocab, norms, biases))| {
            let kv_heads = kv_heads * ranks;
            let config = LlamaConfig {
                family: if norms { Family::Qwen3 } else { Family::Llama },
                vocab_size: vocab + 220,
                max_positions: 32,
                hidden: 36,
                layers,
                heads: group * kv_heads,
                kv_heads,
                head_dim: 2 * half,
                intermediate: 6 * ranks,
                qkv_bias: biases,
                output_bias: biases,
                mlp_bias: biases,
                tied_head: norms,
                ..LlamaConfig::llama2()
            };
            (config.into(), ranks)
        },
    )
}

fn shapes() -> impl Strategy<Value = Shape> {
    let model = prop_oneof![gpt2(), llama()];
    let dropout = prop_oneof![Just(0.0f32), 0.05f32..0.4];
    let switches = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let mesh = (1usize..3, 0u64..4, any::<bool>());
    (model, dropout, mesh, switches).prop_map(|((config, ranks), dropout, mesh, switches)| {
        let (data_ranks, stage, divides) = mesh;
        // Two rows of 12 tokens.
        let divides = divides && ranks > 1;
        let (checkpoints, partitions, documents, shares) = switches;
        let config = config.with_dropout(dropout).with_initializer_range(0.2);
        let heads = match &config {
            ModelConfig::Llama(config) => config.kv_heads / ranks,
            ModelConfig::Gpt2(config) => config.n_head / ranks,
        };
        Shape {
            config,
            data_ranks,
            ranks,
            sequence_ranks: if shares && heads % 2 == 0 { 2 } else { 1 },
            stage,
            checkpoints,
            partitions: partitions && checkpoints && ranks > 1 && !divides,
            divides,
            documents,
        }
    })
}

impl Shape {
    fn run(&self, mesh: MeshSettings) -> (Case, ModelWorkload, Outcome) {
        let case = Case {
            oracle: Oracle { seq: 12, ..GPT2 },
            ranks: self.data_ranks * mesh.ranks_of_batch(),
            stage: self.stage,
            steps: 1,
            activation_checkpointing: self.checkpoints,
            partition_activations: self.partitions && mesh.tensor_ranks.is_some(),
            sequence_parallel: self.divides && mesh.tensor_ranks.is_some(),
            mesh,
            ..case(GPT2, 1, 1)
        };
        let workload = ModelWorkload {
            config: self.config.clone(),
            weights: Weights::Initial(3),
            ..case.tiny()
        };
        let outcome = match self.documents {
            true => case.run(&packed(&workload)),
            false => case.run(&workload),
        };
        (case, workload, outcome)
    }
}

proptest! {
    #![proptest_config(cases(6))]

    /// Any sizes, vocabularies that the ranks do not divide, documents and dropout have the numbers of
    /// whole parameters. With 1,200 cases (`ZERO_PROPTEST_FACTOR=200`) none exceeds a fifth of the limit.
    #[test]
    fn models_of_any_size(shape in shapes()) {
        let (_, _, want) = shape.run(MeshSettings::default());
        let (case, workload, outcome) = shape.run(MeshSettings {
            sequence_ranks: Some(shape.sequence_ranks),
            ..parts(shape.ranks)
        });
        close(&outcome, &want, 1e-6, &format!("{shape:?}"));
        held_and_exchanged_are_the_formulas(&workload, &case, &outcome);
    }
}

#[test]
fn refusals_say_what_to_change() {
    let refused = |oracle: Oracle, ranks: usize, edit: &dyn Fn(&mut ModelWorkload)| {
        let case = case(oracle, 1, ranks);
        let mut workload = case.tiny();
        edit(&mut workload);
        case.refusal_of(&workload)
    };
    let unchanged = |_: &mut ModelWorkload| {};
    let error = refused(GPT2, 3, &unchanged);
    assert!(error.contains("c_attn.weight"), "{error}");
    let error = refused(LLAMA, 4, &unchanged);
    assert!(error.contains("num_key_value_heads 2"), "{error}");
    let error = refused(GPT2, 2, &|workload| workload.options.tensor_ranks = 1);
    assert!(error.contains("ModelOptions::tensor_ranks"), "{error}");
    let error = refused(GPT2, 2, &|workload| {
        workload.options.partition_activations = true;
    });
    assert!(error.contains("set activation checkpointing"), "{error}");
    let error = refused(GPT2, 2, &|workload| {
        workload.options.activation_checkpointing = true;
        workload.options.partition_activations = true;
        workload.options.sequence_parallel = true;
    });
    assert!(error.contains("set one of the two"), "{error}");
    let error = refused(GPT2, 2, &|workload| {
        workload.options.micro_batch = 1;
        workload.options.seq_len = 31;
        workload.options.sequence_parallel = true;
    });
    assert!(error.contains("do not divide the 31 tokens"), "{error}");

    let case = case(GPT2, 1, 2).with(|case| case.ranks = 3);
    let error = case.refusal();
    assert!(error.contains("divides the 3 ranks"), "{error}");
    let toy = Toy::new(&[vec![40], vec![7]], true);
    let case = Case { ranks: 2, ..case };
    let error = case.refusal_of(&toy);
    assert!(error.contains("no tensor parallelism"), "{error}");
}

#[test]
fn validation_is_that_of_whole_parameters() {
    let base = case(GPT2, 2, 2);
    validation_agrees(&base, &without_parts(&base));
}

#[test]
fn samples_are_those_of_whole_parameters() {
    let both = MeshSettings {
        sequence_ranks: Some(2),
        ..parts(2)
    };
    let base = case(GPT2, 1, 2);
    let want = sample(&without_parts(&base), 12);
    for (data_ranks, mesh) in [(1, parts(2)), (2, both)] {
        let case = case(GPT2, data_ranks, 2).with(|case| case.mesh = mesh);
        assert_eq!(sample(&case, 12), want);
    }
}

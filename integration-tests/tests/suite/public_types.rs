//! Which public types of the six crates other crates may construct or match without a wildcard.
//!
//! The rule: public types that will grow are `#[non_exhaustive]`. Those are errors, options,
//! reports, saved state, inputs, and enums that will get members (`DType`, schedules, collectives).
//! Users make options by `new` with what is required, or by `Default`, and by-value setters named
//! like the fields, which stay public. In another crate the wildcard arm of a match returns an
//! error.
//!
//! A type is closed if its members are its definition: ids, ranges and pieces (`ParamId`, `Move`),
//! descriptions of a model and of a file's tensors (`ParamSpec`, `TensorCut`, `TensorEntry`), structs that
//! kernels read (`StepScalars`), arguments and hyperparameters of one algorithm (`AdamHyper`,
//! DeepSpeed's schedules), and complete sets (`ZeroStage`, `Tier`, `SwapAccess`, `StepOutcome`, whose variants
//! grow). fp8 will be two members of `DType`: zero-alloc does not compile until its methods know
//! them, zero-comm refuses them until `CommDType` and so each back end knows them, kernels and
//! optimizer return errors that name the dtype.

use std::collections::BTreeSet;
use std::path::Path;

/// By crate, the types that are closed on purpose: their members are their definition.
const CLOSED: [(&str, &str); 6] = [
    (
        "zero-shard",
        "BucketPiece ElemLocation Home LayoutSpec Move ParamId ParamPiece ParamSpec Placement ShardPiece \
         StateBytes StoredPiece TensorCut TensorPiece TensorRun Tie Tier TransformerShape UnitSpec Widths \
         WireFormat ZeroStage",
    ),
    ("zero-alloc", "Polling Search SwapAccess"),
    (
        "zero-kernels",
        "AdamHyper AdamScalars AdamSlices AdvanceArgs AverageCodecs BlockSlot CodedSlice EncodeSums Feedback FloatSlice FloatSliceMut GradStats MatrixRows Muon NewtonSchulz OrthogonaliseArgs RankStats RemainderSlices \
         Rounding Segments SettingError Slot Span StepConfig StepPoint StepRates StepRecord StepScalars StepState UpdateArgs UpdateSlices WeightSlices Weights",
    ),
    ("zero-comm", "Group Link Part Socket Traffic"),
    (
        "zero-optim",
        "Decay GroupRun Matrix MatrixParam OffloadedMatrices OneCycle ParamGroup ParamGroups ParamKind RangeTest RankParams Segment StateKind StateRange StepOutcome UnitSlices Warmup \
         WarmupCosine WarmupDecay",
    ),
    ("zero-ckpt", "Header ModelSpec StateSpec TensorEntry"),
];

#[test]
fn growing_types_are_non_exhaustive() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (name, closed) in CLOSED {
        let mut types = 0;
        let mut open = BTreeSet::new();
        visit(&root.join(name).join("src"), &mut |text| {
            types += exhaustive_types(text, &mut open)
        });
        assert!(
            types > 0,
            "no public type found in {name}: has its source moved?"
        );
        let closed: BTreeSet<String> = closed.split_whitespace().map(str::to_owned).collect();
        let (new, gone): (Vec<_>, Vec<_>) = (
            open.difference(&closed).collect(),
            closed.difference(&open).collect(),
        );
        assert!(
            new.is_empty(),
            "{name}: decide about {new:?}. May a later release add a field or variant? Then mark the type \
             #[non_exhaustive], and give users `new` or `Default` and setters if they make it. If its \
             members are its definition, add it to CLOSED in {}",
            file!()
        );
        assert!(
            gone.is_empty(),
            "{name}: {gone:?} are now #[non_exhaustive] or gone; remove them from CLOSED"
        );
    }
}

fn visit(dir: &Path, with: &mut dyn FnMut(&str)) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.extension() {
            _ if path.is_dir() => visit(&path, with),
            Some(extension) if extension == "rs" => with(&std::fs::read_to_string(&path).unwrap()),
            _ => {}
        }
    }
}

/// Adds the public enums, and the public structs whose named fields are all public, that are not
/// `#[non_exhaustive]`. Returns the number of public enums and structs with named fields.
fn exhaustive_types(text: &str, found: &mut BTreeSet<String>) -> usize {
    let mut types = 0;
    let mut marked = false;
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let item = line
            .strip_prefix("pub struct ")
            .or(line.strip_prefix("pub enum "));
        if let Some(item) = item.filter(|_| line.ends_with('{')) {
            types += 1;
            let body = lines.by_ref().take_while(|line| !line.starts_with('}'));
            let members = body
                .filter_map(|line| line.strip_prefix("    "))
                .filter(|member| {
                    member.starts_with(|first: char| first.is_alphanumeric()) // no comment, attribute or inner line
                });
            let private = members.filter(|member| !member.starts_with("pub ")).count();
            if !marked && (line.starts_with("pub enum") || private == 0) {
                let name = item.split(|c: char| !c.is_alphanumeric()).next();
                found.extend(name.map(str::to_owned));
            }
        }
        marked = line == "#[non_exhaustive]"
            || marked && (line.starts_with('#') || line.starts_with("//"));
    }

    types
}

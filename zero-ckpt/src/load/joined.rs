//! The whole model of a tensor-parallel run, in a checkpoint that stores the parts of its ranks.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use zero_shard::{Layout, ParamId, ShardError, TensorCut, UnitSpec, tensor_pieces};

use crate::format::manifest::Manifest;
use crate::format::runs::elems_of;
use crate::format::tensor_parallel::{TENSOR_PARALLEL_JSON, TensorParallel};
use crate::io::dir::Dir;
use crate::load::document::read_document;
use crate::{CkptError, ModelSpec};

/// The whole parameters, and the place of their parts in the stored units.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) document: TensorParallel,
    /// The units of the whole model; stored units have the same positions.
    pub(crate) units: Vec<UnitSpec>,
    /// The layout of the whole model on one rank.
    pub(crate) layout: Layout,
    /// By unit and parameter: its position in the part of a rank.
    positions: Vec<Vec<usize>>,
}

impl Joined {
    /// Reads the document of a checkpoint; `None` if it has none.
    pub(crate) fn read(dir: &Dir, manifest: &Manifest) -> Result<Option<Self>, CkptError> {
        let mut documents = manifest.documents.iter();
        let Some(record) = documents.find(|document| document.name == TENSOR_PARALLEL_JSON) else {
            return Ok(None);
        };
        let bytes = read_document(dir, record)?;
        Self::parse(&bytes, manifest, dir.path()).map(Some)
    }

    /// Parses the document of the checkpoint in `dir` and checks that the manifest's model is that
    /// of its joined units.
    pub(crate) fn parse(bytes: &[u8], manifest: &Manifest, dir: &Path) -> Result<Self, CkptError> {
        let bad = |why: String| CkptError::BadFile {
            path: dir.join(TENSOR_PARALLEL_JSON),
            why,
        };
        let document: TensorParallel = serde_json::from_slice(bytes)
            .map_err(|e| bad(format!("invalid description of tensor-parallel ranks: {e}")))?;
        Self::new(document, manifest).map_err(|why| {
            bad(format!(
                "it contradicts the manifest: {why}; save the document that `TensorParallel::new` makes for the saved \
                 units and ranks, or load another checkpoint"
            ))
        })
    }

    fn new(document: TensorParallel, manifest: &Manifest) -> Result<Self, String> {
        let text = |error: ShardError| error.to_string();
        check_sizes(&document, manifest)?;
        let units = document.whole_units();
        let layout = Layout::new(&units, 1, 1).map_err(text)?;
        let local = document.local_units().map_err(text)?;

        let data_ranks = manifest.layout.world_size / document.ranks;
        let joined = document
            .joined_units(data_ranks, manifest.layout.align_elems)
            .map_err(text)?;
        let stored = &manifest.model.units;
        if let Some((expected, got)) = first_difference(&joined, stored) {
            return Err(format!("expected {expected} in the manifest, got {got}"));
        }

        let position_of = |(whole, local): (&UnitSpec, &UnitSpec)| {
            let names = local.params.iter().enumerate();
            let positions: HashMap<&str, usize> =
                names.map(|(i, param)| (param.name.as_str(), i)).collect();
            let params = whole.params.iter();
            params
                .filter_map(|param| positions.get(param.name.as_str()).copied())
                .collect()
        };
        let positions = units.iter().zip(&local).map(position_of).collect();

        Ok(Self {
            document,
            units,
            layout,
            positions,
        })
    }

    /// The cut of a parameter.
    pub(crate) fn cut(&self, id: ParamId) -> TensorCut {
        self.document.units[id.unit].params[id.param].cut
    }

    /// Splits elements `range` of a whole parameter into ranges of its stored unit, in order.
    pub(crate) fn stored<'a>(
        &'a self,
        stored: &'a Layout,
        id: ParamId,
        range: Range<u64>,
    ) -> Result<impl Iterator<Item = Range<u64>> + 'a, ShardError> {
        let param = &self.units[id.unit].params[id.param];
        let part_params = self.units[id.unit].params.len() + 1; // with its padding
        let position = self.positions[id.unit][id.param];
        let unit = &stored.units()[id.unit];

        let pieces = tensor_pieces(param, self.cut(id), self.document.ranks, range)?;
        Ok(pieces.map(move |piece| {
            let of_rank = &unit.params[piece.rank as usize * part_params + position];
            let start = elems_of(unit, of_rank).start;
            start + piece.in_part.start..start + piece.in_part.end
        }))
    }
}

/// The model of which a checkpoint in `dir` holds the state, where `document` is its
/// `tensor_parallel.json`.
pub(crate) fn whole_model(
    manifest: &Manifest,
    document: Option<&[u8]>,
    dir: &Path,
) -> Result<ModelSpec, CkptError> {
    match document {
        None => Ok(manifest.model.clone()),
        Some(bytes) => Ok(ModelSpec {
            units: Joined::parse(bytes, manifest, dir)?.units,
        }),
    }
}

/// Checks ranks, units and numbers of parameters, so that the joined units that a document
/// describes are as large as those of the manifest.
fn check_sizes(document: &TensorParallel, manifest: &Manifest) -> Result<(), String> {
    let ranks = document.ranks;
    let world_size = manifest.layout.world_size;
    if ranks == 0 || !world_size.is_multiple_of(ranks) {
        return Err(format!(
            "{ranks} tensor-parallel ranks do not divide the {world_size} ranks of the manifest"
        ));
    }

    let stored = &manifest.model.units;
    if document.units.len() != stored.len() {
        return Err(format!(
            "it has {} units, the manifest {}",
            document.units.len(),
            stored.len()
        ));
    }
    for (unit, stored) in document.units.iter().zip(stored) {
        let params = unit.params.len() as u64;
        let padding = if ranks == 1 { 0 } else { 1 };
        let expected = (params + padding).checked_mul(ranks);
        if expected != Some(stored.params.len() as u64 + padding) {
            return Err(format!(
                "unit {:?} has {params} parameters on each of {ranks} ranks, and {} in the manifest",
                unit.name,
                stored.params.len()
            ));
        }
    }
    Ok(())
}

/// The first name or shape that differs, as text.
fn first_difference(expected: &[UnitSpec], got: &[UnitSpec]) -> Option<(String, String)> {
    for (expected, got) in expected.iter().zip(got) {
        if expected.name != got.name {
            let text = |unit: &UnitSpec| format!("unit {:?}", unit.name);
            return Some((text(expected), text(got)));
        }
        let mut params = expected.params.iter().zip(&got.params);
        if let Some((expected, got)) = params.find(|(expected, got)| expected != got) {
            let text = |p: &zero_shard::ParamSpec| format!("{:?} of shape {:?}", p.name, p.shape);
            return Some((text(expected), text(got)));
        }
    }
    None
}

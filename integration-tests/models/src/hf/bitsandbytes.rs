//! Matrices in 4 bits as bitsandbytes saves them: each a tensor of bytes with two codes each, and
//! tensors beside it whose names start with its own.
//!
//! | tensor | content |
//! |---|---|
//! | `W` | codes, the first of two in the upper half of a byte |
//! | `W.quant_state.bitsandbytes__nf4` | JSON: the shape and the elements of a block |
//! | `W.quant_map` | the value of each code |
//! | `W.absmax` | the scale of each block in fp32, or a code of 8 bits |
//! | `W.nested_absmax`, `W.nested_quant_map` | the scales and values of those codes |
//!
//! A value is `quant_map[code] * scale`. Encoded as NF4 again it gives the same codes and scales.

use std::ops::Range;

use serde::Deserialize;
use zero_ckpt::TensorFolder;

use super::HfError;

/// What stands before the type in the name of a matrix's state.
const STATE: &str = ".quant_state.bitsandbytes__";

/// A matrix in 4 bits.
pub(super) struct PackedMatrix {
    pub(super) shape: Vec<u64>,
    /// Elements of a block.
    block_elems: u64,
    table: Vec<f32>,
    scales: Vec<f32>,
}

#[derive(Deserialize)]
struct State {
    blocksize: u64,
    shape: Vec<u64>,
    nested_blocksize: Option<u64>,
    nested_offset: Option<f64>,
}

/// Whether a tensor belongs to a matrix in 4 bits, beside its codes.
pub(super) fn is_beside_matrix(weights: &TensorFolder, name: &str) -> bool {
    let ends = [
        ".absmax",
        ".quant_map",
        ".nested_absmax",
        ".nested_quant_map",
    ];
    let of_matrix = ends.iter().find_map(|end| name.strip_suffix(end));
    name.contains(STATE) || of_matrix.is_some_and(|matrix| state_of(weights, matrix).is_some())
}

/// The name of the state of a matrix.
fn state_of(weights: &TensorFolder, matrix: &str) -> Option<String> {
    let names = ["nf4", "fp4"].map(|kind| format!("{matrix}{STATE}{kind}"));
    names
        .into_iter()
        .find(|name| weights.tensor(name).is_some())
}

impl PackedMatrix {
    /// The matrix whose codes are the tensor `name`; `None` if it is not in 4 bits.
    ///
    /// # Errors
    /// A tensor beside it is missing or damaged.
    pub(super) fn open(weights: &TensorFolder, name: &str) -> Result<Option<Self>, HfError> {
        let Some(state_name) = state_of(weights, name) else {
            return Ok(None);
        };
        let bad = |why: String| HfError::Packed {
            path: weights
                .tensor(name)
                .map_or(weights.path(), |(_, file)| file)
                .to_owned(),
            name: name.to_owned(),
            why,
        };
        let bytes = |name: &str| {
            let len = weights.tensor(name).map_or(0, |(tensor, _)| tensor.elems());
            let mut bytes = vec![0; len as usize];
            weights.read_bytes(name, 0..len, &mut bytes)?;
            Ok::<_, HfError>(bytes)
        };
        let floats = |end: &str| {
            let name = format!("{name}{end}");
            let (tensor, _) = weights
                .tensor(&name)
                .ok_or_else(|| bad(format!("{name} is missing")))?;
            let mut values = vec![0.0; tensor.elems() as usize];
            weights.read(&name, 0..tensor.elems(), &mut values)?;
            Ok::<_, HfError>(values)
        };

        let state: State = serde_json::from_slice(&bytes(&state_name)?)
            .map_err(|error| bad(format!("{state_name}: {error}")))?;
        let elems = state
            .shape
            .iter()
            .try_fold(1_u64, |n, dim| n.checked_mul(*dim));
        let elems = elems.filter(|_| state.blocksize > 0).unwrap_or(0);
        let blocks = elems.div_ceil(state.blocksize.max(1));
        let codes = weights.tensor(name).map_or(0, |(tensor, _)| tensor.elems());
        let table = floats(".quant_map")?;
        if elems == 0 || codes != elems.div_ceil(2) || table.len() != 16 {
            let shape = &state.shape;
            return Err(bad(format!(
                "{codes} bytes and {} values of codes do not match shape {shape:?} in blocks of {}",
                table.len(),
                state.blocksize
            )));
        }

        let absmax = format!("{name}.absmax");
        let scales = match weights.tensor(&absmax) {
            Some((tensor, _)) if tensor.dtype == "U8" => {
                let nested = floats(".nested_absmax")?;
                let values = floats(".nested_quant_map")?;
                let every = state.nested_blocksize.unwrap_or(0).max(1) as usize;
                let offset = state.nested_offset.unwrap_or(0.0) as f32;
                let codes = bytes(&absmax)?;
                if values.len() != 256 || nested.len() < codes.len().div_ceil(every) {
                    return Err(bad("its nested scales do not match its scales".to_owned()));
                }
                let scale = |(i, code): (usize, &u8)| {
                    values[usize::from(*code)] * nested[i / every] + offset
                };
                codes.iter().enumerate().map(scale).collect()
            }
            _ => floats(".absmax")?,
        };
        if scales.len() as u64 != blocks {
            return Err(bad(format!("{} scales for {blocks} blocks", scales.len())));
        }
        Ok(Some(Self {
            shape: state.shape,
            block_elems: state.blocksize,
            table,
            scales,
        }))
    }

    /// Reads elements `range` of the matrix, whose codes are the tensor `name`.
    pub(super) fn read(
        &self,
        weights: &TensorFolder,
        name: &str,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), HfError> {
        let first = range.start / 2;
        let mut bytes = vec![0; (range.end.div_ceil(2) - first) as usize];
        weights.read_bytes(name, first..range.end.div_ceil(2), &mut bytes)?;
        for (at, out) in range.zip(out) {
            let byte = bytes[(at / 2 - first) as usize];
            let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
            *out = self.table[usize::from(code)] * self.scales[(at / self.block_elems) as usize];
        }
        Ok(())
    }
}

//! Units that hold the parts of all tensor-parallel ranks, one behind the other.
//!
//! A checkpoint of a tensor-parallel run stores one model of which every rank has one shard: its
//! units are the **joined** units. A joined unit has the parameters of part 0, then those of part
//! 1, and so on; padding behind each part but the last makes every part as long as its shards.
//!
//! ```text
//! local unit, sharded over D = 2     | part m . . . . . | pad |    L elements, D shards of S
//! joined unit, over M * D = 4        | part 0 . . . . . | pad | part 1 . . . . . | - - |
//! shards                             | 0         | 1          | 2         | 3          |
//! ```
//!
//! Shard `m * D + d` of the joined unit is shard `d` of part `m`: with alignment `A`, `S` is
//! `ceil(L / (D A)) A`, and the joined unit of `(M - 1) D S + L` elements over `M D` ranks has
//! shards of `ceil(((M - 1) D S + L) / (M D A)) A`. With `k = ceil(L / (D A))`, the quotient is in
//! `k - 1/M .. k` without its start, so both are `k A`.

use crate::{Layout, ParamSpec, ShardError, UnitSpec};

/// Joins the parts of `tensor_ranks` ranks. `units` are those of one part, with the names of the
/// whole parameters ([`TensorPart::unit`](crate::TensorPart::unit)); all parts have the same
/// shapes. The part of rank `m` of the parameter `NAME` is named `NAME@m/M`, the padding behind the
/// part of rank `m` of the unit `UNIT` is the parameter `pad.UNIT@m/M`, which may be empty. With
/// one tensor-parallel rank, these are the units themselves.
///
/// Lay the result out over `tensor_ranks * data_ranks` ranks with the same alignment and no
/// alignment of parameters: then shard `m * data_ranks + d` of each unit is shard `d` of part `m`
/// over `data_ranks` ranks.
///
/// # Errors
/// No ranks, an alignment of 0, a name used twice, or a size beyond 64 bits.
pub fn joined_units(
    units: &[UnitSpec],
    tensor_ranks: u64,
    data_ranks: u64,
    align_elems: u64,
) -> Result<Vec<UnitSpec>, ShardError> {
    let layout = Layout::new(units, data_ranks, align_elems)?;
    match tensor_ranks {
        0 => return Err(ShardError::NoRanks),
        1 => return Ok(units.to_vec()),
        _ => {}
    }

    let joined = units.iter().zip(layout.units()).map(|(unit, placed)| {
        let padding_elems = placed.padded_elems - placed.numel_elems;
        let mut params = Vec::new();
        for rank in 0..tensor_ranks {
            let name_of = |name: &str| format!("{name}@{rank}/{tensor_ranks}");
            let local = unit.params.iter();
            params.extend(local.map(|p| ParamSpec::new(name_of(&p.name), p.shape.as_slice())));
            if rank + 1 < tensor_ranks {
                let padding = name_of(&format!("pad.{}", unit.name));
                params.push(ParamSpec::new(padding, [padding_elems]));
            }
        }
        UnitSpec::new(unit.name.as_str(), params)
    });
    Ok(joined.collect())
}

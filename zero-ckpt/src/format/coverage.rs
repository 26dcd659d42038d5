//! The map from elements to files. Checks that every element is in exactly one file.

use std::ops::Range;
use std::path::Path;

use zero_shard::{Layout, UnitLayout};

use crate::{CkptError, UnitRange};

/// A piece and its location.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PieceLocation {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) file: usize,
    pub(crate) piece: usize,
}

/// The pieces of each unit by ascending start; they cover `0..numel_elems` without gap or overlap.
#[derive(Debug)]
pub(crate) struct Coverage {
    units: Vec<Vec<PieceLocation>>,
}

impl Coverage {
    /// Checks the pieces of all files; `path` is for error messages.
    pub(crate) fn new<'a>(
        layout: &Layout,
        files: impl Iterator<Item = &'a [UnitRange]>,
        path: &Path,
    ) -> Result<Self, CkptError> {
        let bad = |why: String| CkptError::BadManifest {
            path: path.to_path_buf(),
            why,
        };

        let mut units: Vec<Vec<PieceLocation>> = vec![Vec::new(); layout.units().len()];
        for (file, pieces) in files.enumerate() {
            for (piece, &UnitRange(unit, start, end)) in pieces.iter().enumerate() {
                let held = usize::try_from(unit).ok().and_then(|u| units.get_mut(u));
                let held = held
                    .ok_or_else(|| bad(format!("a piece of unit {unit}, which does not exist")))?;
                if start >= end {
                    return Err(bad(format!(
                        "a piece {start}..{end} of unit {unit} is empty"
                    )));
                }
                held.push(PieceLocation {
                    start,
                    end,
                    file,
                    piece,
                });
            }
        }

        for (held, unit) in units.iter_mut().zip(layout.units()) {
            held.sort_unstable();
            check_unit(held, unit, path)?;
        }

        Ok(Self { units })
    }

    /// The pieces that hold `range` of unit `unit`, in order, each with its part of the range. The
    /// range must be within the unit.
    pub(crate) fn find(
        &self,
        unit: usize,
        range: Range<u64>,
    ) -> impl Iterator<Item = (PieceLocation, Range<u64>)> + '_ {
        let held = &self.units[unit];
        let first = held.partition_point(|h| h.end <= range.start);
        held[first..]
            .iter()
            .map(move |h| (*h, h.start.max(range.start)..h.end.min(range.end)))
            .take_while(|(_, part)| part.start < part.end)
    }
}

/// Checks that the pieces `held`, by ascending start, are all elements of `unit`, each once.
fn check_unit(held: &[PieceLocation], unit: &UnitLayout, path: &Path) -> Result<(), CkptError> {
    let path = path.to_path_buf();
    let name = unit.name.clone();
    let mut end = 0;
    for piece in held {
        if piece.start > end {
            return Err(CkptError::Uncovered {
                path,
                unit: name,
                range: end..piece.start.min(unit.numel_elems),
            });
        }
        if piece.start < end {
            return Err(CkptError::CoveredTwice {
                path,
                unit: name,
                range: piece.start..end.min(piece.end),
            });
        }
        end = piece.end;
    }

    if end < unit.numel_elems {
        return Err(CkptError::Uncovered {
            path,
            unit: name,
            range: end..unit.numel_elems,
        });
    }

    if end > unit.numel_elems {
        let why = format!(
            "unit {name:?} has {} elements; a piece ends at {end}",
            unit.numel_elems
        );
        return Err(CkptError::BadManifest { path, why });
    }

    Ok(())
}

#[cfg(test)]
mod tests {
    use zero_shard::{ParamSpec, UnitSpec};

    use super::*;

    fn coverage(files: &[&[UnitRange]]) -> Result<Coverage, CkptError> {
        let unit =
            |n: &str, elems: u64| UnitSpec::new(n, [ParamSpec::new(format!("{n}.p"), [elems])]);
        let layout = Layout::new(&[unit("a", 10), unit("b", 0), unit("c", 3)], 2, 4).unwrap();
        Coverage::new(&layout, files.iter().copied(), Path::new("m"))
    }

    #[test]
    fn pieces_of_a_range_are_found() {
        let c = coverage(&[
            &[UnitRange(0, 0, 4), UnitRange(2, 0, 3)],
            &[UnitRange(0, 4, 10)],
        ])
        .unwrap();
        let found: Vec<_> = c
            .find(0, 3..6)
            .map(|(h, part)| (h.file, h.piece, part))
            .collect();
        assert_eq!(found, [(0, 0, 3..4), (1, 0, 4..6)]);
        assert_eq!(c.find(0, 10..10).count(), 0);
        assert_eq!(c.find(1, 0..0).count(), 0);
    }

    #[test]
    fn gap_or_overlap_is_named() {
        let text = |files: &[&[UnitRange]]| coverage(files).unwrap_err().to_string();
        assert!(
            text(&[&[UnitRange(2, 0, 3)]])
                .contains("elements 0 to 10 of unit \"a\" are in no file")
        );
        assert!(text(&[&[UnitRange(0, 0, 4)], &[UnitRange(0, 5, 10)]]).contains("elements 4 to 5"));
        assert!(
            text(&[&[UnitRange(0, 0, 10), UnitRange(2, 0, 2)]])
                .contains("elements 2 to 3 of unit \"c\"")
        );
        assert!(
            text(&[&[UnitRange(0, 0, 6)], &[UnitRange(0, 4, 10)]])
                .contains("elements 4 to 6 of unit \"a\" are in two")
        );
        assert!(text(&[&[UnitRange(0, 0, 11), UnitRange(2, 0, 3)]]).contains("ends at 11"));
        assert!(text(&[&[UnitRange(3, 0, 1)]]).contains("unit 3"));
        assert!(text(&[&[UnitRange(0, 5, 5)]]).contains("empty"));
    }
}

//! The state bytes of a file, read piece by piece while the file is written.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use zero_shard::Layout;

use super::records::StagingSlice;
use super::unit_parts::{UnitPart, unit_parts};
use crate::StateSpec;
use crate::io::parallel::ByteSource;

/// State that a function reads.
pub(super) struct Streamed<'a, F> {
    states: &'a [StateSpec],
    parts: Vec<UnitPart>,
    /// The first byte of each part in the state bytes of the file.
    starts: Vec<u64>,
    len: u64,
    /// The function, until it fails, and its error.
    fill: Mutex<(F, Option<String>)>,
}

impl<'a, F: FnMut(StagingSlice<'_>) -> Result<(), String> + Send> Streamed<'a, F> {
    /// `states` are in the order of the file.
    pub(super) fn new(layout: &Layout, rank: u64, states: &'a [StateSpec], fill: F) -> Self {
        let parts = unit_parts(layout, rank, states);
        let mut len = 0;
        let mut start_of = |part: &UnitPart| {
            len += part.bytes();
            len - part.bytes()
        };
        let starts = parts.iter().map(&mut start_of).collect();

        Self {
            states,
            parts,
            starts,
            len,
            fill: Mutex::new((fill, None)),
        }
    }

    /// The error of the function.
    pub(super) fn into_failure(self) -> Option<String> {
        self.fill
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .1
    }
}

impl<F: FnMut(StagingSlice<'_>) -> Result<(), String> + Send> ByteSource for Streamed<'_, F> {
    fn len(&self) -> u64 {
        self.len
    }

    fn fill(&self, start: u64, out: &mut [u8]) -> io::Result<()> {
        let mut fill = self.fill.lock().unwrap_or_else(PoisonError::into_inner);
        let (fill, failure) = &mut *fill;
        if failure.is_some() {
            return Err(io::ErrorKind::Other.into());
        }
        let mut at = start;
        let mut rest = out;
        let later = self.starts.partition_point(|first| *first <= start);
        let first = later.saturating_sub(1);

        for (part, part_start) in self.parts[first..].iter().zip(&self.starts[first..]) {
            if rest.is_empty() {
                break;
            }
            let skip = at - part_start;
            let n = (part.bytes() - skip).min(rest.len() as u64);
            let (now, later) = rest.split_at_mut(n as usize);
            let fill_blocks = |elems: Range<u64>, bytes: &mut [u8]| {
                let first = part.in_shard.start;
                fill(StagingSlice {
                    state: &self.states[part.state],
                    unit: part.unit,
                    in_shard: first + elems.start..first + elems.end,
                    bytes,
                    encoding: part.encoding,
                })
            };
            let filled = part
                .encoding
                .fill_range(part.elems(), skip, now, fill_blocks);
            if let Err(message) = filled {
                *failure = Some(message);
                return Err(io::ErrorKind::Other.into());
            }
            at += n;
            rest = later;
        }

        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use zero_shard::{BlockFormat, ParamSpec, UnitSpec};

    use super::*;
    use crate::{StateDtype, StateEncoding};

    /// Any range of the bytes is that of the whole.
    #[test]
    fn ranges_are_parts_of_the_whole() {
        let unit =
            |n: &str, elems: u64| UnitSpec::new(n, [ParamSpec::new(format!("{n}.p"), [elems])]);
        let units = [unit("a", 5), unit("b", 0), unit("c", 150)];
        let layout = Layout::new(&units, 2, 64).unwrap();
        let blocks = StateEncoding::Blocks {
            format: BlockFormat::Nf4,
            plain_below: 6,
            multiple_of: 1,
        };
        let states = [
            StateSpec::new("x", StateDtype::F32),
            StateSpec::new("y", blocks),
            StateSpec::new("z", StateDtype::BF16),
        ];
        let fill = |slice: StagingSlice<'_>| {
            let unit = slice.unit as f32;
            let of_state = f32::from(slice.state.name.as_bytes()[0]);
            slice.fill_f32(|in_shard, values| {
                for (elem, value) in in_shard.zip(values) {
                    *value = elem as f32 + 200.0 * unit + 1000.0 * of_state;
                }
                Ok(())
            })
        };

        for rank in 0..2 {
            let source = Streamed::new(&layout, rank, &states, fill);
            let mut whole = vec![0; source.len() as usize];
            source.fill(0, &mut whole).unwrap();
            // A range starts and ends between elements of every width.
            for start in (0..whole.len()).step_by(4) {
                for end in (start..whole.len()).step_by(4) {
                    let mut part = vec![0; end - start];
                    source.fill(start as u64, &mut part).unwrap();
                    assert_eq!(part, whole[start..end]);
                }
            }
        }

        let failing = Streamed::new(&layout, 0, &states, |_: StagingSlice<'_>| {
            Err("unplugged".to_owned())
        });
        assert!(failing.fill(0, &mut [0; 4]).is_err());
        assert_eq!(failing.into_failure().as_deref(), Some("unplugged"));
    }
}

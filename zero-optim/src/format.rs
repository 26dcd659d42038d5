//! Where optimizer state is, and in which format.
//!
//! A **piece** is at most
//! [`OptimizerConfig::sub_group_elems`](crate::OptimizerConfig::sub_group_elems) elements of one
//! unit: its masters (or remainders), first and second moments, one after another.

use std::ops::Range;
#[cfg(target_os = "linux")]
use std::path::PathBuf;

use half::bf16;
use zero_alloc::device::DType;
#[cfg(target_os = "linux")]
use zero_alloc::swap::SwapOptions;

use crate::OptimError;
use crate::groups::Resolved;

/// Elements of a piece if the settings have no sub-groups: 12 MB of masters and moments, which the
/// caches of a CPU hold from the read to the write. Four times as many are updated 1.15 times
/// slower.
const PIECE_ELEMS: usize = 1 << 20;
/// Lengths and offsets of pieces in bytes are multiples of this one.
const PIECE_ALIGN_BYTES: usize = 4096;
/// The parts of a piece start at multiples of this one.
const PART_ALIGN_BYTES: usize = 64;

/// The place of the state of an optimizer of the host.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum StateHome {
    /// Host memory.
    #[default]
    Memory,
    /// A scratch file without a name, of the length of the state, which disappears with the
    /// optimizer.
    #[cfg(target_os = "linux")]
    Nvme {
        /// The folder of the file.
        dir: PathBuf,
        /// How the file is read and written.
        options: SwapOptions,
        /// Pieces in memory at once; at least 1. With 4, one is read, one is updated and one is
        /// written at the same time, and one is ready.
        buffers: usize,
    },
}

/// Home and format of the state of an optimizer of the host; see
/// [`AdamWBuilder::offload`](crate::AdamWBuilder::offload).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OffloadOptions {
    /// The place of the state.
    pub home: StateHome,
    /// Keeps the masters of bf16 parameters as 16-bit remainders: parameter and remainder together
    /// have the bits of an fp32 master. The parameter is the master rounded to nearest, ties away
    /// from zero; without remainders ties go to even.
    pub remainder: bool,
    /// Keeps the moments in bf16, rounded stochastically: to nearest, a second moment would not
    /// fall, since a step changes it by less than half a unit in the last place. The random bits
    /// follow from the step and the place in this rank's state, so a run has the same bits again,
    /// but other bits at another stage, with other ranks or other frozen elements.
    pub bf16_moments: bool,
}
zero_alloc::setters!(OffloadOptions {
    home: StateHome,
    remainder: bool,
    bf16_moments: bool
});

/// The masters of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MasterFormat {
    /// The parameters are the masters.
    Params,
    Fp32,
    /// The low 16 bits of the masters, whose high bits are the bf16 parameters.
    Remainders,
}

/// The format of state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    pub(crate) masters: MasterFormat,
    /// Whether moments are kept in bf16, and not in fp32.
    pub(crate) bf16_moments: bool,
}

/// The parts of a piece, in bytes from its start.
pub(crate) struct Parts {
    pub(crate) masters: Range<usize>,
    pub(crate) first_moment: Range<usize>,
    pub(crate) second_moment: Range<usize>,
}

impl Format {
    pub(crate) fn new(
        param_dtype: DType,
        remainder: bool,
        bf16_moments: bool,
    ) -> Result<Self, OptimError> {
        let masters = match param_dtype {
            DType::Bf16 if remainder => MasterFormat::Remainders,
            _ if remainder => return Err(OptimError::Remainders { dtype: param_dtype }),
            DType::F32 => MasterFormat::Params,
            _ => MasterFormat::Fp32,
        };
        Ok(Self {
            masters,
            bf16_moments,
        })
    }

    /// Bytes of an element's master.
    pub(crate) fn master_bytes(self) -> usize {
        match self.masters {
            MasterFormat::Params => 0,
            MasterFormat::Fp32 => size_of::<f32>(),
            MasterFormat::Remainders => size_of::<i16>(),
        }
    }

    /// Bytes of an element's moment.
    pub(crate) fn moment_bytes(self) -> usize {
        if self.bf16_moments {
            size_of::<bf16>()
        } else {
            size_of::<f32>()
        }
    }

    pub(crate) fn parts(self, elems: usize) -> Parts {
        let mut end = 0_usize;
        let mut part = |elem_bytes: usize| {
            let start = end.next_multiple_of(PART_ALIGN_BYTES);
            end = start + elems * elem_bytes;
            start..end
        };
        Parts {
            masters: part(self.master_bytes()),
            first_moment: part(self.moment_bytes()),
            second_moment: part(self.moment_bytes()),
        }
    }

    /// Bytes of a piece.
    pub(crate) fn piece_bytes(self, elems: usize) -> usize {
        let end = self.parts(elems).second_moment.end;
        end.next_multiple_of(PIECE_ALIGN_BYTES)
    }
}

/// The ranges of the state storage that are pieces, in order.
pub(crate) fn cut(groups: &Resolved, sub_group_elems: usize) -> Vec<Range<usize>> {
    let most = if sub_group_elems == usize::MAX {
        PIECE_ELEMS
    } else {
        sub_group_elems.clamp(1, usize::MAX / 2)
    };
    // A multiple of 2048 elements, so that full pieces have no padding.
    let most = most.next_multiple_of(PIECE_ALIGN_BYTES / size_of::<bf16>());

    let mut pieces = Vec::new();
    for unit in &groups.pieces {
        let mut states = unit.iter().filter_map(|piece| piece.state.as_ref());
        let Some(first) = states.next() else { continue };
        let start = first.start;
        let end = states.next_back().unwrap_or(first).end;
        for start in (start..end).step_by(most) {
            pieces.push(start..end.min(start.saturating_add(most)));
        }
    }
    pieces
}

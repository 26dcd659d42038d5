//! The two exchanges between the ranks, through which a save has the same result on every rank.

use std::fmt::Display;

use zero_shard::Layout;

use super::frames::{PublishedCheckpoint, StagedFile, frame_bytes, from_frame, to_frame};
use crate::{CkptError, SaveMeta, Store};

impl Store {
    /// The second half of [`Store::save`]: exchanges the records of the staged files, publishes, and distributes the
    /// outcome. A rank that could not stage its file passes its error as `staged`, so that all ranks receive it and
    /// no rank waits.
    ///
    /// # Errors
    /// As [`Store::save`].
    pub fn finish<E: Display>(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Result<StagedFile, CkptError>,
        mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let staged = self.share_staged(layout, staged, &mut exchange)?;
        let outcome = (self.rank() == 0).then(|| self.publish(meta, layout, staged));
        self.share_outcome(layout, outcome, &mut exchange)
    }

    /// The first exchange: returns the staged files of all ranks, in rank order.
    pub(crate) fn share_staged<E: Display>(
        &self,
        layout: &Layout,
        staged: Result<StagedFile, CkptError>,
        exchange: &mut impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Vec<Result<StagedFile, CkptError>>, CkptError> {
        let mine = to_frame(self.rank(), staged.as_ref(), frame_bytes(layout));
        let frames = all_gather(layout, mine, exchange).inspect_err(|_| {
            staged.iter().for_each(|file| self.discard(file));
        })?;
        Ok(frames.iter().enumerate().map(|(r, f)| from_frame(f, r as u64)).collect())
    }

    /// The second exchange: returns rank 0's outcome on every rank. The other ranks pass `None`.
    pub(crate) fn share_outcome<E: Display>(
        &self,
        layout: &Layout,
        outcome: Option<Result<PublishedCheckpoint, CkptError>>,
        exchange: &mut impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<PublishedCheckpoint, CkptError> {
        let len = frame_bytes(layout);
        let Some(outcome) = outcome else {
            let frames = all_gather(layout, vec![b' '; len], exchange)?;
            return match from_frame(&frames[0], 0) {
                // The message names the failed rank already.
                Err(CkptError::Rank { message, .. }) => Err(rank_error(message)),
                other => other,
            };
        };
        let frames = all_gather(layout, to_frame(0, outcome.as_ref(), len), exchange);
        outcome.and_then(|published| frames.map(|_| published))
    }
}

/// Gathers the frames of all ranks and checks their number.
fn all_gather<E: Display>(
    layout: &Layout,
    frame: Vec<u8>,
    exchange: &mut impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
) -> Result<Vec<Vec<u8>>, CkptError> {
    let frames = exchange(&frame).map_err(|e| CkptError::Exchange { message: e.to_string() })?;
    match frames.len() as u64 == layout.world_size() {
        true => Ok(frames),
        false => Err(CkptError::argument("frames exchanged", layout.world_size(), frames.len())),
    }
}

/// Parses an error that rank 0 forwarded: "rank 2: no space" becomes an error of rank 2.
fn rank_error(message: String) -> CkptError {
    let rank = message.strip_prefix("rank ").and_then(|m| m.split_once(": "));
    match rank.and_then(|(r, rest)| Some((r.parse().ok()?, rest))) {
        Some((rank, rest)) => CkptError::Rank { rank, message: rest.into() },
        None => CkptError::Rank { rank: 0, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_error_keeps_its_rank() {
        assert_eq!(rank_error("rank 2: no space: a: b".into()).to_string(), "rank 2: no space: a: b");
        assert_eq!(rank_error("cannot sync /x".into()).to_string(), "rank 0: cannot sync /x");
        assert_eq!(rank_error("rank two: odd".into()).to_string(), "rank 0: rank two: odd");
    }
}

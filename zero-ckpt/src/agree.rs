//! What the ranks tell each other in a save, so that all of them end it the same way.

use zero_shard::Layout;

use crate::report::{Published, Receipt, frame_bytes, from_frame, to_frame};
use crate::{CkptError, SaveMeta, Store};

/// What each rank has staged, in rank order.
pub(crate) type Receipts = Vec<Result<Receipt, CkptError>>;

impl Store {
    /// The second half of a save: exchange, publication, verdict. A rank that cannot even stage (it could not
    /// copy its state, or any error of its own) gives that error as `staged`, and so all ranks learn of it
    /// and none waits for another. See [`Store::save`].
    ///
    /// # Errors
    /// As [`Store::save`].
    pub fn finish<E: std::fmt::Display>(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        staged: Result<Receipt, CkptError>,
        mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Published, CkptError> {
        let receipts = self.share_receipts(layout, staged, &mut exchange)?;
        let verdict = self.decide(meta, layout, receipts);
        self.share_verdict(layout, verdict, &mut exchange)
    }

    /// The first exchange: every rank gets the receipts of all.
    pub(crate) fn share_receipts<E: std::fmt::Display>(
        &self,
        layout: &Layout,
        staged: Result<Receipt, CkptError>,
        exchange: &mut impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Receipts, CkptError> {
        let mine = to_frame(self.rank(), staged.as_ref(), frame_bytes(layout));
        let frames = swap(layout, mine, exchange).inspect_err(|_| {
            staged.iter().for_each(|receipt| self.discard(receipt));
        })?;
        Ok(frames.iter().enumerate().map(|(r, f)| from_frame(f, r as u64)).collect())
    }

    /// Rank 0 publishes; what the others say here is not listened to.
    pub(crate) fn decide(
        &self,
        meta: &SaveMeta,
        layout: &Layout,
        receipts: Receipts,
    ) -> Result<Published, CkptError> {
        match self.rank() {
            0 => self.publish(meta, layout, receipts),
            _ => Err(CkptError::Receipts { why: "rank 0 decides".into() }),
        }
    }

    /// The second exchange: every rank gets the verdict of rank 0.
    pub(crate) fn share_verdict<E: std::fmt::Display>(
        &self,
        layout: &Layout,
        verdict: Result<Published, CkptError>,
        exchange: &mut impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Published, CkptError> {
        let mine = to_frame(self.rank(), verdict.as_ref(), frame_bytes(layout));
        let frames = swap(layout, mine, exchange);
        if self.rank() == 0 {
            return verdict.and_then(|published| frames.map(|_| published));
        }
        match from_frame::<Published>(&frames?[0], 0) {
            // The message names the rank at fault already.
            Err(CkptError::Rank { message, .. }) => Err(signed(message)),
            other => other,
        }
    }
}

/// Frames of all ranks, as many as there are ranks (at least one).
fn swap<E: std::fmt::Display>(
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

/// An error that rank 0 passed on: "rank 2: no space" stays rank 2's.
fn signed(message: String) -> CkptError {
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
    fn an_error_that_was_passed_on_keeps_its_rank() {
        assert_eq!(signed("rank 2: no space: a: b".into()).to_string(), "rank 2: no space: a: b");
        assert_eq!(signed("cannot sync /x".into()).to_string(), "rank 0: cannot sync /x");
        assert_eq!(signed("rank two: odd".into()).to_string(), "rank 0: rank two: odd");
    }
}

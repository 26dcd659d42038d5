//! Small messages between ranks, through device memory.

use std::time::Duration;

use zero_alloc::device::{AnySlice, DType, Device};
use zero_alloc::{Pool, Purpose};

use crate::{Collective, CommError, Communicator};

/// Bytes that each rank sends first: the length of its message, and the message's start.
const FRAME_BYTES: usize = 128;
const INLINE_BYTES: usize = FRAME_BYTES - size_of::<u64>();
/// Maximum bytes of a message.
const MAX_BYTES: usize = 1 << 30;

/// See [`Communicator::exchange`].
pub(crate) fn exchange<D: Device>(
    comm: &(impl Communicator<D> + ?Sized),
    pool: &Pool<D>,
    stream: &D::Stream,
    message: &[u8],
    limit: Duration,
) -> Result<Vec<Vec<u8>>, CommError> {
    if message.len() > MAX_BYTES {
        return Err(CommError::Count {
            what: "exchange: message",
            expected: MAX_BYTES,
            got: message.len(),
        });
    }

    let rank = comm.rank();
    let ranks = comm.world_size();
    let (start, rest) = message.split_at(message.len().min(INLINE_BYTES));
    let mut frames = vec![0; ranks * FRAME_BYTES];
    let own = rank * FRAME_BYTES..(rank + 1) * FRAME_BYTES;
    let frame = &mut frames[own.clone()];
    frame[..8].copy_from_slice(&(message.len() as u64).to_le_bytes());
    frame[8..8 + start.len()].copy_from_slice(start);
    through_device(comm, pool, stream, &mut frames, limit, |all| {
        comm.control_all_gather(stream, all.slice(own), all)
    })?;
    let (mut messages, counts) = read_frames(&frames)?;
    if counts.iter().all(|count| *count == 0) {
        return Ok(messages);
    }
    let total = counts
        .iter()
        .try_fold(0usize, |sum, count| sum.checked_add(*count));
    let total = total.ok_or(CommError::CountsTooLarge {
        collective: Collective::AllGather,
    })?;
    let mut all = vec![0; total];
    let before: usize = counts[..rank].iter().sum();
    let own = before..before + rest.len();
    all[own.clone()].copy_from_slice(rest);

    through_device(comm, pool, stream, &mut all, limit, |all| {
        let gather = comm
            .group()
            .all_gather_uneven(all.slice(own), all, &counts)?;
        comm.enqueue(stream, gather.into_control())
    })?;

    let mut left = &all[..];
    for (message, count) in messages.iter_mut().zip(counts) {
        let (own, others) = left.split_at(count);
        message.extend_from_slice(own);
        left = others;
    }

    Ok(messages)
}

/// The start of each rank's message, and the number of bytes that follow it.
fn read_frames(frames: &[u8]) -> Result<(Vec<Vec<u8>>, Vec<usize>), CommError> {
    let mut messages = Vec::new();
    let mut counts = Vec::new();
    for (rank, frame) in frames.chunks_exact(FRAME_BYTES).enumerate() {
        let mut len = [0; 8];
        len.copy_from_slice(&frame[..8]);
        let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(usize::MAX);
        if len > MAX_BYTES {
            let message = format!(
                "exchange: received a message length of {len} bytes, the maximum is {MAX_BYTES}"
            );
            return Err(CommError::Peer { rank, message });
        }
        messages.push(frame[8..8 + len.min(INLINE_BYTES)].to_vec());
        counts.push(len.saturating_sub(INLINE_BYTES));
    }
    Ok((messages, counts))
}

/// Copies `bytes` to device memory, enqueues `collective` on it, and copies the result back.
fn through_device<D: Device>(
    comm: &(impl Communicator<D> + ?Sized),
    pool: &Pool<D>,
    stream: &D::Stream,
    bytes: &mut [u8],
    limit: Duration,
    collective: impl FnOnce(AnySlice) -> Result<(), CommError>,
) -> Result<(), CommError> {
    let mut block = pool.allocate(bytes.len(), DType::U8, Purpose::Workspace, stream)?;
    // SAFETY: only this stream uses the block, and it is recorded before the block is dropped.
    let slice = unsafe { block.slice() };
    let device = pool.device();
    let exchanged = device
        .upload(stream, bytes, slice, limit)
        .map_err(CommError::from)
        .and_then(|()| collective(slice))
        .and_then(|()| Ok(device.download(stream, slice, bytes, limit)?));
    let recorded = block.record_use(stream);
    // The group's failure is the cause of a poisoned stream.
    exchanged.map_err(|error| comm.failure().unwrap_or(error))?;
    Ok(recorded?)
}

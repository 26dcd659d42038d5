//! The comparison of replicas: at stages 0 to 2 all ranks hold the same parameters, at stage 3 the
//! ranks with the same shard.
//!
//! A faulty card, memory or link changes the parameters of one rank. Nothing fails then: its
//! gradients go into the sums of all ranks, and a checkpoint has shards of replicas that differ. A
//! check reads the parameters of each rank once and compares the checksums of their units, as
//! [`agree`] compares settings: it names the lowest rank that differs from most. Of two ranks it
//! cannot say which one is right.

use crc_fast::{CrcAlgorithm, Digest};
use zero_alloc::device::{AnySlice, Device};
use zero_optim::{AgreementError, RankSettings, agree};

use crate::error::TrainError;
use crate::exchange::RankExchange;
use crate::rank::Rank;
use crate::stages::stage::Stage;

/// Bytes that are copied to the host at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Returns an error if the parameters of two ranks that hold the same ones differ after `step`: on
/// all ranks at stages 0 to 2, on those that compared at stage 3. Collective.
pub(crate) fn check<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    step: u64,
) -> Result<(), TrainError> {
    if rank.mesh.data.world_size() == 1 {
        return Ok(());
    }
    let params = stage.replicated(rank)?;
    if params.is_empty() {
        return Ok(());
    }

    let mut checksums = RankSettings::new();
    for (unit, params) in rank.layout.units().iter().zip(params) {
        let checksum = checksum(rank, params)?;
        checksums.push(&unit.name, format_args!("{checksum:016x}"));
    }

    let of_shard = rank.settings.stage.shards_params();
    let replicas = rank.mesh.replicas.as_ref().filter(|_| of_shard);
    let exchange = match replicas {
        Some(replicas) => RankExchange::of_replicas(rank, replicas),
        None => RankExchange::of_data(rank),
    };
    let tensor_ranks = rank.comm.world_size() / rank.mesh.data.world_size();
    let world_rank = |data_rank| data_rank * tensor_ranks + rank.tensor_rank();
    // The ranks that compare, in the order of the exchange.
    let ranks: Vec<usize> = match replicas {
        Some(_) => {
            let peers = rank.layouts.grid().peer_ranks(rank.index());
            peers.map(|peer| world_rank(peer as usize)).collect()
        }
        None => (0..rank.mesh.data.world_size()).map(world_rank).collect(),
    };
    let place = replicas.map_or(rank.mesh.data.rank(), |replicas| replicas.comm.rank());

    agree(place, Ok(&checksums), |message: &[u8]| {
        exchange.exchange(message)
    })
    .map_err(|error| match error {
        AgreementError::Differs {
            rank: place,
            reference,
            setting: unit,
            ..
        } => TrainError::Replicas {
            step,
            rank: ranks[place],
            reference: ranks[reference],
            unit,
        },
        // The failure of the group is the cause.
        error => rank
            .mesh
            .failure()
            .map_or_else(|| TrainError::Agreement(error), TrainError::Comm),
    })
}

/// The checksum of a slice, in compute-stream order.
fn checksum<D: Device>(rank: &Rank<D>, slice: AnySlice) -> Result<u64, TrainError> {
    let width = slice.dtype().size_bytes();
    let mut chunk = vec![0; CHUNK_BYTES.min(slice.len() * width)];
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    for start in (0..slice.len()).step_by(CHUNK_BYTES / width) {
        let end = slice.len().min(start + CHUNK_BYTES / width);
        let bytes = &mut chunk[..(end - start) * width];
        let part = slice.slice(start..end);
        rank.pool
            .device()
            .download(&rank.compute, part, bytes, rank.settings.host_limit())?;
        digest.update(bytes);
    }
    Ok(digest.finalize())
}

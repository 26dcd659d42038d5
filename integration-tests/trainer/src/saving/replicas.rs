//! The comparison of replicas: at stages 0 to 2 all ranks hold the same parameters, at stage 3 the
//! ranks with the same shard. With tensor parallelism, of ranks with the same part of the parameters;
//! then its ranks compare what all of them hold.
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
use crate::rank::Rank;
use crate::rank_exchange::RankExchange;
use crate::stages::stage::Stage;

/// Bytes that are copied to the host at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Returns an error if the parameters of two ranks that hold the same ones differ after `step`: on
/// those that compared. Collective.
pub(crate) fn check<D: Device>(
    rank: &Rank<D>,
    stage: &mut dyn Stage<D>,
    step: u64,
) -> Result<(), TrainError> {
    if rank.comm.world_size() == 1 {
        return Ok(());
    }
    let params = stage.replicated(rank)?;
    if params.is_empty() {
        return Ok(());
    }

    let of_shard = rank.settings.stage.shards_params();
    let replicas = rank.mesh.replicas.as_ref().filter(|_| of_shard);
    let data_ranks = rank.mesh.data.world_size();
    let tensor_ranks = rank.tensor_ranks();
    let world_rank = |data_rank| data_rank * tensor_ranks + rank.tensor_rank();
    let peers = match replicas {
        Some(replicas) => Some(Peers {
            exchange: RankExchange::of_replicas(rank, replicas),
            place: replicas.comm().rank(),
            ranks: rank
                .layouts
                .grid()
                .peer_ranks(rank.index())
                .map(|peer| world_rank(peer as usize))
                .collect(),
        }),
        None if of_shard || data_ranks == 1 => None,
        None => Some(Peers {
            exchange: RankExchange::of_data(rank),
            place: rank.mesh.data.rank(),
            ranks: (0..data_ranks).map(world_rank).collect(),
        }),
    };
    if let Some(peers) = peers {
        compare(rank, &peers, step, &params)?;
    }

    // The parameters that all ranks of tensor parallelism have.
    let (Some(cut), Some(tensor)) = (&rank.tensor, &rank.mesh.model.tensor) else {
        return Ok(());
    };
    let first = rank.mesh.data.rank() * tensor_ranks;
    let peers = Peers {
        exchange: RankExchange::of_tensor(rank, &**tensor),
        place: tensor.rank(),
        ranks: (first..first + tensor_ranks).collect(),
    };
    let same = |(unit, params): (usize, &AnySlice)| {
        let start = if of_shard { rank.shard(unit).start } else { 0 };
        let range = start..start + params.len() as u64;
        let cut = cut.cut_in(unit, range);
        params.slice((cut.end - start) as usize..params.len())
    };
    let params: Vec<_> = params.iter().enumerate().map(same).collect();
    compare(rank, &peers, step, &params)
}

/// Ranks that hold the same parameters.
struct Peers<'a, D: Device> {
    exchange: RankExchange<'a, D>,
    /// This rank among them.
    place: usize,
    /// The rank of each.
    ranks: Vec<usize>,
}

/// Compares the parameters of each unit with those of `peers`.
fn compare<D: Device>(
    rank: &Rank<D>,
    peers: &Peers<'_, D>,
    step: u64,
    params: &[AnySlice],
) -> Result<(), TrainError> {
    let mut checksums = RankSettings::new();
    for (unit, params) in rank.layout.units().iter().zip(params) {
        let checksum = checksum(rank, *params)?;
        checksums.push(&unit.name, format_args!("{checksum:016x}"));
    }

    agree(peers.place, Ok(&checksums), |message: &[u8]| {
        peers.exchange.exchange(message)
    })
    .map_err(|error| match error {
        AgreementError::Differs {
            rank: place,
            reference,
            setting: unit,
            ..
        } => TrainError::Replicas {
            step,
            rank: peers.ranks[place],
            reference: peers.ranks[reference],
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

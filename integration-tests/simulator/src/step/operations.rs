//! The costs of recorded operations.

use zero_alloc::schedule::{Cost, Operation};
use zero_trainer::StepSchedule;

use super::StepSchedules;
use crate::workload::{PASS, PassKind, pass_class};
use crate::{Costs, PassSeconds, ring};

/// Resources that operations share which run at the same time: the network, the links within a node,
/// the cores of a rank on the host, and a rank's part of the disks.
const NETWORK: u8 = 0;
const LINKS: u8 = 1;
const CORES: u8 = 2;
const DISK: u8 = 3;

/// The costs of one recording's operations.
pub(super) struct OperationCosts<'a> {
    pub(super) of: &'a StepSchedules,
    pub(super) recorded: &'a StepSchedule,
    /// The nodes of each communicator.
    pub(super) nodes: Vec<u64>,
    pub(super) costs: &'a Costs<'a>,
    pub(super) passes: &'a PassSeconds,
}

/// A collective.
struct Collective {
    ranks: u64,
    nodes: u64,
    /// Bytes of the whole buffer.
    bytes: u64,
    /// Rings: two for a sum that every rank has.
    rings: f64,
}

impl OperationCosts<'_> {
    /// Of a rank on a GPU.
    pub(super) fn on_gpu(&self, operation: &Operation) -> Cost {
        let Self { of, costs, .. } = *self;
        let slowdown = costs.efficiencies.slowdown;
        let work = operation.work;
        let computes = |seconds: f64| Cost::ns(seconds * 1e9).slowdown(slowdown);
        let machine = costs.machine;
        let of_node = |bytes_per_s: f64| {
            let seconds = work.bytes as f64 / bytes_per_s * of.run.node_ranks() as f64;
            Cost::ns(seconds * 1e9)
        };
        // The ranks of a node share its memory and its disks.
        let on_host = self.recorded.schedule.streams[operation.stream].contains(" update");
        match operation.label {
            "swap read" | "swap write" => of_node(machine.disk_bytes_per_s).shares(DISK),
            _ if on_host => of_node(machine.host_memory_bytes_per_s),
            PASS => computes(self.pass_s(operation)),
            "all_gather" | "reduce_scatter" | "all_reduce" | "all_to_all" => {
                let collective = self.collective(operation);
                let wide = operation.label == "reduce_scatter" && costs.software.wide_reduce;
                let bytes = collective.bytes * if wide { 2 } else { 1 };
                let link = if collective.nodes > 1 { NETWORK } else { LINKS };
                Cost::ns(self.ring_s(&collective, bytes) * 1e9)
                    .slows(collective.ranks > 1)
                    .shares(link)
            }
            "orthogonalise" => computes(costs.orthogonalise(work.flops, work.bytes, work.class)),
            "flags" | "upload" | "download" | "rank_stats" | "advance_step" => Cost::default(),
            "copy to or from the host" => {
                Cost::ns(work.bytes as f64 / machine.host_link_bytes_per_s * 1e9)
            }
            _ => computes(work.bytes as f64 / costs.memory()),
        }
    }

    /// Of a rank with `threads` threads on a host with `cores` cores, which its ranks share.
    ///
    /// Passes, the optimizer and casts are divided among the threads of a rank; collectives and copies
    /// run on one. A rank has its part of the cores, and its streams share that part.
    pub(super) fn on_host(&self, operation: &Operation, threads: usize, cores: usize) -> Cost {
        let Self { of, costs, .. } = *self;
        let efficiencies = costs.efficiencies;
        let cores = cores as f64;
        let share = cores / of.run.node_ranks() as f64;
        let of_one = share.min(1.0);
        let of_all = match threads {
            1 => of_one,
            _ => share.min(threads as f64) * (1.0 - efficiencies.slowdown),
        };
        let launch_s = efficiencies.launch_us * 1e-6;
        let bytes = operation.work.bytes as f64;
        let on_cores = |core_s: f64, of_rank: f64| Cost::ns(core_s / of_rank * 1e9).shares(CORES);
        let memory_s = |bytes: f64| bytes / costs.memory() * cores + launch_s;

        match operation.label {
            PASS => {
                // A pass is one operation of its stream, and each of its operations one of the threads.
                let launches = match threads {
                    1 => 1.0,
                    _ => self.launches(operation),
                };
                let core_s = self.pass_s(operation) * cores;
                on_cores(core_s + launches * of_all * launch_s, of_all)
            }
            "orthogonalise" => {
                let work = operation.work;
                let core_s = costs.orthogonalise(work.flops, work.bytes, work.class) * cores;
                on_cores(core_s + launch_s, of_all)
            }
            "adam" | "adam_remainder" | "muon_direction" | "muon_apply" | "cast" | "cast_rows"
            | "pack" | "accumulate" | "grad_stats" => on_cores(memory_s(bytes), of_all),
            "all_gather" | "reduce_scatter" | "all_reduce" | "all_to_all" => {
                let collective = self.collective(operation);
                match collective {
                    Collective { ranks: 1, .. } => on_cores(launch_s, of_one),
                    Collective { nodes: 1, .. } => {
                        let link = costs.machine.link_bytes_per_s * efficiencies.network;
                        on_cores(collective.sent() / link + launch_s, of_one)
                    }
                    _ => {
                        let seconds = self.ring_s(&collective, collective.bytes);
                        Cost::ns(seconds * 1e9).shares(NETWORK)
                    }
                }
            }
            "swap read" | "swap write" => {
                let of_rank = costs.machine.disk_bytes_per_s / of.run.node_ranks() as f64;
                Cost::ns(bytes / of_rank * 1e9).shares(DISK)
            }
            _ => on_cores(memory_s(bytes), of_one),
        }
    }

    /// Seconds of an operation of a pass.
    fn pass_s(&self, operation: &Operation) -> f64 {
        let work = operation.work;
        let parts = work.bytes as f64 * self.of.run.tensor_ranks() as f64;
        self.passes.of_class(work.class) / parts
    }

    /// Operations of a block's pass; of the others few.
    fn launches(&self, operation: &Operation) -> f64 {
        let class = operation.work.class;
        let [forward, backward] = self.costs.software.attention.kernels().launches;
        match class {
            _ if class == pass_class(PassKind::Block, false) => forward,
            _ if class == pass_class(PassKind::Block, true) => backward,
            _ => 4.0,
        }
    }

    fn collective(&self, operation: &Operation) -> Collective {
        let class = operation.work.class as usize;
        let ranks = self.recorded.communicators.get(class);
        Collective {
            ranks: ranks.map_or(1, |ranks| ranks.len()) as u64,
            nodes: self.nodes.get(class).copied().unwrap_or(1),
            bytes: operation.work.bytes,
            rings: match operation.label {
                "all_reduce" => 2.0,
                _ => 1.0,
            },
        }
    }

    fn ring_s(&self, collective: &Collective, bytes: u64) -> f64 {
        let Costs {
            machine,
            efficiencies,
            ..
        } = self.costs;
        let Collective { ranks, nodes, .. } = *collective;
        collective.rings * ring(bytes as f64, ranks, nodes, machine, efficiencies)
    }
}

impl Collective {
    /// Bytes that a rank sends.
    fn sent(&self) -> f64 {
        self.rings * self.bytes as f64 * (self.ranks - 1) as f64 / self.ranks as f64
    }
}

impl PassSeconds {
    /// Seconds of the pass with this [`pass_class`].
    fn of_class(&self, class: u32) -> f64 {
        let kinds = [
            (PassKind::Embedding, self.embedding),
            (PassKind::Block, self.block),
            (PassKind::Head, self.head),
        ];
        let of_kind = |(kind, [forward, backward]): (PassKind, [f64; 2])| {
            [
                (pass_class(kind, false), forward),
                (pass_class(kind, true), backward),
            ]
        };
        let mut all = kinds.into_iter().flat_map(of_kind);
        all.find(|(of, _)| *of == class)
            .map_or(0.0, |(_, seconds)| seconds)
    }
}

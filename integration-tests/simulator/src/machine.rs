//! Machines: the peak figures of a GPU and of the node that it is in.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::text::{from_text, to_text};

/// Peak figures of a GPU and of its node, as data sheets print them.
///
/// A program reaches a part of them, which [`Efficiencies`](crate::Efficiencies) describes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The name in `--hardware` and in errors.
    pub name: String,
    /// Floating-point operations per second of dense 16-bit matrix products with 32-bit sums.
    pub peak_flops: f64,
    /// Bytes per second of the GPU's memory.
    pub memory_bytes_per_s: f64,
    /// Bytes of the GPU's memory.
    pub memory_bytes: f64,
    /// Streaming multiprocessors of the GPU.
    pub sms: f64,
    /// GPUs of a full node.
    pub node_gpus: usize,
    /// Bytes per second between GPUs of a node, per GPU and direction.
    pub link_bytes_per_s: f64,
    /// Bytes per second between nodes, per GPU and direction.
    pub network_bytes_per_s: f64,
    /// Bytes per second between a GPU and the host's memory, per GPU and direction.
    pub host_link_bytes_per_s: f64,
    /// Bytes per second of the host's memory, per node.
    pub host_memory_bytes_per_s: f64,
    /// Bytes per second that the local disks read, per node.
    pub disk_bytes_per_s: f64,
    /// Cores of a host without GPUs, which computes in 32 bits; its ranks share its cores, its memory
    /// and the peaks above. `None`: GPUs compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
    /// Bytes per second that a host's elementwise operations, such as GELU, read and write where their
    /// operands are in caches. `None`: as the memory's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elementwise_bytes_per_s: Option<f64>,
    /// Whether the figures are measured rates and not those of data sheets; programs reach more of
    /// the former.
    #[serde(default)]
    pub measured: bool,
}

/// Machines of a kind, as `--hardware` names them.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// The GPU and its node.
    pub machine: Machine,
    /// GPUs of each node that the run uses.
    pub gpus_per_node: usize,
    /// Nodes of the run.
    pub nodes: usize,
}

/// Why a machine or a cluster was refused.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum MachineError {
    /// A `--hardware` value of another form.
    #[error(
        "--hardware {value}: expected NAME:GPUSxNODES with at least one GPU and one node, such as \
         h100-80g:8x64 for 64 nodes of 8 GPUs; names are {}",
        Machine::NAMES.join(", ")
    )]
    Form { value: String },
    /// A name that no preset has.
    #[error(
        "unknown machine {name}: use one of {}, or describe the machine in a TOML file",
        Machine::NAMES.join(", ")
    )]
    UnknownName { name: String },
    /// More GPUs a node than the machine has.
    #[error(
        "--hardware {value}: a node of {name} has {node_gpus} GPUs, not {gpus}; use more nodes \
         instead, such as {name}:{node_gpus}x{nodes}"
    )]
    TooManyGpus {
        value: String,
        name: String,
        node_gpus: usize,
        gpus: usize,
        nodes: usize,
    },
    /// A file that cannot be read.
    #[error("failed to read {file}: {source}")]
    Read {
        file: String,
        source: std::io::Error,
    },
    /// A description that is not TOML or JSON, or has missing or unknown keys.
    #[error(
        "{file}: {message}; a machine has the keys name, peak_flops, memory_bytes_per_s, \
         memory_bytes, sms, node_gpus, link_bytes_per_s, network_bytes_per_s, \
         host_link_bytes_per_s, host_memory_bytes_per_s and disk_bytes_per_s; zero measure writes \
         such a file"
    )]
    Text { file: String, message: String },
    /// A figure that is no positive number.
    #[error("machine {name}: {field} is {value}; it must be a finite number above 0")]
    Figure {
        name: String,
        field: &'static str,
        value: f64,
    },
}

impl Machine {
    /// Reads a machine from the text of `file`, which is JSON if its name ends in `.json` and TOML
    /// otherwise.
    ///
    /// # Errors
    /// Another form, a missing or unknown key, a figure that is not positive.
    pub fn parse(text: &str, file: &str) -> Result<Self, MachineError> {
        let machine: Self = from_text(text, file).map_err(|message| MachineError::Text {
            file: file.into(),
            message,
        })?;
        machine.check()?;
        Ok(machine)
    }

    /// Returns the machine as text for `file`, which [`Machine::parse`] reads.
    ///
    /// # Errors
    /// A figure that is not positive.
    pub fn to_text(&self, file: &str) -> Result<String, MachineError> {
        self.check()?;
        to_text(self, file).map_err(|message| MachineError::Text {
            file: file.into(),
            message,
        })
    }

    /// Checks that every figure is a finite number above 0.
    ///
    /// # Errors
    /// [`MachineError::Figure`].
    pub fn check(&self) -> Result<(), MachineError> {
        let figures = [
            ("peak_flops", self.peak_flops),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
            ("memory_bytes", self.memory_bytes),
            ("sms", self.sms),
            ("node_gpus", self.node_gpus as f64),
            ("link_bytes_per_s", self.link_bytes_per_s),
            ("network_bytes_per_s", self.network_bytes_per_s),
            ("host_link_bytes_per_s", self.host_link_bytes_per_s),
            ("host_memory_bytes_per_s", self.host_memory_bytes_per_s),
            ("disk_bytes_per_s", self.disk_bytes_per_s),
            (
                "elementwise_bytes_per_s",
                self.elementwise_bytes_per_s.unwrap_or(1.0),
            ),
            ("cores", self.cores.unwrap_or(1) as f64),
        ];
        let wrong = figures
            .into_iter()
            .find(|(_, value)| !(value.is_finite() && *value > 0.0));
        match wrong {
            None => Ok(()),
            Some((field, value)) => Err(MachineError::Figure {
                name: self.name.clone(),
                field,
                value,
            }),
        }
    }
}

impl Cluster {
    /// Parses `NAME:GPUSxNODES`, GPUs (on a host, ranks) of a node times nodes. `find` returns the machine of a name,
    /// such as [`Machine::preset`].
    ///
    /// # Errors
    /// Another form, more GPUs than a node has, an error of `find`.
    pub fn parse(
        value: &str,
        find: impl FnOnce(&str) -> Result<Machine, MachineError>,
    ) -> Result<Self, MachineError> {
        let form = || MachineError::Form {
            value: value.into(),
        };
        let (name, counts) = value.rsplit_once(':').ok_or_else(form)?;
        let (gpus, nodes) = counts.split_once('x').ok_or_else(form)?;
        let count = |text: &str| text.parse().ok().filter(|&count: &usize| count > 0);
        let gpus = count(gpus).ok_or_else(form)?;
        let nodes = count(nodes).ok_or_else(form)?;

        let machine = find(name)?;
        // The ranks of a host share its cores, as many as they are.
        if gpus > machine.node_gpus && machine.cores.is_none() {
            return Err(MachineError::TooManyGpus {
                value: value.into(),
                name: name.into(),
                node_gpus: machine.node_gpus,
                gpus,
                nodes: gpus
                    .saturating_mul(nodes)
                    .div_ceil(machine.node_gpus.max(1)),
            });
        }
        Ok(Self {
            machine,
            gpus_per_node: gpus,
            nodes,
        })
    }

    /// GPUs of all nodes.
    pub fn gpus(&self) -> usize {
        self.gpus_per_node.saturating_mul(self.nodes)
    }
}

impl FromStr for Cluster {
    type Err = MachineError;

    /// Parses `NAME:GPUSxNODES` with the name of a preset, such as `h100-80g:8x64`.
    fn from_str(value: &str) -> Result<Self, MachineError> {
        Self::parse(value, Machine::preset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_names_and_figures() {
        for name in Machine::NAMES {
            let machine = Machine::preset(name).unwrap();
            assert_eq!(machine.name, name);
            machine.check().unwrap();
            let json = machine.to_text("machine.json").unwrap();
            assert_eq!(Machine::parse(&json, "machine.json").unwrap(), machine);
            let toml = machine.to_text("machine.toml").unwrap();
            assert_eq!(Machine::parse(&toml, "machine.toml").unwrap(), machine);
        }
        assert_eq!(Machine::preset("a100_40gb").unwrap().name, "a100-40g");
    }

    #[test]
    fn hardware_is_parsed() {
        let cluster: Cluster = "h100-80g:8x64".parse().unwrap();
        assert_eq!(cluster.machine, Machine::h100_80g());
        assert_eq!((cluster.gpus_per_node, cluster.nodes), (8, 64));
        assert_eq!(cluster.gpus(), 512);
    }

    #[test]
    fn machines_may_be_found_elsewhere() {
        let find = |name: &str| {
            Ok(Machine {
                name: name.into(),
                ..Machine::v100_32g()
            })
        };
        let cluster = Cluster::parse("my:own.json:16x2", find).unwrap();
        assert_eq!(
            (cluster.machine.name.as_str(), cluster.gpus()),
            ("my:own.json", 32)
        );
    }

    #[test]
    fn hardware_errors_say_what_to_do() {
        let message = |text: &str| text.parse::<Cluster>().unwrap_err().to_string();
        for text in [
            "h100-80g",
            "h100-80g:8",
            "h100-80g:0x1",
            "h100-80g:8x-1",
            "",
        ] {
            let message = message(text);
            assert!(message.contains("NAME:GPUSxNODES"), "{message}");
            assert!(message.contains("rtx4090-24g"), "{message}");
        }
        assert!(message("h1000:8x1").contains("unknown machine h1000: use one of v100-32g, "));
        assert!(message("a100-40g:16x2").contains("a100-40g:8x4"));
    }

    #[test]
    fn descriptions_are_checked() {
        let json = Machine::h100_80g().to_text("machine.json").unwrap();
        let message = |json: &str| {
            let error = Machine::parse(json, "my.json").unwrap_err();
            error.to_string()
        };
        assert!(message(&json.replace("\"sms\"", "\"units\"")).contains("unknown field `units`"));
        assert!(message("{}").starts_with("my.json: missing field"));
        assert!(message(&json.replace("132.0", "-1")).contains("sms is -1"));
    }
}

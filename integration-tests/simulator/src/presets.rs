//! Machines of known figures.

use crate::{Machine, MachineError};

/// Data sheets print memory in GB, which are 2^30 bytes.
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

impl Machine {
    /// The names of the presets.
    pub const NAMES: [&str; 7] = [
        "v100-32g",
        "a100-40g",
        "a100-80g",
        "h100-80g",
        "h200-141g",
        "b200-180g",
        "rtx4090-24g",
    ];

    /// Returns the preset of a name; `a100_40gb` and `A100-40G` also name `a100-40g`.
    ///
    /// # Errors
    /// [`MachineError::UnknownName`].
    pub fn preset(name: &str) -> Result<Self, MachineError> {
        let lower = name.to_ascii_lowercase().replace('_', "-");
        let short = lower.strip_suffix('b').unwrap_or(&lower);
        match short {
            "v100-32g" => Ok(Self::v100_32g()),
            "a100-40g" => Ok(Self::a100_40g()),
            "a100-80g" => Ok(Self::a100_80g()),
            "h100-80g" => Ok(Self::h100_80g()),
            "h200-141g" => Ok(Self::h200_141g()),
            "b200-180g" => Ok(Self::b200_180g()),
            "rtx4090-24g" => Ok(Self::rtx4090_24g()),
            _ => Err(MachineError::UnknownName { name: name.into() }),
        }
    }

    /// A V100 SXM3 32 GB in a DGX-2.
    ///
    /// Source: NVIDIA's data sheets of V100 and DGX-2: 125 TFLOP/s fp16, NVLink 300 GB/s in both
    /// directions, 8 adapters of 100 Gbit/s for 16 GPUs, PCIe 3 x16. Host memory: 12 channels of
    /// DDR4-2666. Disks: 25 GB/s (ZeRO-Infinity, arXiv 2104.07857, for this node).
    pub fn v100_32g() -> Self {
        Self {
            name: "v100-32g".into(),
            peak_flops: 125e12,
            memory_bytes_per_s: 900e9,
            memory_bytes: 32.0 * GIB,
            sms: 80.0,
            node_gpus: 16,
            link_bytes_per_s: 150e9,
            network_bytes_per_s: 6.25e9,
            host_link_bytes_per_s: 15.75e9,
            host_memory_bytes_per_s: 256e9,
            disk_bytes_per_s: 25e9,
            cores: None,
            elementwise_bytes_per_s: None,
            measured: false,
        }
    }

    /// An A100 SXM 40 GB in a DGX A100.
    ///
    /// Source: NVIDIA's data sheets of A100 and DGX A100: 312 TFLOP/s bf16, NVLink 600 GB/s in both
    /// directions, 8 adapters of 200 Gbit/s, PCIe 4 x16. Host memory: 16 channels of DDR4-3200.
    /// Disks: 4 PCIe 4 NVMe drives, 6.25 GB/s assumed of each.
    pub fn a100_40g() -> Self {
        Self {
            name: "a100-40g".into(),
            peak_flops: 312e12,
            memory_bytes_per_s: 1555e9,
            memory_bytes: 40.0 * GIB,
            sms: 108.0,
            node_gpus: 8,
            link_bytes_per_s: 300e9,
            network_bytes_per_s: 25e9,
            host_link_bytes_per_s: 31.5e9,
            host_memory_bytes_per_s: 409.6e9,
            disk_bytes_per_s: 25e9,
            cores: None,
            elementwise_bytes_per_s: None,
            measured: false,
        }
    }

    /// An A100 SXM 80 GB in a DGX A100 640 GB.
    ///
    /// Source: as [`Machine::a100_40g`], with memory of 2039 GB/s and 8 drives.
    pub fn a100_80g() -> Self {
        Self {
            name: "a100-80g".into(),
            memory_bytes_per_s: 2039e9,
            memory_bytes: 80.0 * GIB,
            disk_bytes_per_s: 50e9,
            cores: None,
            elementwise_bytes_per_s: None,
            measured: false,
            ..Self::a100_40g()
        }
    }

    /// An H100 SXM 80 GB in a DGX H100.
    ///
    /// Source: NVIDIA's data sheets of H100 and DGX H100: 989 TFLOP/s bf16, NVLink 900 GB/s in both
    /// directions, 8 adapters of 400 Gbit/s, PCIe 5 x16. Host memory: 16 channels of DDR5-4800.
    /// Disks: 8 PCIe 4 NVMe drives, 6.25 GB/s assumed of each.
    pub fn h100_80g() -> Self {
        Self {
            name: "h100-80g".into(),
            peak_flops: 989e12,
            memory_bytes_per_s: 3350e9,
            memory_bytes: 80.0 * GIB,
            sms: 132.0,
            node_gpus: 8,
            link_bytes_per_s: 450e9,
            network_bytes_per_s: 50e9,
            host_link_bytes_per_s: 63e9,
            host_memory_bytes_per_s: 614.4e9,
            disk_bytes_per_s: 50e9,
            cores: None,
            elementwise_bytes_per_s: None,
            measured: false,
        }
    }

    /// An H200 SXM 141 GB in a DGX H200.
    ///
    /// Source: NVIDIA's data sheet of H200: an H100 with 141 GB at 4.8 TB/s.
    pub fn h200_141g() -> Self {
        Self {
            name: "h200-141g".into(),
            memory_bytes_per_s: 4800e9,
            memory_bytes: 141.0 * GIB,
            ..Self::h100_80g()
        }
    }

    /// A B200 SXM 180 GB in a DGX B200.
    ///
    /// Source: NVIDIA's data sheet of DGX B200: 2250 TFLOP/s bf16 (half of the printed figure, which
    /// counts zeros that are skipped), 1440 GB at 64 TB/s and NVLink of 14.4 TB/s in both directions
    /// for 8 GPUs, 8 adapters of 400 Gbit/s, PCIe 5 x16. 148 SMs. Host memory: 16 channels of
    /// DDR5-5600. Disks as in [`Machine::h100_80g`].
    pub fn b200_180g() -> Self {
        Self {
            name: "b200-180g".into(),
            peak_flops: 2250e12,
            memory_bytes_per_s: 8000e9,
            memory_bytes: 180.0 * GIB,
            sms: 148.0,
            link_bytes_per_s: 900e9,
            host_memory_bytes_per_s: 716.8e9,
            ..Self::h100_80g()
        }
    }

    /// An RTX 4090 in a server of 8 without NVLink: the GPUs reach each other over PCIe 4 x16.
    ///
    /// Source: NVIDIA's Ada white paper: 165.2 TFLOP/s bf16 with 32-bit sums, 1008 GB/s, 128 SMs.
    /// Assumed, because the card prescribes no server: one adapter of 100 Gbit/s for 8 GPUs, 8
    /// channels of DDR4-3200, one PCIe 4 NVMe drive of 7 GB/s.
    pub fn rtx4090_24g() -> Self {
        Self {
            name: "rtx4090-24g".into(),
            peak_flops: 165.2e12,
            memory_bytes_per_s: 1008e9,
            memory_bytes: 24.0 * GIB,
            sms: 128.0,
            node_gpus: 8,
            link_bytes_per_s: 31.5e9,
            network_bytes_per_s: 1.5625e9,
            host_link_bytes_per_s: 31.5e9,
            host_memory_bytes_per_s: 204.8e9,
            disk_bytes_per_s: 7e9,
            cores: None,
            elementwise_bytes_per_s: None,
            measured: false,
        }
    }
}

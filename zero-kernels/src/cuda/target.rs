//! The architectures that kernels are compiled for.

use std::fmt;

use super::CudaError;

/// A GPU architecture: `Arch(90)` is sm_90.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch(pub u32);

impl Arch {
    /// The architecture of a device with this compute capability.
    pub fn of_capability((major, minor): (u32, u32)) -> Self {
        Self(major * 10 + minor)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.0)
    }
}

/// The form of a compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// Machine code (an ELF file) for devices of this architecture alone.
    Cubin(Arch),
    /// PTX for this virtual architecture, as zero-terminated text. The driver of any newer device
    /// compiles it.
    Ptx(Arch),
}

impl Target {
    /// The target for devices of `arch` with a compiler that supports `supported`: machine code, or
    /// PTX for the nearest older architecture if the device's own is not supported.
    ///
    /// # Errors
    /// The device is older than all of `supported`. `version` appears in the message.
    pub(super) fn choose(arch: Arch, supported: &[u32], version: &str) -> Result<Self, CudaError> {
        if supported.contains(&arch.0) {
            return Ok(Self::Cubin(arch));
        }
        let older = supported
            .iter()
            .copied()
            .filter(|&older| older < arch.0)
            .max();
        older
            .map(|older| Self::Ptx(Arch(older)))
            .ok_or_else(|| CudaError::UnsupportedArch {
                version: version.to_owned(),
                arch,
                supported: supported.to_vec(),
            })
    }

    /// The extension of the cache file's name.
    pub(super) fn extension(self) -> &'static str {
        match self {
            Self::Cubin(_) => "cubin",
            Self::Ptx(_) => "ptx",
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cubin(arch) => arch.fmt(f),
            Self::Ptx(arch) => write!(f, "compute_{}", arch.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_devices_get_the_newest_ptx() {
        let choose = |arch| Target::choose(Arch(arch), &[75, 80, 90, 121, 100], "13.2");
        assert_eq!(choose(90), Ok(Target::Cubin(Arch(90))));
        assert_eq!(choose(121), Ok(Target::Cubin(Arch(121))));
        assert_eq!(choose(990), Ok(Target::Ptx(Arch(121))));
        assert_eq!(
            choose(86),
            Ok(Target::Ptx(Arch(80))),
            "between two supported ones"
        );
        let error = choose(70).unwrap_err();
        assert!(
            matches!(error, CudaError::UnsupportedArch { arch: Arch(70), .. }),
            "{error}"
        );
        assert_eq!(Arch::of_capability((12, 1)), Arch(121));
        let names = [Target::Cubin(Arch(90)), Target::Ptx(Arch(121))].map(|t| t.to_string());
        assert_eq!(names, ["sm_90", "compute_121"]);
    }
}

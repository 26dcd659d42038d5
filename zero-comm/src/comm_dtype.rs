//! The dtypes that collectives transmit. A back end matches on [`CommDType`], so that it does not
//! compile until it supports each of them.

use serde::{Deserialize, Deserializer, Serialize, Serializer, ser};
use zero_alloc::device::DType;

/// A [`DType`] that collectives transmit.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum CommDType {
    U8,
    F16,
    Bf16,
    F32,
    F64,
}

impl TryFrom<DType> for CommDType {
    type Error = DType;

    /// Returns `dtype` as the error if no collective transmits it.
    fn try_from(dtype: DType) -> Result<Self, DType> {
        Ok(match dtype {
            DType::U8 => Self::U8,
            DType::F16 => Self::F16,
            DType::Bf16 => Self::Bf16,
            DType::F32 => Self::F32,
            DType::F64 => Self::F64,
            other => return Err(other),
        })
    }
}

impl From<CommDType> for DType {
    fn from(dtype: CommDType) -> Self {
        match dtype {
            CommDType::U8 => Self::U8,
            CommDType::F16 => Self::F16,
            CommDType::Bf16 => Self::Bf16,
            CommDType::F32 => Self::F32,
            CommDType::F64 => Self::F64,
        }
    }
}

pub(crate) fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    let dtype = CommDType::try_from(*dtype);
    dtype
        .map_err(|dtype| ser::Error::custom(format!("no collective transmits {dtype}")))?
        .serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    CommDType::deserialize(deserializer).map(DType::from)
}

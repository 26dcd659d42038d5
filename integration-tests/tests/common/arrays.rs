//! Arrays on a device, with uploads and downloads.

use std::sync::Mutex;
use std::time::Duration;

use half::{bf16, f16};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Stream};
use zero_alloc::{Block, Pool, Purpose};

pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// A device with a stream and a pool. It owns the arrays of a test.
pub(crate) struct Arrays<D: Device> {
    pub(crate) device: D,
    pub(crate) stream: D::Stream,
    pub(crate) pool: Pool<D>,
    held: Mutex<Vec<Block<D>>>,
}

impl<D: Device> Arrays<D> {
    pub(crate) fn on(device: D) -> Self {
        let stream = device.create_stream("test").unwrap();
        Self {
            pool: Pool::new(device.clone(), usize::MAX),
            device,
            stream,
            held: Mutex::default(),
        }
    }

    /// A new array of these bytes.
    pub(crate) fn bytes(&self, bytes: &[u8], elems: usize, dtype: DType) -> AnySlice {
        let block = self
            .pool
            .allocate(elems, dtype, Purpose::Workspace, &self.stream)
            .unwrap();
        // SAFETY: held to the end of the test, which drains the one stream that uses it.
        let slice = unsafe { block.slice() };
        self.held.lock().unwrap().push(block);
        self.set(slice, bytes);
        slice
    }

    /// `values` on the device, rounded to `dtype`.
    pub(crate) fn put(&self, values: &[f32], dtype: DType) -> AnySlice {
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => values
                .iter()
                .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
                .collect(),
            DType::F16 => values
                .iter()
                .flat_map(|v| f16::from_f32(*v).to_le_bytes())
                .collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        self.bytes(&bytes, values.len(), dtype)
    }

    pub(crate) fn floats(&self, values: &[f32]) -> DeviceSlice<f32> {
        self.put(values, DType::F32).typed().unwrap()
    }

    pub(crate) fn zeros(&self, elems: usize) -> DeviceSlice<f32> {
        self.floats(&vec![0.0; elems])
    }

    /// One fp64.
    pub(crate) fn double(&self, value: f64) -> DeviceSlice<f64> {
        let bytes = self.bytes(&value.to_le_bytes(), 8, DType::U8);
        // SAFETY: eight bytes at the start of a block; held as above.
        unsafe { DeviceSlice::from_raw_parts(bytes.as_ptr().cast(), 1, bytes.device()) }
    }

    /// Overwrites a slice of `values.len()` elements.
    pub(crate) fn set<T: bytemuck::NoUninit>(&self, slice: AnySlice, values: &[T]) {
        let bytes = bytemuck::cast_slice(values);
        self.device
            .upload(&self.stream, bytes, slice, LIMIT)
            .unwrap();
    }

    fn bytes_of(&self, slice: AnySlice) -> Vec<u8> {
        let mut bytes = vec![0; slice.len_bytes()];
        self.device
            .download(&self.stream, slice, &mut bytes, LIMIT)
            .unwrap();
        bytes
    }

    pub(crate) fn get_double(&self, slice: DeviceSlice<f64>) -> f64 {
        f64::from_le_bytes(self.bytes_of(slice.erase()).try_into().unwrap())
    }

    pub(crate) fn get(&self, slice: AnySlice) -> Vec<f32> {
        let bytes = self.bytes_of(slice);
        let halves = || {
            bytes
                .chunks_exact(2)
                .map(|b| u16::from_le_bytes(b.try_into().unwrap()))
        };
        match slice.dtype() {
            DType::Bf16 => halves().map(|b| bf16::from_bits(b).to_f32()).collect(),
            DType::F16 => halves().map(|b| f16::from_bits(b).to_f32()).collect(),
            _ => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect(),
        }
    }
}

impl<D: Device> Drop for Arrays<D> {
    fn drop(&mut self) {
        let _ = self.stream.synchronize(LIMIT);
    }
}

//! A device with kernels, and buffers with guard elements around them.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::LazyLock;
use std::time::Duration;

use bytemuck::Pod;
#[cfg(feature = "cuda")]
use zero_alloc::cuda::{CudaDevice, PinnedMemory};
use zero_alloc::device::{AnySlice, DType, Device, DeviceSlice, Element, Stream};
use zero_alloc::host::HostDevice;
use zero_kernels::Kernels;
#[cfg(feature = "cuda")]
use zero_kernels::cuda::CudaKernels;
use zero_kernels::host::HostKernels;

pub const LIMIT: Duration = Duration::from_secs(60);

/// The first GPU, one for all tests: each new context takes a third of a second on a GPU.
#[cfg(feature = "cuda")]
static DEVICE: LazyLock<CudaDevice> = LazyLock::new(|| CudaDevice::open(0).unwrap());

/// A device to run the suite on.
pub struct Rig<D: Device> {
    pub device: D,
    pub stream: D::Stream,
    pub kernels: Arc<dyn Kernels<D>>,
    /// The longest range to test on this device.
    pub most_elems: usize,
}

impl Rig<HostDevice> {
    pub fn host() -> Self {
        Self::of(HostDevice::new())
    }

    #[cfg(feature = "cuda")]
    pub fn pinned() -> Self {
        let memory = Arc::new(PinnedMemory::new(&DEVICE));
        Self::of(HostDevice::new().with_memory(memory).unwrap())
    }

    fn of(device: HostDevice) -> Self {
        let stream = device.create_stream("compute").unwrap();
        let kernels = Arc::new(HostKernels::new(if cfg!(miri) { 1 } else { 2 }).unwrap());
        Self {
            device,
            stream,
            kernels,
            most_elems: if cfg!(miri) { 37 } else { (1 << 20) + 3 },
        }
    }
}

#[cfg(feature = "cuda")]
impl Rig<CudaDevice> {
    pub fn cuda() -> Self {
        let device = DEVICE.clone();
        let stream = device.create_stream("compute").unwrap();
        let kernels = Arc::new(CudaKernels::new(&device).unwrap());
        // The stand-in interprets PTX, which is slow.
        let most_elems = if device.name().contains("stand-in") {
            33_003
        } else {
            (1 << 20) + 3
        };
        Self {
            device,
            stream,
            kernels,
            most_elems,
        }
    }
}

/// The byte that fills guards and unwritten outputs: a NaN in every float type.
const POISON: u8 = 0xff;
const GUARD_ELEMS: usize = 9;

impl<D: Device> Rig<D> {
    /// Lengths around the widths of vectors and groups, and a long one.
    pub fn lengths(&self) -> Vec<usize> {
        if cfg!(miri) {
            return vec![0, 9, self.most_elems];
        }
        vec![0, 1, 7, 8, 9, 255, self.most_elems]
    }

    /// A buffer of `values` that starts at element `from` of an aligned allocation.
    pub fn buffer<T: Pod>(&self, values: &[T], from: usize) -> Buffer<'_, D, T> {
        let elems = from + values.len() + GUARD_ELEMS;
        let mut image = vec![POISON; elems * size_of::<T>()];
        let range = from * size_of::<T>()..(from + values.len()) * size_of::<T>();
        image[range].copy_from_slice(bytemuck::cast_slice(values));
        let ptr = self.device.allocate(image.len()).unwrap();
        let buffer = Buffer {
            rig: self,
            ptr,
            bytes: image.len(),
            from,
            len: values.len(),
            _elements: PhantomData,
        };
        self.device
            .upload(&self.stream, &image, buffer.all(), LIMIT)
            .unwrap();
        buffer
    }

    /// A buffer of `len` elements filled with [`POISON`].
    pub fn poisoned<T: Pod>(&self, len: usize, from: usize) -> Buffer<'_, D, T> {
        let poison = vec![POISON; size_of::<T>()];
        self.buffer(&vec![bytemuck::pod_read_unaligned(&poison); len], from)
    }
}

/// Memory of a rig's device, with guards around it.
pub struct Buffer<'a, D: Device, T> {
    rig: &'a Rig<D>,
    ptr: NonNull<u8>,
    bytes: usize,
    from: usize,
    len: usize,
    _elements: PhantomData<T>,
}

impl<D: Device, T: Pod> Buffer<'_, D, T> {
    fn all(&self) -> AnySlice {
        // SAFETY: the buffer's own memory, used on the rig's one stream, which is drained before it
        // is freed.
        unsafe {
            AnySlice::from_raw_parts(
                self.ptr.as_ptr(),
                self.bytes,
                DType::U8,
                self.rig.device.id(),
            )
        }
    }

    pub fn slice(&self) -> DeviceSlice<T> {
        let start = self.ptr.as_ptr().cast::<T>().wrapping_add(self.from);
        // SAFETY: as for `all`.
        unsafe { DeviceSlice::from_raw_parts(start, self.len, self.rig.device.id()) }
    }

    /// Reads the range in stream order, and checks that the guards have not changed.
    pub fn read(&self) -> Vec<T> {
        let mut image = vec![0; self.bytes];
        self.rig
            .device
            .download(&self.rig.stream, self.all(), &mut image, LIMIT)
            .unwrap();
        let (before, rest) = image.split_at(self.from * size_of::<T>());
        let (range, after) = rest.split_at(self.len * size_of::<T>());
        assert!(
            before.iter().chain(after).all(|&b| b == POISON),
            "a guard was overwritten"
        );
        bytemuck::pod_collect_to_vec(range)
    }
}

impl<D: Device, T: Element> Buffer<'_, D, T> {
    pub fn any(&self) -> AnySlice {
        self.slice().erase()
    }
}

impl<D: Device, T> Drop for Buffer<'_, D, T> {
    fn drop(&mut self) {
        if self.rig.stream.synchronize(LIMIT).is_ok() {
            // SAFETY: allocated by the rig's device with this size; its only stream is drained.
            unsafe { self.rig.device.deallocate(self.ptr, self.bytes) };
        }
    }
}

//! Host memory that starts on a page boundary, as direct I/O requires.

/// Alignment of direct I/O: offsets, lengths and addresses are multiples of this.
pub(crate) const PAGE_BYTES: usize = 4096;

// The derives prove that a page is plain bytes without padding.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// A page-aligned buffer of bytes.
pub(crate) struct PageBuffer {
    pages: Box<[Page]>,
    len_bytes: usize,
}

impl PageBuffer {
    /// Allocates `len_bytes` zeroed bytes, rounded up to whole pages.
    pub(crate) fn new(len_bytes: usize) -> Self {
        Self {
            pages: bytemuck::zeroed_slice_box(len_bytes.div_ceil(PAGE_BYTES)),
            len_bytes,
        }
    }

    /// Allocates the buffer and writes to every page, so that no page fault delays a snapshot;
    /// `None` if out of memory.
    pub(crate) fn touched(len_bytes: usize) -> Option<Self> {
        let mut pages =
            bytemuck::try_zeroed_slice_box::<Page>(len_bytes.div_ceil(PAGE_BYTES)).ok()?;
        bytemuck::cast_slice_mut::<_, u8>(&mut pages).fill(0xa5);
        Some(Self { pages, len_bytes })
    }

    /// The requested bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.pages)[..self.len_bytes]
    }

    /// The requested bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.pages)[..self.len_bytes]
    }

    /// All bytes of all pages.
    pub(crate) fn whole(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_sized() {
        for len in [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1] {
            let mut buffer = PageBuffer::new(len);
            assert_eq!(buffer.bytes().len(), len);
            assert!(buffer.bytes().as_ptr().addr().is_multiple_of(PAGE_BYTES));
            assert!(buffer.bytes().iter().all(|b| *b == 0));
            buffer.bytes_mut().fill(7);
            assert_eq!(buffer.whole().len(), len.next_multiple_of(PAGE_BYTES));
            assert_eq!(buffer.whole().iter().filter(|b| **b == 7).count(), len);
        }
        assert_eq!(PageBuffer::touched(5).unwrap().bytes(), [0xa5; 5]);
        assert!(PageBuffer::touched(usize::MAX / 2).is_none());
    }
}

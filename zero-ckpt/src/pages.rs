//! Memory that starts on a page boundary, as direct I/O wants it.

/// Alignment of direct I/O: offsets, lengths and addresses are multiples of this.
pub(crate) const PAGE_BYTES: usize = 4096;

// The derives prove that a page is plain bytes without padding.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Page-aligned bytes, zeroed at first.
pub struct Pages {
    pages: Box<[Page]>,
    len_bytes: usize,
}

impl Pages {
    /// `len_bytes` zeroed bytes, rounded up to whole pages underneath.
    pub fn new(len_bytes: usize) -> Self {
        Self { pages: bytemuck::zeroed_slice_box(len_bytes.div_ceil(PAGE_BYTES)), len_bytes }
    }

    /// The same, or `None` where there is not so much memory; every page is touched, so that none is
    /// first mapped while a step waits.
    pub fn touched(len_bytes: usize) -> Option<Self> {
        let mut pages = bytemuck::try_zeroed_slice_box::<Page>(len_bytes.div_ceil(PAGE_BYTES)).ok()?;
        bytemuck::cast_slice_mut::<_, u8>(&mut pages).fill(0xa5);
        Some(Self { pages, len_bytes })
    }

    /// The bytes asked for.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.pages)[..self.len_bytes]
    }

    /// The bytes asked for.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.pages)[..self.len_bytes]
    }

    /// Whole pages, those bytes included that round the length up.
    pub(crate) fn whole(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_and_of_the_length_asked_for() {
        for len in [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1] {
            let mut pages = Pages::new(len);
            assert_eq!(pages.bytes().len(), len);
            assert!(pages.bytes().as_ptr().addr().is_multiple_of(PAGE_BYTES));
            assert!(pages.bytes().iter().all(|b| *b == 0));
            pages.bytes_mut().fill(7);
            assert_eq!(pages.whole().len(), len.next_multiple_of(PAGE_BYTES));
            assert_eq!(pages.whole().iter().filter(|b| **b == 7).count(), len);
        }
        assert_eq!(Pages::touched(5).unwrap().bytes(), [0xa5; 5]);
        assert!(Pages::touched(usize::MAX / 2).is_none());
    }
}

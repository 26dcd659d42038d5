//! The cost model, by which plans are compared: the time to move bytes and to map pages.

/// Times of a device's operations, in nanoseconds. Start from [`CostModel::HOST`] or
/// [`CostModel::H200`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CostModel {
    /// To copy one byte within the device.
    pub copy_byte_ns: f64,
    /// To start one copy.
    pub copy_call_ns: f64,
    /// To create one page.
    pub create_page_ns: f64,
    /// To map one page and give access to it.
    pub map_page_ns: f64,
    /// To unmap one page.
    pub unmap_page_ns: f64,
}

impl CostModel {
    /// One H200 with pages of 2 MiB, as measured for this project (2026-11-20): copies read and
    /// write 4117 GB/s in sum; creating, mapping and unmapping a page takes 10.5, 26.6 and 20.6 us.
    pub const H200: Self = Self {
        copy_byte_ns: 2.0 / 4117.0,
        copy_call_ns: 2_000.0,
        create_page_ns: 10_500.0,
        map_page_ns: 26_600.0,
        unmap_page_ns: 20_600.0,
    };

    /// A host: about 10 GB/s of copying, cheap calls, pages mapped by the kernel in about a
    /// microsecond.
    pub const HOST: Self = Self {
        copy_byte_ns: 0.1,
        copy_call_ns: 50.0,
        create_page_ns: 1_000.0,
        map_page_ns: 1_000.0,
        unmap_page_ns: 500.0,
    };

    /// The time of `copies` copies of `bytes` bytes in total.
    #[inline]
    pub(super) fn copies_ns(&self, bytes: u64, copies: u64) -> f64 {
        bytes as f64 * self.copy_byte_ns + copies as f64 * self.copy_call_ns
    }

    /// The time to move `bytes` by `distance`: a move that overlaps itself is cut into pieces that
    /// do not.
    pub(crate) fn move_ns(&self, bytes: u64, distance: u64) -> f64 {
        // The common case needs no division.
        let copies = if distance >= bytes {
            1
        } else {
            bytes.div_ceil(distance.max(1))
        };
        self.copies_ns(bytes, copies)
    }
}

//! Matrix products of operands rounded to bf16, with sums in fp32, on CPUs with instructions for
//! them.
//!
//! `out = a b^T` or `out += a b^T`: a `[m, k]` and b `[n, k]` in any order of their elements, out
//! row-major. Both operands are packed into tiles, each element once a product: the smaller operand
//! by all threads together, and the larger one, panel by panel, by the thread that multiplies the
//! panel. So a product reads its operands once from memory, and what it reads again is in a core's
//! cache.
//!
//! | instructions | an element of `out` is |
//! |---|---|
//! | AMX (`tdpbf16ps`) | for each 32 of k in order, the sum of the even products plus that of the odd ones |
//! | AVX512-BF16 (`vdpbf16ps`) | each pair of k in order: the odd product is added, then the even one |
//!
//! The fewest operations of a product are its 2 m n k by the peak of the instructions: 2,048 a
//! cycle of a core by AMX, and 32 (Sapphire Rapids), 64 (Zen 4) or 128 by AVX512-BF16;
//! benches/README.md has the share that is reached. Other CPUs have no [`Bf16Products`]: their
//! products are in fp32, of bf16 parameters and fp32 activations.
//!
//! Every sum begins with 0, or with the element that it is added to, and is rounded to nearest. Its
//! order depends neither on the number of threads nor on the sizes, so the bits of an element
//! don't, either. The instructions, and rounding, take denormal numbers for 0 (Intel, Architecture
//! Instruction Set Extensions Reference, TDPBF16PS, VDPBF16PS and VCVTNE2PS2BF16).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod operand;
#[cfg(target_arch = "x86_64")]
mod panels;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;
use std::thread::LocalKey;

use faer::MatMut;
use faer::prelude::ReborrowMut;
use rayon::prelude::*;
use zero_alloc::device::DType;

use operand::Form;
pub(super) use operand::{Elems, Operand};

/// Lines and pairs of k of a tile.
const TILE: usize = 16;

/// Lines of a panel, and rows and columns that a kernel computes at once.
const PANEL: usize = 2 * TILE;

/// Elements of k of a tile.
const DEPTH: usize = 2 * TILE;

/// Maximum elements of k of a packed panel, a multiple of [`DEPTH`]: a panel (40 KiB) fits a
/// level-1 cache.
const MAX_DEPTH: usize = 640;

/// Maximum lines that are packed for all threads: 1.25 MiB, which fits a level-2 cache.
const MAX_SHARED: usize = 1024;

/// 16 lines of 16 pairs of neighbouring elements of k, in bf16; or of the transpose, see [`Form`].
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([[u32; TILE]; TILE]);

/// The instructions of this CPU for products of bf16. A value exists only where they can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16Products(Instructions);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The environment variable that limits the instructions, to compare them: `avx512` or `fp32`.
const LIMIT: &str = "ZERO_BF16_PRODUCTS";

impl Bf16Products {
    /// The fastest instructions of this CPU, if there are any.
    pub fn of_cpu() -> Option<Self> {
        static FASTEST: OnceLock<Option<Bf16Products>> = OnceLock::new();
        *FASTEST.get_or_init(|| {
            let limit = std::env::var(LIMIT).unwrap_or_default();
            let mut all = Self::all().into_iter();
            match limit.as_str() {
                "fp32" => None,
                "avx512" => all.next_back(),
                _ => all.next(),
            }
        })
    }

    /// Those of a run whose parameters are of `dtype`; `None` if its products are in fp32.
    pub fn of_run(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Bf16 => Self::of_cpu(),
            _ => None,
        }
    }

    /// All that this CPU has, the fastest first.
    #[cfg(target_arch = "x86_64")]
    fn all() -> Vec<Self> {
        if !avx512::is_available() {
            return Vec::new();
        }
        // Packing for AMX is by AVX-512, too.
        let amx = amx::is_available().then_some(Instructions::Amx);
        amx.into_iter()
            .chain([Instructions::Avx512])
            .map(Self)
            .collect()
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn all() -> Vec<Self> {
        Vec::new()
    }

    /// `out = a b^T`, or `out += a b^T`, on the threads of the current pool.
    pub(super) fn product(
        self,
        out: MatMut<'_, f32>,
        accumulate: bool,
        a: &Operand<'_>,
        b: &Operand<'_>,
    ) {
        self.by_panels(out, accumulate, [a, b], rayon::current_num_threads() > 1);
    }

    /// As [`Self::product`], on the calling thread.
    pub(super) fn product_on_thread(
        self,
        out: MatMut<'_, f32>,
        accumulate: bool,
        a: &Operand<'_>,
        b: &Operand<'_>,
    ) {
        self.by_panels(out, accumulate, [a, b], false);
    }

    fn by_panels(
        self,
        mut out: MatMut<'_, f32>,
        accumulate: bool,
        [a, b]: [&Operand<'_>; 2],
        on_all_threads: bool,
    ) {
        if a.depth == 0 && !accumulate {
            out.fill(0.0);
        }
        let is_left_shared = a.len <= b.len;
        let (shared, shared_form, own, own_form) = match is_left_shared {
            true => (a, Form::Left, b, Form::Right),
            false => (b, Form::Right, a, Form::Left),
        };

        for first in (0..shared.len).step_by(MAX_SHARED) {
            let lines = MAX_SHARED.min(shared.len - first);
            let mut out = match is_left_shared {
                true => out.rb_mut().subrows_mut(first, lines),
                false => out.rb_mut().subcols_mut(first, lines),
            };
            for depth in depths(a.depth) {
                let accumulate = accumulate || depth.start > 0;
                let of_panel = 2 * depth.len().div_ceil(DEPTH);
                let of_all = of_panel * lines.div_ceil(PANEL);
                with_tiles(&SHARED, of_all, |packed| {
                    let pack = |(i, panel): (usize, &mut [Tile])| {
                        self.pack(panel, shared, first + i * PANEL, &depth, shared_form);
                    };
                    match on_all_threads {
                        true => packed.par_chunks_mut(of_panel).enumerate().for_each(pack),
                        false => packed.chunks_mut(of_panel).enumerate().for_each(pack),
                    }

                    let packed = &*packed;
                    let multiply = |(i, out): (usize, MatMut<'_, f32>)| {
                        with_tiles(&OWN, of_panel, |panel| {
                            self.pack(panel, own, i * PANEL, &depth, own_form);
                            self.multiply(out, accumulate, panel, packed, is_left_shared);
                        });
                    };
                    let parts = panels(out.rb_mut(), !is_left_shared);
                    match on_all_threads {
                        true => parts.into_par_iter().enumerate().for_each(multiply),
                        false => parts.into_iter().enumerate().for_each(multiply),
                    }
                });
            }
        }
    }

    /// Packs the lines of a panel, from `line` on.
    fn pack(
        self,
        panel: &mut [Tile],
        operand: &Operand<'_>,
        line: usize,
        depth: &Range<usize>,
        form: Form,
    ) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Instructions::Amx | Instructions::Avx512 => {
                // SAFETY: `all` found the instructions.
                unsafe { panels::pack_panel(panel, operand, line, depth.clone(), form) };
            }
        }
    }

    /// Computes the part of the output of the panel `own` with all panels of `shared`.
    fn multiply(
        self,
        mut out: MatMut<'_, f32>,
        accumulate: bool,
        own: &[Tile],
        shared: &[Tile],
        is_left_shared: bool,
    ) {
        let kernel = self.kernel();
        for (i, shared) in shared.chunks_exact(own.len()).enumerate() {
            let first = i * PANEL;
            let (block, left, right) = match is_left_shared {
                true => {
                    let rows = PANEL.min(out.nrows() - first);
                    (out.rb_mut().subrows_mut(first, rows), shared, own)
                }
                false => {
                    let cols = PANEL.min(out.ncols() - first);
                    (out.rb_mut().subcols_mut(first, cols), own, shared)
                }
            };
            kernel.block(block, accumulate, left, right);
        }
    }

    /// Prepares the calling thread.
    fn kernel(self) -> Kernel {
        match self.0 {
            // SAFETY: `all` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Instructions::Amx => Kernel::Amx(unsafe { amx::Tiles::new() }),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => Kernel::Avx512,
        }
    }
}

/// The multiplication of two panels on a thread. A value exists only where its instructions do.
enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Amx(amx::Tiles),
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    /// Computes, or adds to, a block of at most `[PANEL, PANEL]`.
    fn block(&self, mut block: MatMut<'_, f32>, accumulate: bool, left: &[Tile], right: &[Tile]) {
        let [rows, cols] = [block.nrows(), block.ncols()];
        assert_eq!(block.col_stride(), 1, "an output is row-major");
        if [rows, cols] == [PANEL; 2] {
            let stride = block.row_stride().unsigned_abs();
            // SAFETY: the block has 32 rows of 32 elements, which its maker borrowed for writing.
            return unsafe { self.whole(block.as_ptr_mut(), stride, accumulate, left, right) };
        }

        // At the ends of the output: a copy with all rows and columns, so that its sums are the
        // same.
        let mut copy = [[0.0f32; PANEL]; PANEL];
        if accumulate {
            for (i, row) in copy.iter_mut().enumerate().take(rows) {
                row[..cols].copy_from_slice(row_of(block.rb_mut(), i));
            }
        }
        // SAFETY: the copy has 32 rows of 32 elements.
        unsafe {
            self.whole(
                copy.as_flattened_mut().as_mut_ptr(),
                PANEL,
                accumulate,
                left,
                right,
            )
        };
        for (i, row) in copy.iter().enumerate().take(rows) {
            row_of(block.rb_mut(), i).copy_from_slice(&row[..cols]);
        }
    }

    /// # Safety
    /// `block` has `PANEL` rows of as many elements, `stride` apart, writable and accessed by
    /// nothing else.
    unsafe fn whole(
        &self,
        block: *mut f32,
        stride: usize,
        accumulate: bool,
        left: &[Tile],
        right: &[Tile],
    ) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Self::Amx(tiles) => unsafe { tiles.multiply(block, stride, accumulate, left, right) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the same, and `all` found the instructions.
            Self::Avx512 => unsafe { avx512::multiply(block, stride, accumulate, left, right) },
        }
    }
}

/// Row `i` of a row-major block.
fn row_of(block: MatMut<'_, f32>, i: usize) -> &mut [f32] {
    let row = block.row_mut(i).try_as_row_major_mut();
    row.map_or_else(Default::default, |row| row.as_slice_mut())
}

/// Splits `depth` evenly into ranges of whole tiles and at most [`MAX_DEPTH`].
fn depths(depth: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = depth.div_ceil(MAX_DEPTH).max(1);
    let part = depth.div_ceil(parts).next_multiple_of(DEPTH);
    (0..depth)
        .step_by(part.max(1))
        .map(move |first| first..depth.min(first + part))
}

/// Splits `out` into panels of rows or of columns.
fn panels(mut out: MatMut<'_, f32>, of_rows: bool) -> Vec<MatMut<'_, f32>> {
    let mut panels = Vec::new();
    while out.nrows() > 0 && out.ncols() > 0 {
        let (panel, rest) = match of_rows {
            true => {
                let rows = PANEL.min(out.nrows());
                out.split_at_row_mut(rows)
            }
            false => {
                let cols = PANEL.min(out.ncols());
                out.split_at_col_mut(cols)
            }
        };
        panels.push(panel);
        out = rest;
    }
    panels
}

thread_local! {
    /// Panels for all threads.
    static SHARED: Cell<Vec<Tile>> = const { Cell::new(Vec::new()) };
    /// A panel for this thread.
    static OWN: Cell<Vec<Tile>> = const { Cell::new(Vec::new()) };
}

/// Calls `work` with `len` tiles of the calling thread, of any values. They stay allocated.
fn with_tiles<R>(
    tiles: &'static LocalKey<Cell<Vec<Tile>>>,
    len: usize,
    work: impl FnOnce(&mut [Tile]) -> R,
) -> R {
    let mut memory = tiles.take();
    if memory.len() < len {
        memory = vec![Tile([[0; TILE]; TILE]); len];
    }
    let result = work(&mut memory[..len]);
    tiles.set(memory);
    result
}

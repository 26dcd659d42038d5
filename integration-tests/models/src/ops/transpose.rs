//! Transposition of a matrix.

/// Rows and columns of a tile.
const TILE: usize = 4;

/// Elements of a cache line, which is written at once. Fewer rows are copied element by element.
const LINE: usize = 16;

/// `out[j, i] = x[i, j]`: x has `rows` rows of `stride` elements, of which it reads as many as out
/// `[columns, rows]` has rows.
pub(crate) fn transpose(out: &mut [f32], x: &[f32], stride: usize, rows: usize) {
    let cols = out.len() / rows;
    let in_lines = rows / LINE * LINE;
    let in_tiles = cols / TILE * TILE;
    for first in (0..in_lines).step_by(LINE) {
        let lines: [&[[f32; TILE]]; LINE] =
            std::array::from_fn(|a| x[(first + a) * stride..][..cols].as_chunks().0);
        for (j, columns) in out.chunks_exact_mut(TILE * rows).enumerate() {
            for (part, [a, b, c, d]) in lines.as_chunks().0.iter().enumerate() {
                let tile = transposed([a[j], b[j], c[j], d[j]]);
                for (b, column) in tile.iter().enumerate() {
                    columns[b * rows + first + part * TILE..][..TILE].copy_from_slice(column);
                }
            }
        }
    }
    for i in 0..rows {
        for j in if i < in_lines { in_tiles } else { 0 }..cols {
            out[j * rows + i] = x[i * stride + j];
        }
    }
}

type Tile = [[f32; TILE]; TILE];

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transposed(tile: Tile) -> Tile {
    // SAFETY: every x86-64 CPU has SSE.
    unsafe { transposed_sse(tile) }
}

/// The compiler does not find these shuffles by itself.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "sse")]
fn transposed_sse(tile: Tile) -> Tile {
    use std::arch::x86_64::{
        __m128, _mm_movehl_ps, _mm_movelh_ps, _mm_unpackhi_ps, _mm_unpacklo_ps,
    };
    let [a, b, c, d]: [__m128; TILE] = bytemuck::cast(tile);
    let low_ab = _mm_unpacklo_ps(a, b);
    let low_cd = _mm_unpacklo_ps(c, d);
    let high_ab = _mm_unpackhi_ps(a, b);
    let high_cd = _mm_unpackhi_ps(c, d);
    bytemuck::cast([
        _mm_movelh_ps(low_ab, low_cd),
        _mm_movehl_ps(low_cd, low_ab),
        _mm_movelh_ps(high_ab, high_cd),
        _mm_movehl_ps(high_cd, high_ab),
    ])
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transposed(tile: Tile) -> Tile {
    std::array::from_fn(|b| std::array::from_fn(|a| tile[a][b]))
}

#[cfg(test)]
mod tests {
    use super::transpose;

    #[test]
    fn transposes_any_size() {
        for (rows, cols, stride) in [
            (1, 1, 1),
            (3, 5, 5),
            (4, 4, 7),
            (9, 6, 6),
            (8, 13, 20),
            (17, 4, 5),
            (37, 9, 11),
            (16, 4, 4),
            (48, 11, 12),
        ] {
            let x: Vec<f32> = (0..rows * stride).map(|i| i as f32).collect();
            let mut out = vec![f32::NAN; rows * cols];
            transpose(&mut out, &x, stride, rows);
            for (i, j) in (0..rows).flat_map(|i| (0..cols).map(move |j| (i, j))) {
                assert_eq!(
                    out[j * rows + i],
                    x[i * stride + j],
                    "{rows} x {cols}, row {i}, column {j}"
                );
            }
        }
    }
}

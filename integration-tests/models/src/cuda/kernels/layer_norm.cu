// Layer normalisation over the last axis, with gain and bias. Host version: src/ops/norm.rs.
//
// Shapes: x, y, dx, dy [rows, n] and gain, bias [n] in T; stats [rows, 2] fp32 hold mean and 1/std; partials
// [blocks, sums, n] fp32.
//
// A warp computes a row, so rows need no barrier. A lane owns W neighbouring columns (8: n is a multiple of 8; else 1)
// of each of CHUNKS chunks of 32 W columns, so n <= 32 W CHUNKS. There is a variant for each width of GPT-2 and one up
// to 4096 (W = 8), and one up to 1024 (W = 1): LAYER_NORM below, repeated in src/cuda/norm.rs.
//
// forward reads x and writes y and stats: 2 rows n sizeof(T) bytes. Grid: a warp for each row.
// backward adds to dx and, unless `normed` is null, writes y again, with the bits of forward: reads dy, x, dx, writes
// dx and normed: 5 rows n sizeof(T) bytes. Unless `sums` is 0, it also sums over rows, for the gradients of gain and bias
// and, if it is 3, of dx as it was: the gradient of a bias that was added to x. Each warp sums its rows in shared memory
// (blockDim.x / 32 * sums * chunks * 32 W fp32), each block its warps; sum_partials (column_sums.cu) sums the blocks. All
// in a fixed order, without atomics, so that the bits depend only on the grid, which depends only on the sizes. Grid: any.

template <class T, int W, int CHUNKS>
__device__ __forceinline__ void layer_norm_forward(T *y, float *stats, const T *x, const T *gain, const T *bias,
                                                   u32 rows, u32 n, float eps) {
    u64 row = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    x += row * n, y += row * n;
    float v[CHUNKS][W] = {}, sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (column<W>(i) < n) load_columns<W>(x + column<W>(i), v[i]);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) sum += v[i][k];
    float mean = warp_sum(sum) / n;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int k = 0; k < W; k++) {
            v[i][k] -= mean;
            if (column<W>(i) < n) square = __fmaf_rn(v[i][k], v[i][k], square);
        }
    float rstd = 1.0f / sqrtf(warp_sum(square) / n + eps);
    if (threadIdx.x % 32 == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 col = column<W>(i);
        if (col >= n) continue;
        float g[W], b[W];
        load_columns<W>(gain + col, g), load_columns<W>(bias + col, b);
#pragma unroll
        for (int k = 0; k < W; k++) v[i][k] = __fmaf_rn(v[i][k] * rstd, g[k], b[k]);
        store_columns<W>(y + col, v[i]);
    }
}

// With h = (x - mean) rstd and g = dy gain: dx += rstd (g - mean(g) - h mean(g h)).
template <class T, int W, int CHUNKS>
__device__ __forceinline__ void layer_norm_backward(T *dx, float *partials, T *normed, const T *dy, const T *x,
                                                    const float *stats, const T *gain, const T *bias, u32 rows, u32 n,
                                                    u32 sums) {
    extern __shared__ float4 shared[];
    // Rows wider than this are read twice, the second time from a cache, because registers do not hold them.
    constexpr bool KEEP = CHUNKS * W <= 64;
    constexpr int KEPT = KEEP ? CHUNKS : 1;
    u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, padded = (n + 32 * W - 1) / (32 * W) * (32 * W);
    float *all = reinterpret_cast<float *>(shared), *own = all + warp * sums * padded;
    for (u32 i = threadIdx.x % 32; i < sums * padded; i += 32) own[i] = 0.0f;
    __syncwarp();
    for (u64 row = (u64)blockIdx.x * warps + warp; row < rows; row += (u64)gridDim.x * warps) {
        const T *x_row = x + row * n, *dy_row = dy + row * n;
        T *dx_row = dx + row * n;
        float h[KEPT][W], g[KEPT][W], sum_g = 0.0f, sum_gh = 0.0f;
        Columns<T, W> d[KEPT];
        if constexpr (KEEP) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                u32 col = column<W>(i);
                if (col >= n) continue;
                load_columns<W>(x_row + col, h[i]), load_columns<W>(dy_row + col, g[i]), d[i].load(dx_row + col);
            }
        }
        float mean = stats[2 * row], rstd = stats[2 * row + 1];
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 col = column<W>(i), at = KEEP ? i : 0;
            if (col >= n) continue;
            if constexpr (!KEEP)
                load_columns<W>(x_row + col, h[at]), load_columns<W>(dy_row + col, g[at]), d[at].load(dx_row + col);
            float *chunk = own + i * 32 * W, scale[W], dgain[W];
            load_columns<W>(gain + col, scale);
            if (sums) add_to_chunk<W>(chunk + padded, g[at]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                h[at][k] = (h[at][k] - mean) * rstd;
                dgain[k] = g[at][k] * h[at][k];
                g[at][k] *= scale[k];
                sum_g += g[at][k];
                sum_gh = __fmaf_rn(g[at][k], h[at][k], sum_gh);
            }
            if (sums) add_to_chunk<W>(chunk, dgain);
            if (sums == 3) {
                float before[W];
                d[at].widen_to(before);
                add_to_chunk<W>(chunk + 2 * padded, before);
            }
            if (normed) {
                float y[W], b[W];
                load_columns<W>(bias + col, b);
#pragma unroll
                for (int k = 0; k < W; k++) y[k] = __fmaf_rn(h[at][k], scale[k], b[k]);
                store_columns<W>(normed + row * n + col, y);
            }
        }
        float mean_g = warp_sum(sum_g) / n, mean_gh = warp_sum(sum_gh) / n;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 col = column<W>(i), at = KEEP ? i : 0;
            if (col >= n) continue;
            float after[W];
            if constexpr (!KEEP) {
                float scale[W];
                load_columns<W>(x_row + col, h[0]), load_columns<W>(dy_row + col, g[0]), d[0].load(dx_row + col);
                load_columns<W>(gain + col, scale);
#pragma unroll
                for (int k = 0; k < W; k++) h[0][k] = (h[0][k] - mean) * rstd, g[0][k] *= scale[k];
            }
            d[at].widen_to(after);
#pragma unroll
            for (int k = 0; k < W; k++)
                after[k] = __fmaf_rn(rstd, g[at][k] - mean_g - h[at][k] * mean_gh, after[k]);
            store_columns<W>(dx_row + col, after);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < sums * n; i += blockDim.x) {
        const float *place = all + i / n * padded + place_in_chunks<W>(i % n);
        float sum = place[0];
        for (u32 w = 1; w < warps; w++) sum += place[w * sums * padded];
        partials[(u64)blockIdx.x * sums * n + i] = sum;
    }
}

#define LAYER_NORM(T, W, CHUNKS, WARPS)                                                                              \
    extern "C" __global__ __launch_bounds__(128) void layer_norm_forward_##W##_##CHUNKS(                             \
        T *y, float *stats, const T *x, const T *gain, const T *bias, u32 rows, u32 n, float eps) {                  \
        layer_norm_forward<T, W, CHUNKS>(y, stats, x, gain, bias, rows, n, eps);                                     \
    }                                                                                                                \
    extern "C" __global__ __launch_bounds__(32 * WARPS) void layer_norm_backward_##W##_##CHUNKS(                     \
        T *dx, float *partials, T *normed, const T *dy, const T *x, const float *stats, const T *gain,               \
        const T *bias, u32 rows, u32 n, u32 sums) {                                                                  \
        layer_norm_backward<T, W, CHUNKS>(dx, partials, normed, dy, x, stats, gain, bias, rows, n, sums);            \
    }

// Columns of a lane, its chunks, and the warps of a block of the backward pass: those whose three sums fit 48 KiB.
LAYER_NORM(STORAGE, 8, 3, 4)
LAYER_NORM(STORAGE, 8, 4, 4)
LAYER_NORM(STORAGE, 8, 5, 2)
LAYER_NORM(STORAGE, 8, 7, 2)
LAYER_NORM(STORAGE, 8, 16, 1)
LAYER_NORM(STORAGE, 1, 32, 4)

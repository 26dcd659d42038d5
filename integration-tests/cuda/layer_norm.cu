// Layer normalisation over the last axis, with gain and bias. Host version: src/ops/layer_norm.rs.
//
// Shapes: x, y, dx, dy [rows, n] and gain, bias [n] in T; stats [rows, 2] fp32 hold mean and 1/std; partials
// [blocks, 2 n] fp32. A thread owns W columns (8: n is a multiple of 8; else 1), so n <= 4096 (W = 8) or 1024 (W =
// 1). Block: ceil(n / W) threads, rounded up to a warp. Grid: any; a block computes every gridDim-th batch of BATCH
// rows.
//
// forward reads x and writes y and stats: 2 rows n sizeof(T) bytes.
// backward adds to dx and writes each block's sums for gain and bias to partials: reads dy, x, dx, writes dx: 4 rows
// n sizeof(T) bytes. sum_partials (column_sums.cu) then adds the partials in order, without atomics, so that the bits
// depend only on the grid.

#define BATCH 4
#define MAX_WARPS 32

template <class T, int W>
__device__ __forceinline__ void layer_norm_forward(T *y, float *stats, const T *x, const T *gain, const T *bias,
                                                   u32 rows, u32 n, float eps) {
    __shared__ float sums[2][MAX_WARPS][BATCH];
    u32 col = threadIdx.x * W;
    bool owns = col < n;
    float g[W] = {}, b[W] = {};
    if (owns) load_columns<W>(gain + col, g), load_columns<W>(bias + col, b);
    for (u32 first = blockIdx.x * BATCH; first < rows; first += gridDim.x * BATCH) {
        float v[BATCH][W] = {}, sum[BATCH] = {};
#pragma unroll
        for (int r = 0; r < BATCH; r++)
            if (owns && first + r < rows) load_columns<W>(x + (u64)(first + r) * n + col, v[r]);
#pragma unroll
        for (int r = 0; r < BATCH; r++)
#pragma unroll
            for (int i = 0; i < W; i++) sum[r] += v[r][i];
        block_sum<BATCH>(sum, sums[0]);
        float mean[BATCH], square[BATCH] = {};
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            mean[r] = sum[r] / n;
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[r][i] -= mean[r];
                if (owns) square[r] = __fmaf_rn(v[r][i], v[r][i], square[r]);
            }
        }
        block_sum<BATCH>(square, sums[1]);
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            u32 row = first + r;
            if (row >= rows) break;
            float rstd = 1.0f / sqrtf(square[r] / n + eps);
            if (threadIdx.x == 0) stats[2 * (u64)row] = mean[r], stats[2 * (u64)row + 1] = rstd;
            if (!owns) continue;
#pragma unroll
            for (int i = 0; i < W; i++) v[r][i] = __fmaf_rn(v[r][i] * rstd, g[i], b[i]);
            store_columns<W>(y + (u64)row * n + col, v[r]);
        }
    }
}

// With h = (x - mean) rstd and g = dy gain: dx += rstd (g - mean(g) - h mean(g h)).
template <class T, int W>
__device__ __forceinline__ void layer_norm_backward(T *dx, float *partials, const T *dy, const T *x,
                                                    const float *stats, const T *gain, u32 rows, u32 n) {
    __shared__ float sums[2][MAX_WARPS][2 * BATCH];
    u32 col = threadIdx.x * W, parity = 0;
    bool owns = col < n;
    float scale[W] = {}, dgain[W] = {}, dbias[W] = {};
    if (owns) load_columns<W>(gain + col, scale);
    for (u32 first = blockIdx.x * BATCH; first < rows; first += gridDim.x * BATCH, parity ^= 1) {
        float h[BATCH][W] = {}, g[BATCH][W] = {}, rstd[BATCH] = {}, sum[2 * BATCH] = {};
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            u64 row = first + r;
            if (!owns || row >= rows) continue;
            load_columns<W>(x + row * n + col, h[r]);
            load_columns<W>(dy + row * n + col, g[r]);
            float mean = stats[2 * row];
            rstd[r] = stats[2 * row + 1];
#pragma unroll
            for (int i = 0; i < W; i++) {
                h[r][i] = (h[r][i] - mean) * rstd[r];
                dgain[i] = __fmaf_rn(g[r][i], h[r][i], dgain[i]);
                dbias[i] += g[r][i];
                g[r][i] *= scale[i];
                sum[2 * r] += g[r][i];
                sum[2 * r + 1] = __fmaf_rn(g[r][i], h[r][i], sum[2 * r + 1]);
            }
        }
        block_sum<2 * BATCH>(sum, sums[parity]);
#pragma unroll
        for (int r = 0; r < BATCH; r++) {
            u64 row = first + r;
            if (!owns || row >= rows) continue;
            float mean_g = sum[2 * r] / n, mean_gh = sum[2 * r + 1] / n, d[W];
            load_columns<W>(dx + row * n + col, d);
#pragma unroll
            for (int i = 0; i < W; i++)
                d[i] = __fmaf_rn(rstd[r], g[r][i] - mean_g - h[r][i] * mean_gh, d[i]);
            store_columns<W>(dx + row * n + col, d);
        }
    }
    if (!owns) return;
    float *own = partials + (u64)blockIdx.x * 2 * n + col;
#pragma unroll
    for (int i = 0; i < W; i++) own[i] = dgain[i], own[n + i] = dbias[i];
}

#define LAYER_NORM(T, W)                                                                                           \
    extern "C" __global__ __launch_bounds__(W == 8 ? 512 : 1024) void layer_norm_forward_##W(                      \
        T *y, float *stats, const T *x, const T *gain, const T *bias, u32 rows, u32 n, float eps) {                \
        layer_norm_forward<T, W>(y, stats, x, gain, bias, rows, n, eps);                                           \
    }                                                                                                              \
    extern "C" __global__ __launch_bounds__(W == 8 ? 512 : 1024) void layer_norm_backward_##W(                     \
        T *dx, float *partials, const T *dy, const T *x, const float *stats, const T *gain, u32 rows, u32 n) {     \
        layer_norm_backward<T, W>(dx, partials, dy, x, stats, gain, rows, n);                                      \
    }

LAYER_NORM(STORAGE, 8)
LAYER_NORM(STORAGE, 1)

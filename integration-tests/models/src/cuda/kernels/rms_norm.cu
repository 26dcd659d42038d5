// Division by the root of the mean square over the last axis, with gain (arXiv 1910.07467).
// Host version: src/ops/norm.rs.
//
// Shapes: x, y, dx, dy [rows, n] and gain [n] in T; stats [rows] fp32 hold 1 / rms; partials [blocks, n] fp32.
//
// A warp computes a row, as in layer_norm.cu, which has the columns of a lane. Variants: RMS_NORM below, repeated in
// src/cuda/norm.rs.
//
// forward reads x and writes y and stats: 2 rows n sizeof(T) bytes. Grid: a warp for each row.
// backward adds to dx and, unless `normed` is null, writes y again, with the bits of forward: reads dy, x, dx, writes
// dx and normed: 5 rows n sizeof(T) bytes. Unless `partials` is null, each warp sums the gradient of the gain over its
// rows in shared memory (blockDim.x / 32 * chunks * 32 W fp32), each block its warps; sum_partials (column_sums.cu) sums
// the blocks. The order depends only on the grid, which depends only on the sizes. Grid: any.

template <class T, int W, int CHUNKS>
__device__ __forceinline__ void rms_norm_forward(T *y, float *stats, const T *x, const T *gain, u32 rows, u32 n,
                                                 float eps) {
    // Wider rows are read twice, the second time from a cache, because registers do not hold them.
    constexpr bool KEEP = CHUNKS * sizeof(Columns<T, W>) <= 512;
    u64 row = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    x += row * n, y += row * n;
    Columns<T, W> kept[KEEP ? CHUNKS : 1];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (column<W>(i) >= n) continue;
        int at = KEEP ? i : 0;
        float v[W];
        kept[at].load(x + column<W>(i));
        kept[at].widen_to(v);
#pragma unroll
        for (int k = 0; k < W; k++) square = __fmaf_rn(v[k], v[k], square);
    }
    float scale = 1.0f / sqrtf(warp_sum(square) / n + eps);
    if (threadIdx.x % 32 == 0) stats[row] = scale;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 col = column<W>(i);
        if (col >= n) continue;
        int at = KEEP ? i : 0;
        float v[W], g[W];
        if constexpr (!KEEP) kept[at].load(x + col);
        kept[at].widen_to(v);
        load_columns<W>(gain + col, g);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = v[k] * scale * g[k];
        store_columns<W>(y + col, v);
    }
}

// With h = x / rms and g = dy gain: dx += (g - h mean(g h)) / rms.
template <class T, int W, int CHUNKS>
__device__ __forceinline__ void rms_norm_backward(T *dx, float *partials, T *normed, const T *dy, const T *x,
                                                  const float *stats, const T *gain, u32 rows, u32 n) {
    extern __shared__ float4 shared[];
    // As in forward.
    constexpr bool KEEP = W == 8 && CHUNKS <= 8;
    constexpr int KEPT = KEEP ? CHUNKS : 1;
    u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, padded = (n + 32 * W - 1) / (32 * W) * (32 * W);
    float *all = reinterpret_cast<float *>(shared), *own = all + warp * padded;
    for (u32 i = threadIdx.x % 32; partials && i < padded; i += 32) own[i] = 0.0f;
    __syncwarp();
    for (u64 row = (u64)blockIdx.x * warps + warp; row < rows; row += (u64)gridDim.x * warps) {
        const T *x_row = x + row * n, *dy_row = dy + row * n;
        T *dx_row = dx + row * n;
        Columns<T, W> kept_x[KEPT], kept_dy[KEPT], kept_dx[KEPT];
        float scale = stats[row], sum = 0.0f;
        if constexpr (KEEP) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                u32 col = column<W>(i);
                if (col < n) kept_x[i].load(x_row + col), kept_dy[i].load(dy_row + col), kept_dx[i].load(dx_row + col);
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 col = column<W>(i);
            if (col >= n) continue;
            int at = KEEP ? i : 0;
            if constexpr (!KEEP) kept_x[at].load(x_row + col), kept_dy[at].load(dy_row + col);
            float h[W], g[W], factor[W], dgain[W];
            kept_x[at].widen_to(h), kept_dy[at].widen_to(g);
            load_columns<W>(gain + col, factor);
#pragma unroll
            for (int k = 0; k < W; k++) {
                h[k] *= scale;
                dgain[k] = g[k] * h[k];
                sum = __fmaf_rn(dgain[k], factor[k], sum);
            }
            if (partials) add_to_chunk<W>(own + i * 32 * W, dgain);
            if (normed) {
#pragma unroll
                for (int k = 0; k < W; k++) h[k] *= factor[k];
                store_columns<W>(normed + row * n + col, h);
            }
        }
        float mean = warp_sum(sum) / n;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 col = column<W>(i);
            if (col >= n) continue;
            int at = KEEP ? i : 0;
            if constexpr (!KEEP)
                kept_x[at].load(x_row + col), kept_dy[at].load(dy_row + col), kept_dx[at].load(dx_row + col);
            float h[W], g[W], factor[W], after[W];
            kept_x[at].widen_to(h), kept_dy[at].widen_to(g), kept_dx[at].widen_to(after);
            load_columns<W>(gain + col, factor);
#pragma unroll
            for (int k = 0; k < W; k++)
                after[k] = __fmaf_rn(scale, g[k] * factor[k] - h[k] * scale * mean, after[k]);
            store_columns<W>(dx_row + col, after);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; partials && i < n; i += blockDim.x) {
        const float *place = all + place_in_chunks<W>(i);
        float sum = place[0];
        for (u32 w = 1; w < warps; w++) sum += place[w * padded];
        partials[(u64)blockIdx.x * n + i] = sum;
    }
}

#define RMS_NORM(T, W, CHUNKS, WARPS)                                                                                \
    extern "C" __global__ __launch_bounds__(128) void rms_norm_forward_##W##_##CHUNKS(                               \
        T *y, float *stats, const T *x, const T *gain, u32 rows, u32 n, float eps) {                                 \
        rms_norm_forward<T, W, CHUNKS>(y, stats, x, gain, rows, n, eps);                                             \
    }                                                                                                                \
    extern "C" __global__ __launch_bounds__(32 * WARPS) void rms_norm_backward_##W##_##CHUNKS(                       \
        T *dx, float *partials, T *normed, const T *dy, const T *x, const float *stats, const T *gain, u32 rows,     \
        u32 n) {                                                                                                     \
        rms_norm_backward<T, W, CHUNKS>(dx, partials, normed, dy, x, stats, gain, rows, n);                          \
    }

// Columns of a lane, its chunks, and the warps of a block of the backward pass: those whose sums fit 32 KiB.
RMS_NORM(STORAGE, 8, 4, 4)
RMS_NORM(STORAGE, 8, 8, 4)
RMS_NORM(STORAGE, 8, 16, 2)
RMS_NORM(STORAGE, 8, 32, 1)
RMS_NORM(STORAGE, 1, 32, 4)

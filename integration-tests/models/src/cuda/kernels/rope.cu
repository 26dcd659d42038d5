// Rotary position embedding (arXiv 2104.09864) of queries and keys in place, and the norms of their heads.
// Host versions: src/ops/rope.rs, src/ops/head_norm.rs.
//
// Shapes: qkv, dqkv [rows, width] in T, rows = batch * seq, of which the first `heads` heads of `d` elements are queries
// and keys, `queries` of them queries; table [seq, d] fp32, the cosines of a position's d / 2 angles, then their sines;
// starts [rows], or null: the position of a row of a sequence, of which the rows are seq tokens from `first` on, is its
// place in the sequence, less starts[row].
// raw [rows, heads, d], gains [2, d] in T of queries and of keys; stats [rows, heads] fp32 hold 1 / rms; partials
// [blocks, 2, d] fp32.
//
// rope: element i of a head is one coordinate of a pair, i + d / 2 the other. sign 1 rotates, -1 rotates back. A thread
// owns W pairs. Reads and writes 2 rows heads d sizeof(T) bytes. Grid: any.
// head_norm_forward: a warp copies a head to `raw`, divides it by its rms, times gain, and rotates it: 3 rows heads d
// sizeof(T) bytes. Grid: any, of warps.
// head_norm_backward: turns the gradient of the norms' output, which is rotated back already, into that of their input:
// 3 rows heads d sizeof(T) bytes. Unless `partials` is null, each warp sums the gradients of the gains over its heads,
// each block its warps; sum_partials (column_sums.cu) sums the blocks, in an order that depends only on the grid. Grid:
// any, of warps.

#define WARPS 8
// Pairs of a lane: heads of up to 256 elements.
#define PAIRS 4

__device__ __forceinline__ const float *angles_of(const float *table, const u32 *starts, u32 row, u32 seq, u32 first,
                                                    u32 d) {
    u32 position = first + row % seq;
    if (starts) position -= starts[row];
    return table + (u64)position * d;
}

template <class T, int W>
__device__ __forceinline__ void rope(T *qkv, const float *table, const u32 *starts, u32 rows, u32 seq, u32 first,
                                     u32 width, u32 heads, u32 d, float sign) {
    u32 groups = d / 2 / W;
    u64 count = (u64)rows * heads * groups;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 col = (u32)(i % groups) * W;
        u32 head = (u32)(i / groups % heads), row = (u32)(i / groups / heads);
        const float *angles = angles_of(table, starts, row, seq, first, d) + col;
        T *place = qkv + (u64)row * width + head * d + col;
        float a[W], b[W], c[W], s[W], x[W], y[W];
        load_columns<W>(angles, c), load_columns<W>(angles + d / 2, s);
        load_columns<W>(place, a), load_columns<W>(place + d / 2, b);
#pragma unroll
        for (int k = 0; k < W; k++) {
            float sin = sign * s[k];
            x[k] = a[k] * c[k] - b[k] * sin;
            y[k] = b[k] * c[k] + a[k] * sin;
        }
        store_columns<W>(place, x), store_columns<W>(place + d / 2, y);
    }
}

#define ROPE(T, W)                                                                                                  \
    extern "C" __global__ __launch_bounds__(THREADS) void rope_##W(T *qkv, const float *table, const u32 *starts,   \
                                                                   u32 rows, u32 seq, u32 first, u32 width,         \
                                                                   u32 heads, u32 d, float sign) {                  \
        rope<T, W>(qkv, table, starts, rows, seq, first, width, heads, d, sign);                                    \
    }

ROPE(STORAGE, 8)
ROPE(STORAGE, 1)

extern "C" __global__ __launch_bounds__(32 * WARPS) void head_norm_forward(STORAGE *qkv, STORAGE *raw, float *stats,
                                                                           const STORAGE *gains, const float *table,
                                                                           const u32 *starts, u32 rows, u32 seq,
                                                                           u32 first, u32 width, u32 heads, u32 queries,
                                                                           u32 d, float eps) {
    u32 lane = threadIdx.x % 32, half = d / 2;
    u64 count = (u64)rows * heads;
    for (u64 i = (u64)blockIdx.x * WARPS + threadIdx.x / 32; i < count; i += (u64)gridDim.x * WARPS) {
        u32 row = (u32)(i / heads), head = (u32)(i % heads);
        const float *angles = angles_of(table, starts, row, seq, first, d);
        const STORAGE *gain = gains + (head < queries ? 0 : d);
        STORAGE *place = qkv + (u64)row * width + head * d, *copy = raw + i * d;
        float a[PAIRS], b[PAIRS], square = 0.0f;
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            u32 col = lane + 32 * k;
            if (col >= half) continue;
            STORAGE left = place[col], right = place[col + half];
            copy[col] = left, copy[col + half] = right;
            a[k] = widen(left), b[k] = widen(right);
            square = __fmaf_rn(a[k], a[k], __fmaf_rn(b[k], b[k], square));
        }
        float scale = 1.0f / sqrtf(warp_sum(square) / d + eps);
        if (lane == 0) stats[i] = scale;
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            u32 col = lane + 32 * k;
            if (col >= half) continue;
            float x = a[k] * scale * widen(gain[col]), y = b[k] * scale * widen(gain[col + half]);
            float cos = angles[col], sin = angles[col + half];
            place[col] = narrow<STORAGE>(x * cos - y * sin);
            place[col + half] = narrow<STORAGE>(y * cos + x * sin);
        }
    }
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void head_norm_backward(STORAGE *dqkv, float *partials,
                                                                            const STORAGE *raw, const float *stats,
                                                                            const STORAGE *gains, u32 rows, u32 width,
                                                                            u32 heads, u32 queries, u32 d) {
    __shared__ float sums[WARPS][2 * 64 * PAIRS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *own = sums[warp];
    for (u32 i = lane; i < 2 * d; i += 32) own[i] = 0.0f;
    __syncwarp();
    u64 count = (u64)rows * heads;
    for (u64 i = (u64)blockIdx.x * WARPS + warp; i < count; i += (u64)gridDim.x * WARPS) {
        u32 row = (u32)(i / heads), head = (u32)(i % heads), of = head < queries ? 0 : d;
        STORAGE *place = dqkv + (u64)row * width + head * d;
        float scale = stats[i], h[2 * PAIRS], g[2 * PAIRS], sum = 0.0f;
#pragma unroll
        for (int k = 0; k < 2 * PAIRS; k++) {
            u32 col = lane + 32 * k;
            if (col >= d) continue;
            h[k] = widen(raw[i * d + col]) * scale;
            g[k] = widen(place[col]);
            // A lane's columns are its own.
            if (partials) own[of + col] += g[k] * h[k];
            g[k] *= widen(gains[of + col]);
            sum = __fmaf_rn(g[k], h[k], sum);
        }
        float mean = warp_sum(sum) / d;
#pragma unroll
        for (int k = 0; k < 2 * PAIRS; k++) {
            u32 col = lane + 32 * k;
            if (col < d) place[col] = narrow<STORAGE>(scale * (g[k] - h[k] * mean));
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; partials && i < 2 * d; i += 32 * WARPS) {
        float sum = sums[0][i];
        for (u32 w = 1; w < WARPS; w++) sum += sums[w][i];
        partials[(u64)blockIdx.x * 2 * d + i] = sum;
    }
}

// Causal attention of several heads on CUDA cores: for fp32, and for head dimensions and devices that attention.cu
// does not support. Shapes, `lse`, `scale` and `slope` as in attention.cu; D is `d`, at most 8 COLUMNS.
//
// A block of 256 threads computes tiles of 32 x 32 scores in shared memory, always in fp32. Thread t owns the columns
// t % 8 + 8 i of the block's row t / 8. The 8 threads of a row are in one warp.
// Grid: (ceil(seq / 32), heads, batch). Shared memory: tiles of 32 x (d + 1) fp32: 3 in forward, 4 in backward.

#define TILE 32
#define PER_ROW 8

struct Head {
    u64 qkv;
    u64 out;
    u64 row;
    u32 c;
    u32 d;
};

__device__ __forceinline__ Head this_head(u32 seq, u32 heads, u32 d) {
    u64 h = blockIdx.y, b = blockIdx.z, c = (u64)heads * d;
    return {b * seq * 3 * c + h * d, b * seq * c + h * d, (b * heads + h) * seq, heads * d, d};
}

// Copies rows from `first` on of a [seq, d] part, whose rows are `stride` elements apart, widened to fp32; zeros
// behind the last row.
template <class T>
__device__ __forceinline__ void fill_tile(float *tile, const T *source, u32 first, u32 seq, u32 stride, u32 d) {
    for (u32 i = threadIdx.x; i < TILE * d; i += THREADS) {
        u32 row = i / d, col = i % d;
        tile[row * (d + 1) + col] = first + row < seq ? widen(source[(u64)(first + row) * stride + col]) : 0.0f;
    }
}

// s[i] = row `row` of `left` times row `lane + 8 i` of `right`.
__device__ __forceinline__ void products(float (&s)[TILE / PER_ROW], const float *left, const float *right, u32 row,
                                         u32 lane, u32 d) {
#pragma unroll
    for (int i = 0; i < TILE / PER_ROW; i++) s[i] = 0.0f;
    for (u32 k = 0; k < d; k++) {
        float a = left[row * (d + 1) + k];
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++)
            s[i] = __fmaf_rn(a, right[(lane + PER_ROW * i) * (d + 1) + k], s[i]);
    }
}

// sum[i] += row `row` of `weights` [TILE, TILE] times column `lane + 8 i` of `right`.
template <int COLUMNS>
__device__ __forceinline__ void add_weighted(float (&sum)[COLUMNS], const float (*weights)[TILE + 1],
                                             const float *right, u32 row, u32 lane, u32 d) {
    for (u32 j = 0; j < TILE; j++) {
        float w = weights[row][j];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
            if (lane + PER_ROW * i < d) sum[i] = __fmaf_rn(w, right[j * (d + 1) + lane + PER_ROW * i], sum[i]);
    }
}

template <class T, int COLUMNS>
__device__ __forceinline__ void store_row(T *out, const float (&sum)[COLUMNS], float factor, u32 lane, u32 d) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (lane + PER_ROW * i < d) out[lane + PER_ROW * i] = narrow<T>(sum[i] * factor);
}

template <class T, int COLUMNS>
__device__ __forceinline__ void plain_forward(T *out, float *lse, const T *qkv, u32 seq, u32 heads, u32 d,
                                              float scale) {
    extern __shared__ float tiles[];
    __shared__ float probs[TILE][TILE + 1];
    float *queries = tiles, *keys = queries + TILE * (d + 1), *values = keys + TILE * (d + 1);
    Head head = this_head(seq, heads, d);
    const T *q = qkv + head.qkv, *k = q + head.c, *v = k + head.c;
    u32 row = threadIdx.x / PER_ROW, lane = threadIdx.x % PER_ROW;
    u32 tile = gridDim.x - 1 - blockIdx.x, first = tile * TILE;
    fill_tile(queries, q, first, seq, 3 * head.c, d);
    float sum[COLUMNS] = {}, peak = minus_infinity(), total = 0.0f;
    for (u32 j = 0; j <= tile; j++) {
        __syncthreads();
        fill_tile(keys, k, j * TILE, seq, 3 * head.c, d);
        fill_tile(values, v, j * TILE, seq, 3 * head.c, d);
        __syncthreads();
        float s[TILE / PER_ROW], max = peak;
        products(s, queries, keys, row, lane, d);
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            if (j * TILE + lane + PER_ROW * i > first + row) s[i] = minus_infinity();
            max = fmaxf(max, s[i]);
        }
#pragma unroll
        for (int half = PER_ROW / 2; half > 0; half /= 2) max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, half));
        float shrink = exp2_fast((peak - max) * scale);
        peak = max;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) sum[i] *= shrink;
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            float p = exp2_fast((s[i] - max) * scale);
            total += p;
            probs[row][lane + PER_ROW * i] = p;
        }
        __syncwarp();
        add_weighted<COLUMNS>(sum, probs, values, row, lane, d);
    }
#pragma unroll
    for (int half = PER_ROW / 2; half > 0; half /= 2) total += __shfl_xor_sync(ALL_LANES, total, half);
    if (first + row >= seq) return;
    if (lane == 0) lse[head.row + first + row] = __fmaf_rn(peak, scale, log2f(total));
    store_row(out + head.out + (u64)(first + row) * head.c, sum, 1.0f / total, lane, d);
}

template <class T, int COLUMNS>
__device__ __forceinline__ void plain_backward_dq(T *dqkv, float *delta, const T *dout, const T *qkv, const T *out,
                                                  const float *lse, u32 seq, u32 heads, u32 d, float scale,
                                                  float slope) {
    extern __shared__ float tiles[];
    __shared__ float dscores[TILE][TILE + 1];
    u32 tile_elems = TILE * (d + 1);
    float *queries = tiles, *douts = queries + tile_elems, *keys = douts + tile_elems, *values = keys + tile_elems;
    Head head = this_head(seq, heads, d);
    const T *q = qkv + head.qkv, *k = q + head.c, *v = k + head.c;
    u32 row = threadIdx.x / PER_ROW, lane = threadIdx.x % PER_ROW;
    u32 tile = gridDim.x - 1 - blockIdx.x, first = tile * TILE, from = min(first + row, seq - 1);
    fill_tile(queries, q, first, seq, 3 * head.c, d);
    fill_tile(douts, dout + head.out, first, seq, head.c, d);
    float less = 0.0f, top = lse[head.row + from];
    for (u32 col = lane; col < d; col += PER_ROW) {
        u64 at = head.out + (u64)from * head.c + col;
        less = __fmaf_rn(widen(out[at]), widen(dout[at]), less);
    }
#pragma unroll
    for (int half = PER_ROW / 2; half > 0; half /= 2) less += __shfl_xor_sync(ALL_LANES, less, half);
    if (lane == 0 && first + row < seq) delta[head.row + first + row] = less;
    float sum[COLUMNS] = {};
    for (u32 j = 0; j <= tile; j++) {
        __syncthreads();
        fill_tile(keys, k, j * TILE, seq, 3 * head.c, d);
        fill_tile(values, v, j * TILE, seq, 3 * head.c, d);
        __syncthreads();
        float s[TILE / PER_ROW], dp[TILE / PER_ROW];
        products(s, queries, keys, row, lane, d);
        products(dp, douts, values, row, lane, d);
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            u32 col = lane + PER_ROW * i;
            float p = j * TILE + col > first + row ? 0.0f : exp2_fast(__fmaf_rn(s[i], scale, -top));
            dscores[row][col] = p * (dp[i] - less);
        }
        __syncwarp();
        add_weighted<COLUMNS>(sum, dscores, keys, row, lane, d);
    }
    if (first + row < seq) store_row(dqkv + head.qkv + (u64)(first + row) * 3 * head.c, sum, slope, lane, d);
}

template <class T, int COLUMNS>
__device__ __forceinline__ void plain_backward_dkv(T *dqkv, const T *dout, const T *qkv, const float *lse,
                                                   const float *delta, u32 seq, u32 heads, u32 d, float scale,
                                                   float slope) {
    extern __shared__ float tiles[];
    __shared__ float probs[TILE][TILE + 1], dscores[TILE][TILE + 1];
    u32 tile_elems = TILE * (d + 1);
    float *keys = tiles, *values = keys + tile_elems, *queries = values + tile_elems, *douts = queries + tile_elems;
    Head head = this_head(seq, heads, d);
    const T *q = qkv + head.qkv, *k = q + head.c, *v = k + head.c;
    u32 row = threadIdx.x / PER_ROW, lane = threadIdx.x % PER_ROW;
    u32 first = blockIdx.x * TILE;
    fill_tile(keys, k, first, seq, 3 * head.c, d);
    fill_tile(values, v, first, seq, 3 * head.c, d);
    float dk[COLUMNS] = {}, dv[COLUMNS] = {};
    for (u32 j = blockIdx.x; j < gridDim.x; j++) {
        __syncthreads();
        fill_tile(queries, q, j * TILE, seq, 3 * head.c, d);
        fill_tile(douts, dout + head.out, j * TILE, seq, head.c, d);
        __syncthreads();
        float s[TILE / PER_ROW], dp[TILE / PER_ROW];
        products(s, keys, queries, row, lane, d);
        products(dp, values, douts, row, lane, d);
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            u32 col = lane + PER_ROW * i, query = j * TILE + col;
            float p = 0.0f, ds = 0.0f;
            if (first + row <= query && query < seq) {
                p = exp2_fast(__fmaf_rn(s[i], scale, -lse[head.row + query]));
                ds = p * (dp[i] - delta[head.row + query]);
            }
            probs[row][col] = p;
            dscores[row][col] = ds;
        }
        __syncwarp();
        add_weighted<COLUMNS>(dv, probs, douts, row, lane, d);
        add_weighted<COLUMNS>(dk, dscores, queries, row, lane, d);
    }
    if (first + row >= seq) return;
    T *place = dqkv + head.qkv + (u64)(first + row) * 3 * head.c + head.c;
    store_row(place, dk, slope, lane, d);
    store_row(place + head.c, dv, 1.0f, lane, d);
}

#define PLAIN(T, COLUMNS)                                                                                           \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void plain_forward_##COLUMNS(                            \
        T *out, float *lse, const T *qkv, u32 seq, u32 heads, u32 d, float scale) {                                 \
        plain_forward<T, COLUMNS>(out, lse, qkv, seq, heads, d, scale);                                             \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void plain_backward_dq_##COLUMNS(                        \
        T *dqkv, float *delta, const T *dout, const T *qkv, const T *out, const float *lse, u32 seq, u32 heads,     \
        u32 d, float scale, float slope) {                                                                          \
        plain_backward_dq<T, COLUMNS>(dqkv, delta, dout, qkv, out, lse, seq, heads, d, scale, slope);               \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void plain_backward_dkv_##COLUMNS(                       \
        T *dqkv, const T *dout, const T *qkv, const float *lse, const float *delta, u32 seq, u32 heads, u32 d,      \
        float scale, float slope) {                                                                                 \
        plain_backward_dkv<T, COLUMNS>(dqkv, dout, qkv, lse, delta, seq, heads, d, scale, slope);                   \
    }

PLAIN(STORAGE, 8)
PLAIN(STORAGE, 32)

// Causal attention of several heads on CUDA cores: for fp32, and for head dimensions and devices that attention.cu
// does not support. Shapes, `starts`, `window`, `lse`, `scale` and `slope` as in attention.cu; D is `d`, at most 8
// COLUMNS. Gradients are not rotated back. If `draw_keys` is not null, probabilities are multiplied by the factors of a
// dropout, with the lines of attention.cu.
//
// A block of 256 threads computes tiles of 32 x 32 scores in shared memory, always in fp32. Thread t owns the columns
// t % 8 + 8 i of the block's row t / 8. The 8 threads of a row are in one warp.
// Grid: (ceil(seq / 32), heads, batch), kv_heads in backward_dkv. Shared memory: tiles of 32 x (d + 1) fp32: 3 in forward, 4 in backward.

#define TILE 32
#define PER_ROW 8

struct Head {
    u64 q;
    u64 k;
    u64 v;
    u64 out;
    u64 row;
    u32 width;
    u32 c;
};

// Head `h` of the queries, and head `kv` of keys and values.
__device__ __forceinline__ Head head_of(u32 h, u32 kv, u32 seq, u32 heads, u32 kv_heads, u32 d) {
    u64 b = blockIdx.z;
    u32 width = (heads + 2 * kv_heads) * d;
    u64 q = b * seq * width, k = q + (heads + kv) * d;
    return {q + h * d, k, k + kv_heads * d, (b * seq * heads + h) * d, (b * heads + h) * seq, width, heads * d};
}

// The first key that a query attends to. `starts` is this batch's, or null.
__device__ __forceinline__ u32 first_key(const u32 *starts, u32 window, u32 query) {
    u32 key = query >= window ? query - window + 1 : 0;
    return starts ? max(key, starts[query]) : key;
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
// Otherwise backward_dq would spill registers there.
#if __CUDA_ARCH__ >= 1000
#pragma unroll 4
#endif
    for (u32 j = 0; j < TILE; j++) {
        float w = weights[row][j];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
            if (lane + PER_ROW * i < d) sum[i] = __fmaf_rn(w, right[j * (d + 1) + lane + PER_ROW * i], sum[i]);
    }
}

// Bit 4 i + word is set if a thread keeps its probability i, whose key is the `word`-th of a group of four. Four lanes
// of a warp that differ by `apart` and 2 `apart` only have the words 0 to 3 of the same groups, of which each draws one:
// group(word).
template <class Group> __device__ __forceinline__ u32 draw_four(u32 word, u32 apart, Group group) {
    u32 all = group(word) << 4 * word;
    all |= __shfl_xor_sync(ALL_LANES, all, apart);
    all |= __shfl_xor_sync(ALL_LANES, all, 2 * apart);
    return all >> word;
}

template <class T, int COLUMNS>
__device__ __forceinline__ void store_row(T *out, const float (&sum)[COLUMNS], float factor, u32 lane, u32 d) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (lane + PER_ROW * i < d) out[lane + PER_ROW * i] = narrow<T>(sum[i] * factor);
}

template <class T, int COLUMNS>
__device__ __forceinline__ void plain_forward(T *out, float *lse, const T *qkv, const u32 *starts,
                                              const u32 *draw_keys, Dropout dropout, u32 seq, u32 heads, u32 kv_heads,
                                              u32 d, u32 window, float scale) {
    extern __shared__ float tiles[];
    __shared__ float probs[TILE][TILE + 1];
    float *queries = tiles, *keys = queries + TILE * (d + 1), *values = keys + TILE * (d + 1);
    Head head = head_of(blockIdx.y, blockIdx.y / (heads / kv_heads), seq, heads, kv_heads, d);
    const T *q = qkv + head.q, *k = qkv + head.k, *v = qkv + head.v;
    u32 row = threadIdx.x / PER_ROW, lane = threadIdx.x % PER_ROW;
    u32 tile = gridDim.x - 1 - blockIdx.x, first = tile * TILE;
    if (starts) starts += (u64)blockIdx.z * seq;
    u32 low = first_key(starts, window, min(first + row, seq - 1));
    fill_tile(queries, q, first, seq, head.width, d);
    float sum[COLUMNS] = {}, peak = NO_PEAK, total = 0.0f;
    for (u32 j = first_key(starts, window, first) / TILE; j <= tile; j++) {
        __syncthreads();
        fill_tile(keys, k, j * TILE, seq, head.width, d);
        fill_tile(values, v, j * TILE, seq, head.width, d);
        __syncthreads();
        float s[TILE / PER_ROW], max = peak;
        products(s, queries, keys, row, lane, d);
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            u32 key = j * TILE + lane + PER_ROW * i;
            if (key > first + row || key < low) s[i] = minus_infinity();
            max = fmaxf(max, s[i]);
        }
#pragma unroll
        for (int half = PER_ROW / 2; half > 0; half /= 2) max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, half));
        u32 kept = ~0u;
        if (draw_keys)
            kept = draw_four(lane % 4, 1, [&](u32 i) {
                u32 line = blockIdx.y * seq + first + row, keys_of_four = (j * TILE + PER_ROW * i) / 4 + lane / 4;
                return Draw(draw_keys, dropout, blockIdx.z).kept(line, keys_of_four);
            });
        float shrink = exp2_fast((peak - max) * scale);
        peak = max;
        total *= shrink;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) sum[i] *= shrink;
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            float p = exp2_fast((s[i] - max) * scale);
            total += p;
            probs[row][lane + PER_ROW * i] = kept >> 4 * i & 1 ? p : 0.0f;
        }
        __syncwarp();
        add_weighted<COLUMNS>(sum, probs, values, row, lane, d);
    }
#pragma unroll
    for (int half = PER_ROW / 2; half > 0; half /= 2) total += __shfl_xor_sync(ALL_LANES, total, half);
    if (first + row >= seq) return;
    if (lane == 0) lse[head.row + first + row] = __fmaf_rn(peak, scale, log2f(total));
    store_row(out + head.out + (u64)(first + row) * head.c, sum, (draw_keys ? dropout.factor : 1.0f) / total, lane, d);
}

template <class T, int COLUMNS>
__device__ __forceinline__ void plain_backward_dq(T *dqkv, float *delta, const T *dout, const T *qkv, const T *out,
                                                  const float *lse, const u32 *starts, const u32 *draw_keys,
                                                  Dropout dropout, u32 seq, u32 heads, u32 kv_heads, u32 d,
                                                  u32 window, float scale, float slope) {
    extern __shared__ float tiles[];
    __shared__ float dscores[TILE][TILE + 1];
    __shared__ u32 lows[TILE];
    u32 tile_elems = TILE * (d + 1);
    float *queries = tiles, *douts = queries + tile_elems, *keys = douts + tile_elems, *values = keys + tile_elems;
    Head head = head_of(blockIdx.y, blockIdx.y / (heads / kv_heads), seq, heads, kv_heads, d);
    u32 row = threadIdx.x / PER_ROW, lane = threadIdx.x % PER_ROW;
    u32 tile = gridDim.x - 1 - blockIdx.x, first = tile * TILE, from = min(first + row, seq - 1);
    if (starts) starts += (u64)blockIdx.z * seq;
    fill_tile(queries, qkv + head.q, first, seq, head.width, d);
    fill_tile(douts, dout + head.out, first, seq, head.c, d);
    float less = 0.0f, top = lse[head.row + from];
    for (u32 col = lane; col < d; col += PER_ROW) {
        u64 at = head.out + (u64)from * head.c + col;
        less = __fmaf_rn(widen(out[at]), widen(dout[at]), less);
    }
#pragma unroll
    for (int half = PER_ROW / 2; half > 0; half /= 2) less += __shfl_xor_sync(ALL_LANES, less, half);
    if (lane == 0 && first + row < seq) delta[head.row + first + row] = less;
    if (lane == 0) lows[row] = first_key(starts, window, from);
    float sum[COLUMNS] = {};
    for (u32 j = first_key(starts, window, first) / TILE; j <= tile; j++) {
        __syncthreads();
        fill_tile(keys, qkv + head.k, j * TILE, seq, head.width, d);
        fill_tile(values, qkv + head.v, j * TILE, seq, head.width, d);
        __syncthreads();
        float s[TILE / PER_ROW], dp[TILE / PER_ROW];
        products(s, queries, keys, row, lane, d);
        products(dp, douts, values, row, lane, d);
        if (draw_keys) {
            u32 kept = draw_four(lane % 4, 1, [&](u32 i) {
                u32 line = blockIdx.y * seq + first + row, keys_of_four = (j * TILE + PER_ROW * i) / 4 + lane / 4;
                return Draw(draw_keys, dropout, blockIdx.z).kept(line, keys_of_four);
            });
#pragma unroll
            for (int i = 0; i < TILE / PER_ROW; i++) dp[i] *= kept >> 4 * i & 1 ? dropout.factor : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            u32 col = lane + PER_ROW * i, key = j * TILE + col;
            float p = key > first + row || key < lows[row] ? 0.0f : exp2_fast(__fmaf_rn(s[i], scale, -top));
            dscores[row][col] = p * (dp[i] - less);
        }
        __syncwarp();
        add_weighted<COLUMNS>(sum, dscores, keys, row, lane, d);
    }
    if (first + row < seq) store_row(dqkv + head.q + (u64)(first + row) * head.width, sum, slope, lane, d);
}

template <class T, int COLUMNS>
__device__ __forceinline__ void plain_backward_dkv(T *dqkv, const T *dout, const T *qkv, const float *lse,
                                                   const float *delta, const u32 *starts, const u32 *draw_keys,
                                                   Dropout dropout, u32 seq, u32 heads, u32 kv_heads, u32 d,
                                                   u32 window, float scale, float slope) {
    extern __shared__ float tiles[];
    __shared__ float probs[TILE][TILE + 1], dscores[TILE][TILE + 1];
    u32 tile_elems = TILE * (d + 1);
    float *keys = tiles, *values = keys + tile_elems, *queries = values + tile_elems, *douts = queries + tile_elems;
    u32 group = heads / kv_heads;
    Head head = head_of(blockIdx.y * group, blockIdx.y, seq, heads, kv_heads, d);
    u32 row = threadIdx.x / PER_ROW, lane = threadIdx.x % PER_ROW;
    u32 first = blockIdx.x * TILE, last = min(first + TILE, seq) - 1;
    if (starts) starts += (u64)blockIdx.z * seq;
    fill_tile(keys, qkv + head.k, first, seq, head.width, d);
    fill_tile(values, qkv + head.v, first, seq, head.width, d);
    float dk[COLUMNS] = {}, dv[COLUMNS] = {};
    for (u32 i = 0; i < group * (gridDim.x - blockIdx.x); i++) {
        u32 h = i / (gridDim.x - blockIdx.x), j = blockIdx.x + i % (gridDim.x - blockIdx.x);
        // Skips queries whose first key is behind the block.
        if (first_key(starts, window, j * TILE) > last) continue;
        u64 stats = head.row + (u64)h * seq;
        __syncthreads();
        fill_tile(queries, qkv + head.q + h * d, j * TILE, seq, head.width, d);
        fill_tile(douts, dout + head.out + h * d, j * TILE, seq, head.c, d);
        __syncthreads();
        float s[TILE / PER_ROW], dp[TILE / PER_ROW];
        products(s, keys, queries, row, lane, d);
        products(dp, values, douts, row, lane, d);
        u32 kept = ~0u;
        if (draw_keys)
            kept = draw_four(row % 4, PER_ROW, [&](u32 i) {
                u32 line = (blockIdx.y * group + h) * seq + j * TILE + lane + PER_ROW * i;
                return Draw(draw_keys, dropout, blockIdx.z).kept(line, (first + row) / 4);
            });
        float factor = draw_keys ? dropout.factor : 1.0f;
#pragma unroll
        for (int i = 0; i < TILE / PER_ROW; i++) {
            u32 col = lane + PER_ROW * i, query = j * TILE + col;
            float p = 0.0f, ds = 0.0f;
            if (first + row <= query && query < seq && first + row >= first_key(starts, window, query)) {
                p = exp2_fast(__fmaf_rn(s[i], scale, -lse[stats + query]));
                float keep = kept >> 4 * i & 1 ? factor : 0.0f;
                ds = p * (dp[i] * keep - delta[stats + query]);
                p *= keep;
            }
            probs[row][col] = p;
            dscores[row][col] = ds;
        }
        __syncwarp();
        add_weighted<COLUMNS>(dv, probs, douts, row, lane, d);
        add_weighted<COLUMNS>(dk, dscores, queries, row, lane, d);
    }
    if (first + row >= seq) return;
    u64 place = (u64)(first + row) * head.width;
    store_row(dqkv + head.k + place, dk, slope, lane, d);
    store_row(dqkv + head.v + place, dv, 1.0f, lane, d);
}

#define PLAIN(T, COLUMNS)                                                                                           \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void plain_forward_##COLUMNS(                               \
        T *out, float *lse, const T *qkv, const u32 *starts, const u32 *draw_keys, Dropout dropout, u32 seq,        \
        u32 heads, u32 kv_heads, u32 d, u32 window, float scale) {                                                  \
        plain_forward<T, COLUMNS>(out, lse, qkv, starts, draw_keys, dropout, seq, heads, kv_heads, d, window,       \
                                  scale);                                                                           \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void plain_backward_dq_##COLUMNS(                           \
        T *dqkv, float *delta, const T *dout, const T *qkv, const T *out, const float *lse, const u32 *starts,      \
        const u32 *draw_keys, Dropout dropout, u32 seq, u32 heads, u32 kv_heads, u32 d, u32 window, float scale,    \
        float slope) {                                                                                              \
        plain_backward_dq<T, COLUMNS>(dqkv, delta, dout, qkv, out, lse, starts, draw_keys, dropout, seq, heads,     \
                                      kv_heads, d, window, scale, slope);                                           \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void plain_backward_dkv_##COLUMNS(                          \
        T *dqkv, const T *dout, const T *qkv, const float *lse, const float *delta, const u32 *starts,              \
        const u32 *draw_keys, Dropout dropout, u32 seq, u32 heads, u32 kv_heads, u32 d, u32 window, float scale,    \
        float slope) {                                                                                              \
        plain_backward_dkv<T, COLUMNS>(dqkv, dout, qkv, lse, delta, starts, draw_keys, dropout, seq, heads,         \
                                       kv_heads, d, window, scale, slope);                                          \
    }

PLAIN(STORAGE, 8)
PLAIN(STORAGE, 32)

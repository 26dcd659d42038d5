// Causal attention of several heads on tensor cores, for 16-bit elements and head dimensions 32, 64 and 128: the
// algorithm of FlashAttention-2 (arXiv 2307.08691), without a T x T matrix in memory. Requires sm_80.
// Host version: src/ops/attention.rs.
//
// Shapes: qkv, dqkv [batch, seq, 3, heads, D]; out, dout [batch, seq, heads, D]; lse, delta [batch, heads, seq] fp32.
// `lse` is log2 of the sum of 2^(score log2 e): base 2, so that an exponential is one instruction. `scale` is
// log2 e / sqrt(D), for the exponents of 2; `slope` is 1 / sqrt(D), for the gradients of q and k.
//
// A block has WARPS warps of 16 ROW_TILES rows each. Its rows and their results stay in registers, as far as those
// suffice; the rows that it iterates over pass through shared memory in two alternating stages: wait for a stage, one
// barrier, start the copy of the next. Grid: (tiles of rows, heads, batch), the tiles with the most work first.
//
// forward: a block owns query rows and iterates over the keys up to the diagonal; online softmax; writes out and lse.
//   Reads q, k, v and writes out once: 8 batch seq heads D bytes. Other blocks read keys and values again, from the
//   level-2 cache.
// backward_dq: as forward; computes delta = rowsum(out dout) and writes it for backward_dkv.
// backward_dkv: a block owns keys and values and iterates over the queries from the diagonal on.
//   The two kernels share no sum, so there are no atomics and the order of every sum is fixed. The cost: scores and
//   their gradients are computed twice, 7 products instead of 5.
// Both backward kernels also sum the rows that they store, for the gradient of the bias of qkv: partials [batch, tiles,
// 3, heads, D] fp32, one row for each tile of rows, which sum_partials (column_sums.cu) sums.

// Offset of the queries of (batch, head). Keys are heads * D elements behind them, values another heads * D.
struct Head {
    u64 qkv;
    u64 out;
    u64 row;
    u32 qkv_stride;
    u32 out_stride;
};

template <int D> DEVICE Head this_head(u32 seq, u32 heads) {
    u64 h = blockIdx.y, b = blockIdx.z;
    u32 c = heads * D;
    return {b * seq * 3 * c + h * D, b * seq * c + h * D, (b * heads + h) * seq, 3 * c, c};
}

// The place of this block's sums over its rows of q, which are row `tile` of this batch.
template <int D> DEVICE float *partials_of(float *partials, u32 tile, u32 heads) {
    return partials + ((u64)blockIdx.z * gridDim.x + tile) * 3 * heads * D + blockIdx.y * D;
}

template <int TILES, int N> DEVICE void clear(float (&x)[TILES][N][4]) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[t][n][i] = 0.0f;
}

// 16 TILES rows of a tile as left operands. The first KEPT parts of 16 columns stay in registers, the others are loaded
// for each product.
template <class T, int D, int TILES, int KEPT> struct Rows {
    const T *tile;
    u32 row;
    u32 kept[KEPT > 0 ? KEPT : 1][TILES][4];

    DEVICE Rows(const T *tile, u32 row) : tile(tile), row(row) {
#pragma unroll
        for (int k = 0; k < KEPT; k++)
#pragma unroll
            for (int t = 0; t < TILES; t++) load_left<D>(kept[k][t], tile, row + 16 * t, k);
    }

    DEVICE void part(u32 (&a)[TILES][4], int k) const {
#pragma unroll
        for (int t = 0; t < TILES; t++)
            if (k < KEPT) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[t][i] = kept[k < KEPT ? k : 0][t][i];
            } else {
                load_left<D>(a[t], tile, row + 16 * t, k);
            }
    }
};

// c += A B^T over D columns: A is `left`, B the COLS rows of `right`. Each part of B is read once for all tiles,
// because reading it for each tile would make shared memory slower than the tensor cores.
template <class T, int D, int COLS, int TILES, int KEPT>
DEVICE void multiply_rows(float (&c)[TILES][COLS / 8][4], const Rows<T, D, TILES, KEPT> &left, const T *right) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 a[TILES][4], b[4];
        left.part(a, k);
#pragma unroll
        for (int n = 0; n < COLS / 16; n++) {
            load_right_of_rows<D>(b, right, 16 * n, k);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                multiply<T>(c[t][2 * n], a[t], b[0], b[1]);
                multiply<T>(c[t][2 * n + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// c += S X: S is the sums of 16 TILES rows and DEPTH columns, rounded to T, X the DEPTH rows of `right`.
template <class T, int D, int DEPTH, int TILES>
DEVICE void multiply_sums(float (&c)[TILES][D / 8][4], const float (&s)[TILES][DEPTH / 8][4], const T *right) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        u32 a[TILES][4], b[4];
#pragma unroll
        for (int t = 0; t < TILES; t++) left_of_sums<T>(a[t], s[t], k);
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            load_right<D>(b, right, 16 * k, n);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                multiply<T>(c[t][2 * n], a[t], b[0], b[1]);
                multiply<T>(c[t][2 * n + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// Sets the sums for which `hidden(row, column)` holds to -inf, whose power of 2 is 0. Row and column are relative to
// the warp's first.
template <int TILES, int N, class Hidden> DEVICE void hide(float (&s)[TILES][N][4], Hidden hidden) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (hidden(16 * t + lane / 4 + i / 2 * 8, 8 * n + lane % 4 * 2 + i % 2)) s[t][n][i] = minus_infinity();
}

// Starts copying the keys and values of block `j` into its stage.
template <class T, int D, int KEYS, int WARPS>
DEVICE void start_stage(T *keys, T *values, const T *k, const T *v, u32 j, u32 seq, u32 stride) {
    u32 stage = j % 2 * KEYS * D;
    copy_tile<D, KEYS, WARPS>(keys + stage, k, j * KEYS, seq, stride);
    copy_tile<D, KEYS, WARPS>(values + stage, v, j * KEYS, seq, stride);
    copies_are_one_group();
}

// Waits for the copy of a stage. No warp reads the other stage after this, so that its next copy may start: one barrier
// for each iteration.
DEVICE void wait_for_stage() {
    wait_for_copies<0>();
    __syncthreads();
}

template <class T, int D, int ROW_TILES, int WARPS, int KEYS>
DEVICE void flash_forward(T *out, float *lse, const T *qkv, u32 seq, u32 heads, float scale) {
    constexpr int ROWS = 16 * ROW_TILES * WARPS;
    extern __shared__ uint4 shared[];
    T *queries = reinterpret_cast<T *>(shared), *keys = queries + ROWS * D, *values = keys + 2 * KEYS * D;
    Head head = this_head<D>(seq, heads);
    const T *q = qkv + head.qkv, *k = q + heads * D, *v = k + heads * D;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 first = (gridDim.x - 1 - blockIdx.x) * ROWS, own = warp * 16 * ROW_TILES;
    u32 blocks = (min(first + ROWS, seq) + KEYS - 1) / KEYS;
    copy_tile<D, ROWS, WARPS>(queries, q, first, seq, head.qkv_stride);
    start_stage<T, D, KEYS, WARPS>(keys, values, k, v, 0, seq, head.qkv_stride);

    float o[ROW_TILES][D / 8][4], peak[ROW_TILES][2], sum[ROW_TILES][2];
    clear(o);
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        peak[t][0] = peak[t][1] = minus_infinity();
        sum[t][0] = sum[t][1] = 0.0f;
    }
    wait_for_stage();
    Rows<T, D, ROW_TILES, D / 16> own_queries(queries, own);
    for (u32 j = 0; j < blocks; j++) {
        if (j + 1 < blocks) start_stage<T, D, KEYS, WARPS>(keys, values, k, v, j + 1, seq, head.qkv_stride);
        const T *these_keys = keys + j % 2 * KEYS * D, *these_values = values + j % 2 * KEYS * D;
        // Skips keys behind all rows of the warp. Every row attends to the first block of keys.
        if (j * KEYS < first + own + 16 * ROW_TILES) {
            float s[ROW_TILES][KEYS / 8][4];
            clear(s);
            multiply_rows<T, D, KEYS>(s, own_queries, these_keys);
            // A row attends to the keys up to its own.
            if (j * KEYS + KEYS > first + own + 1)
                hide(s, [&](u32 row, u32 key) { return j * KEYS + key > first + own + row; });
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float max = peak[t][half];
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
                        max = fmaxf(max, fmaxf(s[t][n][2 * half], s[t][n][2 * half + 1]));
                    max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 1));
                    max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, 2));
                    float shrink = exp2_fast((peak[t][half] - max) * scale), off = max * scale;
                    peak[t][half] = max;
                    float total = 0.0f;
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; i++) {
                            s[t][n][i] = exp2_fast(__fmaf_rn(s[t][n][i], scale, -off));
                            total += s[t][n][i];
                        }
                    sum[t][half] = __fmaf_rn(sum[t][half], shrink, total);
#pragma unroll
                    for (int n = 0; n < D / 8; n++) o[t][n][2 * half] *= shrink, o[t][n][2 * half + 1] *= shrink;
                }
            }
            multiply_sums<T, D, KEYS, ROW_TILES>(o, s, these_values);
        }
        wait_for_stage();
    }
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[t][half];
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            factor[half] = 1.0f / total;
            u32 row = first + own + 16 * t + lane / 4 + 8 * half;
            if (lane % 4 == 0 && row < seq) lse[head.row + row] = __fmaf_rn(peak[t][half], scale, log2f(total));
        }
        store_rows<D>(out + head.out, head.out_stride, first, seq, queries, own + 16 * t, o[t], factor);
    }
}

template <class T, int D, int ROW_TILES, int WARPS, int KEYS>
DEVICE void flash_backward_dq(T *dqkv, float *partials, float *delta, const T *dout, const T *qkv, const T *out,
                              const float *lse, u32 seq, u32 heads, float scale, float slope) {
    constexpr int ROWS = 16 * ROW_TILES * WARPS;
    extern __shared__ uint4 shared[];
    T *queries = reinterpret_cast<T *>(shared), *douts = queries + ROWS * D;
    T *keys = douts + ROWS * D, *values = keys + 2 * KEYS * D;
    __shared__ float deltas[ROWS];
    Head head = this_head<D>(seq, heads);
    const T *q = qkv + head.qkv, *k = q + heads * D, *v = k + heads * D;
    u32 lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 * ROW_TILES;
    u32 first = (gridDim.x - 1 - blockIdx.x) * ROWS;
    u32 blocks = (min(first + ROWS, seq) + KEYS - 1) / KEYS;
    copy_tile<D, ROWS, WARPS>(queries, q, first, seq, head.qkv_stride);
    copy_tile<D, ROWS, WARPS>(douts, dout + head.out, first, seq, head.out_stride);
    start_stage<T, D, KEYS, WARPS>(keys, values, k, v, 0, seq, head.qkv_stride);

    // delta: D / 8 neighbouring lanes per row.
    for (u32 i = threadIdx.x; i < ROWS * (D / 8); i += 32 * WARPS) {
        u32 row = i / (D / 8), from = min(first + row, seq - 1), chunk = i % (D / 8);
        u64 at = head.out + (u64)from * head.out_stride + chunk * 8;
        float a[8], b[8], sum = 0.0f;
        load_columns<8>(out + at, a);
        load_columns<8>(dout + at, b);
#pragma unroll
        for (int n = 0; n < 8; n++) sum = __fmaf_rn(a[n], b[n], sum);
#pragma unroll
        for (int half = D / 16; half > 0; half /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, half);
        if (chunk == 0) {
            deltas[row] = sum;
            if (first + row < seq) delta[head.row + first + row] = sum;
        }
    }

    // Also orders the writes of `deltas` before their reads.
    wait_for_stage();
    Rows<T, D, ROW_TILES, D / 16> own_queries(queries, own);
    Rows<T, D, ROW_TILES, D / 16> own_douts(douts, own);
    float dq[ROW_TILES][D / 8][4], top[ROW_TILES][2], less[ROW_TILES][2];
    clear(dq);
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = own + 16 * t + lane / 4 + 8 * half;
            top[t][half] = lse[head.row + min(first + row, seq - 1)];
            less[t][half] = deltas[row];
        }
    for (u32 j = 0; j < blocks; j++) {
        if (j + 1 < blocks) start_stage<T, D, KEYS, WARPS>(keys, values, k, v, j + 1, seq, head.qkv_stride);
        const T *these_keys = keys + j % 2 * KEYS * D, *these_values = values + j % 2 * KEYS * D;
        if (j * KEYS < first + own + 16 * ROW_TILES) {
            float s[ROW_TILES][KEYS / 8][4], dp[ROW_TILES][KEYS / 8][4];
            clear(s);
            clear(dp);
            multiply_rows<T, D, KEYS>(s, own_queries, these_keys);
            multiply_rows<T, D, KEYS>(dp, own_douts, these_values);
            if (j * KEYS + KEYS > first + own + 1)
                hide(s, [&](u32 row, u32 key) { return j * KEYS + key > first + own + row; });
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = exp2_fast(__fmaf_rn(s[t][n][i], scale, -top[t][i / 2]));
                        s[t][n][i] = p * (dp[t][n][i] - less[t][i / 2]);
                    }
            multiply_sums<T, D, KEYS, ROW_TILES>(dq, s, these_keys);
        }
        wait_for_stage();
    }
    float factor[2] = {slope, slope}, sum[8] = {};
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
        store_rows<D>(dqkv + head.qkv, head.qkv_stride, first, seq, queries, own + 16 * t, dq[t], factor, sum);
    store_sums<D, ROW_TILES, WARPS>(partials_of<D>(partials, first / ROWS, heads), queries, sum);
}

// Parts of the values that backward_dkv keeps: more would be spilled.
template <int D> constexpr int KEPT_VALUES = __CUDA_ARCH__ >= 1000 ? D / 32 : D / 16;

template <class T, int D, int ROW_TILES, int WARPS, int QUERIES>
DEVICE void flash_backward_dkv(T *dqkv, float *partials, const T *dout, const T *qkv, const float *lse,
                               const float *delta, u32 seq, u32 heads, float scale, float slope) {
    constexpr int ROWS = 16 * ROW_TILES * WARPS;
    extern __shared__ uint4 shared[];
    T *keys = reinterpret_cast<T *>(shared), *values = keys + ROWS * D;
    T *queries = values + ROWS * D, *douts = queries + 2 * QUERIES * D;
    __shared__ float tops[2][QUERIES], deltas[2][QUERIES];
    Head head = this_head<D>(seq, heads);
    const T *q = qkv + head.qkv, *k = q + heads * D, *v = k + heads * D;
    u32 lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 * ROW_TILES;
    // The first keys have the most queries, so they come first in the grid.
    u32 first = blockIdx.x * ROWS, begin = first / QUERIES, end = (seq + QUERIES - 1) / QUERIES;

    auto start = [&](u32 j) {
        u32 stage = j % 2;
        copy_tile<D, QUERIES, WARPS>(queries + stage * QUERIES * D, q, j * QUERIES, seq, head.qkv_stride);
        copy_tile<D, QUERIES, WARPS>(douts + stage * QUERIES * D, dout + head.out, j * QUERIES, seq, head.out_stride);
        if (threadIdx.x < QUERIES) {
            u32 from = min(j * QUERIES + threadIdx.x, seq - 1);
            copy_word(&tops[stage][threadIdx.x], lse + head.row + from);
            copy_word(&deltas[stage][threadIdx.x], delta + head.row + from);
        }
        // With 16 queries half a warp copies, and the matrix loads that follow need a whole one.
        __syncwarp();
        copies_are_one_group();
    };
    copy_tile<D, ROWS, WARPS>(keys, k, first, seq, head.qkv_stride);
    copy_tile<D, ROWS, WARPS>(values, v, first, seq, head.qkv_stride);
    start(begin);

    float dk[ROW_TILES][D / 8][4], dv[ROW_TILES][D / 8][4];
    clear(dk);
    clear(dv);
    wait_for_stage();
    Rows<T, D, ROW_TILES, D / 16> own_keys(keys, own);
    Rows<T, D, ROW_TILES, KEPT_VALUES<D>> own_values(values, own);
    for (u32 j = begin; j < end; j++) {
        if (j + 1 < end) start(j + 1);
        u32 stage = j % 2;
        const T *these_queries = queries + stage * QUERIES * D, *these_douts = douts + stage * QUERIES * D;
        // Scores and their gradients of 16 queries at a time, because registers do not hold those of all.
#pragma unroll 1
        for (u32 part = 0; part < QUERIES; part += 16) {
            u32 query = j * QUERIES + part;
            // Skips queries before all keys of the warp.
            if (query + 16 <= first + own) continue;
            const T *part_queries = these_queries + part * D, *part_douts = these_douts + part * D;
            float p[ROW_TILES][2][4], ds[ROW_TILES][2][4];
            clear(p);
            clear(ds);
            multiply_rows<T, D, 16>(p, own_keys, part_queries);
            multiply_rows<T, D, 16>(ds, own_values, part_douts);
            // Queries behind the last are copies of it and are masked.
            if (query < first + own + 16 * ROW_TILES - 1 || query + 16 > seq)
                hide(p, [&](u32 key, u32 col) { return first + own + key > query + col || query + col >= seq; });
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 col = part + 8 * n + lane % 4 * 2 + i;
                    float top = tops[stage][col], less = deltas[stage][col];
#pragma unroll
                    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float &s = p[t][n][2 * half + i], &d = ds[t][n][2 * half + i];
                            s = exp2_fast(__fmaf_rn(s, scale, -top));
                            d = s * (d - less);
                        }
                }
            multiply_sums<T, D, 16, ROW_TILES>(dv, p, part_douts);
            multiply_sums<T, D, 16, ROW_TILES>(dk, ds, part_queries);
        }
        wait_for_stage();
    }
    float one[2] = {1.0f, 1.0f}, factor[2] = {slope, slope}, dk_sum[8] = {}, dv_sum[8] = {};
    T *dk_out = dqkv + head.qkv + heads * D;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        store_rows<D>(dk_out, head.qkv_stride, first, seq, keys, own + 16 * t, dk[t], factor, dk_sum);
        store_rows<D>(dk_out + heads * D, head.qkv_stride, first, seq, values, own + 16 * t, dv[t], one, dv_sum);
    }
    float *dk_partials = partials_of<D>(partials, first / ROWS, heads) + heads * D;
    store_sums<D, ROW_TILES, WARPS>(dk_partials, keys, dk_sum);
    store_sums<D, ROW_TILES, WARPS>(dk_partials + heads * D, values, dv_sum);
}

// For each of forward, dq and dkv: tiles of 16 rows per warp, warps, and rows of a tile that is iterated over.
// src/cuda/attention.rs repeats these numbers and computes grids and shared memory from them.
#define FLASH(T, D, FT, FW, KEYS, QT, QW, Q_KEYS, KT, KW, QUERIES)                                                     \
    extern "C" __global__ __launch_bounds__(32 * FW) void flash_forward_##D(T *out, float *lse, const T *qkv, u32 seq, \
                                                                            u32 heads, float scale) {                  \
        flash_forward<T, D, FT, FW, KEYS>(out, lse, qkv, seq, heads, scale);                                           \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * QW) void flash_backward_dq_##D(                                       \
        T *dqkv, float *partials, float *delta, const T *dout, const T *qkv, const T *out, const float *lse, u32 seq,  \
        u32 heads, float scale, float slope) {                                                                         \
        flash_backward_dq<T, D, QT, QW, Q_KEYS>(dqkv, partials, delta, dout, qkv, out, lse, seq, heads, scale, slope); \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * KW) void flash_backward_dkv_##D(                                      \
        T *dqkv, float *partials, const T *dout, const T *qkv, const float *lse, const float *delta, u32 seq,          \
        u32 heads, float scale, float slope) {                                                                         \
        flash_backward_dkv<T, D, KT, KW, QUERIES>(dqkv, partials, dout, qkv, lse, delta, seq, heads, scale, slope);    \
    }

FLASH(STORAGE, 32, 2, 4, 64, 2, 4, 32, 2, 4, 32)
FLASH(STORAGE, 64, 2, 4, 64, 2, 4, 32, 2, 4, 32)
FLASH(STORAGE, 128, 1, 8, 64, 1, 8, 32, 1, 8, 16)

// Causal attention of several heads on tensor cores, for 16-bit elements and head dimensions 32, 64 and 128: the
// algorithm of FlashAttention-2 (arXiv 2307.08691), without a T x T matrix in memory. Requires sm_80.
// Host version: src/ops/attention.rs.
//
// Shapes: qkv, dqkv [batch, seq, heads + 2 kv_heads, D]: queries, keys, values; out, dout [batch, seq, heads, D]; lse,
// delta [batch, heads, seq] fp32. heads / kv_heads neighbouring heads of queries share a head of keys and values.
// A query attends to itself and the keys before it, of which it sees the `window` last ones (`seq`: all), and if
// `starts` [batch, seq] is not null, none before starts[query], the first token of its document. `starts` never decreases
// within a sequence, so the queries that see a key are neighbours.
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
// backward_dkv: a block owns keys and values of one of kv_heads heads and iterates over the heads of their queries, and
//   over the queries from the diagonal on. Grid: kv_heads in the place of heads.
//   The two kernels share no sum, so there are no atomics and the order of every sum is fixed. The cost: scores and
//   their gradients are computed twice, 7 products instead of 5.
// With DROPOUT defined, the kernels of this file, under names that end in _dropout, multiply the probability of query q of
// head h and of a key by the factor of element `key` of line h seq + q (dropout.cuh). `lse` and `delta` are the same.
// If `table` [seq, D] is not null, queries and keys were rotated by its angles (rope.cu), and both backward kernels
// rotate their gradients back as they store them.
// Both backward kernels also sum the rows that they store, for the gradient of the bias of qkv: partials [batch, tiles,
// heads + 2 kv_heads, D] fp32, one row for each tile of rows, which sum_partials (column_sums.cu) sums. If `partials` is
// null, the sums are not stored.

#ifdef DROPOUT
constexpr bool DROPS = true;
#define NAME(name) name##_dropout
#else
constexpr bool DROPS = false;
#define NAME(name) name
#endif

// Offsets of the queries, keys and values of (batch, head), and the numbers of heads of both kinds.
struct Head {
    u64 q;
    u64 k;
    u64 v;
    u64 out;
    u64 row;
    u32 qkv_stride;
    u32 out_stride;
};

// Head `h` of the queries, and head `kv` of keys and values.
template <int D> DEVICE Head head_of(u32 h, u32 kv, u32 seq, u32 heads, u32 kv_heads) {
    u64 b = blockIdx.z;
    u32 width = (heads + 2 * kv_heads) * D;
    u64 q = b * seq * width, k = q + (heads + kv) * D;
    return {q + h * D, k, k + kv_heads * D, (b * seq * heads + h) * D, (b * heads + h) * seq, width, heads * D};
}

// The place of this block's sums over its rows of head `head` of qkv, which are row `tile` of this batch.
template <int D> DEVICE float *partials_of(float *partials, u32 tile, u32 head, u32 heads, u32 kv_heads) {
    return partials + (((u64)blockIdx.z * gridDim.x + tile) * (heads + 2 * kv_heads) + head) * D;
}

// The first key that a query attends to; it does not decrease with the query. `starts` is this batch's, or null.
DEVICE u32 first_key(const u32 *starts, u32 window, u32 query) {
    u32 key = query >= window ? query - window + 1 : 0;
    return starts ? max(key, starts[query]) : key;
}

// The queries before this one see a key or are before it; starts at the key.
DEVICE u32 end_of_queries(const u32 *starts, u32 window, u32 key, u32 seq) {
    u32 low = key + 1, end = min(key + window, seq);
    if (!starts) return end;
    while (low < end) {
        u32 middle = (low + end) / 2;
        if (starts[middle] > key)
            end = middle;
        else
            low = middle + 1;
    }
    return end;
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

// Which of the probabilities of 16 TILES rows and 8 N columns are kept, in the places of the sums: four bits each.
template <int TILES, int N> struct Kept {
    static constexpr int WORDS = (TILES * N + 7) / 8;
    u32 words[WORDS] = {};

    DEVICE bool of(int t, int n, int i) const {
        int place = t * N + n;
        return words[place / 8] >> (place % 8 * 4 + i) & 1;
    }

    // Calls `bits(t, n)` for the four bits of each place.
    template <class Bits> DEVICE void fill(Bits bits) {
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll 1
            for (int i = 0; i < 8 && 8 * w + i < TILES * N; i++)
                words[w] |= bits((8 * w + i) / N, (8 * w + i) % N) << 4 * i;
    }

    // The rows are queries and the columns keys. `line` is that of the warp's first query.
    DEVICE void of_queries(const Draw &draw, u32 line, u32 key) {
        u32 lane = threadIdx.x % 32, odd = lane % 2;
        fill([&](u32 t, u32 n) {
            // Two neighbouring lanes have the same group of keys, in two rows: each draws for one row.
            u32 both = draw.kept(line + 16 * t + lane / 4 + 8 * odd, (key + 8 * n) / 4 + lane % 4 / 2) << 4 * odd;
            both |= __shfl_xor_sync(ALL_LANES, both, 1);
            both >>= 2 * odd;
            return (both & 3) | (both >> 2 & 12);
        });
    }

    // The rows are keys and the columns queries.
    DEVICE void of_keys(const Draw &draw, u32 line, u32 key) {
        u32 lane = threadIdx.x % 32, word = lane / 4 % 4;
        fill([&](u32 t, u32 n) {
            // Four lanes have the four keys of two groups, for two queries: each draws for one group and query.
            u32 query = line + 8 * n + lane % 4 * 2 + word % 2;
            u32 all = draw.kept(query, (key + 16 * t) / 4 + lane / 16 + word / 2 * 2) << 4 * word;
            all |= __shfl_xor_sync(ALL_LANES, all, 4);
            all |= __shfl_xor_sync(ALL_LANES, all, 8);
            all >>= word;
            return (all & 1) | (all >> 3 & 2) | (all >> 6 & 4) | (all >> 9 & 8);
        });
    }
};

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
DEVICE void flash_forward(T *out, float *lse, const T *qkv, const u32 *starts, const u32 *draw_keys, Dropout dropout,
                          u32 seq, u32 heads, u32 kv_heads, u32 window, float scale) {
    constexpr int ROWS = 16 * ROW_TILES * WARPS;
    extern __shared__ uint4 shared[];
    T *queries = reinterpret_cast<T *>(shared), *keys = queries + ROWS * D, *values = keys + 2 * KEYS * D;
    Head head = head_of<D>(blockIdx.y, blockIdx.y / (heads / kv_heads), seq, heads, kv_heads);
    const T *q = qkv + head.q, *k = qkv + head.k, *v = qkv + head.v;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 first = (gridDim.x - 1 - blockIdx.x) * ROWS, own = warp * 16 * ROW_TILES;
    if (starts) starts += (u64)blockIdx.z * seq;
    u32 begin = first_key(starts, window, first) / KEYS, blocks = (min(first + ROWS, seq) + KEYS - 1) / KEYS;
    copy_tile<D, ROWS, WARPS>(queries, q, first, seq, head.qkv_stride);
    start_stage<T, D, KEYS, WARPS>(keys, values, k, v, begin, seq, head.qkv_stride);
    // The first keys of the warp's first and last query.
    u32 low = first_key(starts, window, min(first + own, seq - 1));
    u32 high = first_key(starts, window, min(first + own + 16 * ROW_TILES, seq) - 1);

    float o[ROW_TILES][D / 8][4], peak[ROW_TILES][2], sum[ROW_TILES][2];
    clear(o);
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        peak[t][0] = peak[t][1] = NO_PEAK;
        sum[t][0] = sum[t][1] = 0.0f;
    }
    wait_for_stage();
    // With dropout, more would be spilled.
    constexpr int KEPT = DROPS && D == 64 && __CUDA_ARCH__ < 1000 ? D / 16 - 1 : D / 16;
    Rows<T, D, ROW_TILES, KEPT> own_queries(queries, own);
    for (u32 j = begin; j < blocks; j++) {
        if (j + 1 < blocks) start_stage<T, D, KEYS, WARPS>(keys, values, k, v, j + 1, seq, head.qkv_stride);
        const T *these_keys = keys + j % 2 * KEYS * D, *these_values = values + j % 2 * KEYS * D;
        // Skips keys behind all rows of the warp, and before their first ones.
        if (j * KEYS < first + own + 16 * ROW_TILES && j * KEYS + KEYS > low) {
            Kept<ROW_TILES, KEYS / 8> kept;
            if constexpr (DROPS)
                kept.of_queries(Draw(draw_keys, dropout, blockIdx.z), blockIdx.y * seq + first + own, j * KEYS);
            float s[ROW_TILES][KEYS / 8][4];
            clear(s);
            multiply_rows<T, D, KEYS>(s, own_queries, these_keys);
            // A row attends to the keys up to its own.
            if (j * KEYS + KEYS > first + own + 1)
                hide(s, [&](u32 row, u32 key) { return j * KEYS + key > first + own + row; });
            if (j * KEYS < high)
                hide(s, [&](u32 row, u32 key) {
                    return j * KEYS + key < first_key(starts, window, min(first + own + row, seq - 1));
                });
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
                            if (DROPS && !kept.of(t, n, i)) s[t][n][i] = 0.0f;
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
            factor[half] = (DROPS ? dropout.factor : 1.0f) / total;
            u32 row = first + own + 16 * t + lane / 4 + 8 * half;
            if (lane % 4 == 0 && row < seq) lse[head.row + row] = __fmaf_rn(peak[t][half], scale, log2f(total));
        }
        store_rows<D>(out + head.out, head.out_stride, first, seq, queries, own + 16 * t, o[t], factor, {});
    }
}

template <class T, int D, int ROW_TILES, int WARPS, int KEYS>
DEVICE void flash_backward_dq(T *dqkv, float *partials, float *delta, const T *dout, const T *qkv, const T *out,
                              const float *lse, const float *table, const u32 *starts, const u32 *draw_keys,
                              Dropout dropout, u32 seq, u32 heads, u32 kv_heads, u32 window, float scale,
                              float slope) {
    constexpr int ROWS = 16 * ROW_TILES * WARPS;
    extern __shared__ uint4 shared[];
    T *queries = reinterpret_cast<T *>(shared), *douts = queries + ROWS * D;
    T *keys = douts + ROWS * D, *values = keys + 2 * KEYS * D;
    __shared__ float deltas[ROWS];
    Head head = head_of<D>(blockIdx.y, blockIdx.y / (heads / kv_heads), seq, heads, kv_heads);
    const T *q = qkv + head.q, *k = qkv + head.k, *v = qkv + head.v;
    u32 lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 * ROW_TILES;
    u32 first = (gridDim.x - 1 - blockIdx.x) * ROWS;
    if (starts) starts += (u64)blockIdx.z * seq;
    u32 begin = first_key(starts, window, first) / KEYS, blocks = (min(first + ROWS, seq) + KEYS - 1) / KEYS;
    u32 low = first_key(starts, window, min(first + own, seq - 1));
    u32 high = first_key(starts, window, min(first + own + 16 * ROW_TILES, seq) - 1);
    copy_tile<D, ROWS, WARPS>(queries, q, first, seq, head.qkv_stride);
    copy_tile<D, ROWS, WARPS>(douts, dout + head.out, first, seq, head.out_stride);
    start_stage<T, D, KEYS, WARPS>(keys, values, k, v, begin, seq, head.qkv_stride);

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
    for (u32 j = begin; j < blocks; j++) {
        if (j + 1 < blocks) start_stage<T, D, KEYS, WARPS>(keys, values, k, v, j + 1, seq, head.qkv_stride);
        const T *these_keys = keys + j % 2 * KEYS * D, *these_values = values + j % 2 * KEYS * D;
        if (j * KEYS < first + own + 16 * ROW_TILES && j * KEYS + KEYS > low) {
            Kept<ROW_TILES, KEYS / 8> kept;
            if constexpr (DROPS)
                kept.of_queries(Draw(draw_keys, dropout, blockIdx.z), blockIdx.y * seq + first + own, j * KEYS);
            float s[ROW_TILES][KEYS / 8][4], dp[ROW_TILES][KEYS / 8][4];
            clear(s);
            clear(dp);
            multiply_rows<T, D, KEYS>(s, own_queries, these_keys);
            multiply_rows<T, D, KEYS>(dp, own_douts, these_values);
            if (j * KEYS + KEYS > first + own + 1)
                hide(s, [&](u32 row, u32 key) { return j * KEYS + key > first + own + row; });
            if (j * KEYS < high)
                hide(s, [&](u32 row, u32 key) {
                    return j * KEYS + key < first_key(starts, window, min(first + own + row, seq - 1));
                });
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = exp2_fast(__fmaf_rn(s[t][n][i], scale, -top[t][i / 2]));
                        if constexpr (DROPS) dp[t][n][i] *= kept.of(t, n, i) ? dropout.factor : 0.0f;
                        s[t][n][i] = p * (dp[t][n][i] - less[t][i / 2]);
                    }
            multiply_sums<T, D, KEYS, ROW_TILES>(dq, s, these_keys);
        }
        wait_for_stage();
    }
    float factor[2] = {slope, slope}, sum[8] = {};
    Angles angles = {table, starts};
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
        store_rows<D>(dqkv + head.q, head.qkv_stride, first, seq, queries, own + 16 * t, dq[t], factor, angles, sum);
    if (partials)
        store_sums<D, ROW_TILES, WARPS>(partials_of<D>(partials, first / ROWS, blockIdx.y, heads, kv_heads), queries,
                                        sum);
}

// Parts of the values that backward_dkv keeps: more would be spilled.
template <int D>
constexpr int VALUES_WITHOUT_DROPOUT = __CUDA_ARCH__ >= 1000 ? D / 64
                                       : __CUDA_ARCH__ >= 900 ? D / 16 - 1
                                       : D == 32              ? 2
                                                              : D / 32;

template <class T, int D, int ROW_TILES, int WARPS, int QUERIES>
DEVICE void flash_backward_dkv(T *dqkv, float *partials, const T *dout, const T *qkv, const float *lse,
                               const float *delta, const float *table, const u32 *starts, const u32 *draw_keys,
                               Dropout dropout, u32 seq, u32 heads, u32 kv_heads, u32 window, float scale,
                               float slope) {
    constexpr int ROWS = 16 * ROW_TILES * WARPS;
    extern __shared__ uint4 shared[];
    T *keys = reinterpret_cast<T *>(shared), *values = keys + ROWS * D;
    T *queries = values + ROWS * D, *douts = queries + 2 * QUERIES * D;
    __shared__ float tops[2][QUERIES], deltas[2][QUERIES];
    // The first key of each query.
    __shared__ u32 lows[2][QUERIES];
    u32 group = heads / kv_heads;
    Head head = head_of<D>(blockIdx.y * group, blockIdx.y, seq, heads, kv_heads);
    u32 lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 * ROW_TILES;
    if (starts) starts += (u64)blockIdx.z * seq;
    // The first keys have the most queries, so they come first in the grid.
    u32 first = blockIdx.x * ROWS, begin = first / QUERIES;
    u32 end = (end_of_queries(starts, window, min(first + ROWS, seq) - 1, seq) + QUERIES - 1) / QUERIES;

    // Starts copying queries of head `h` of the group into a stage.
    auto start = [&](u32 h, u32 j, u32 stage) {
        copy_tile<D, QUERIES, WARPS>(queries + stage * QUERIES * D, qkv + head.q + h * D, j * QUERIES, seq,
                                     head.qkv_stride);
        copy_tile<D, QUERIES, WARPS>(douts + stage * QUERIES * D, dout + head.out + h * D, j * QUERIES, seq,
                                     head.out_stride);
        if (threadIdx.x < QUERIES) {
            u32 query = min(j * QUERIES + threadIdx.x, seq - 1);
            u64 from = head.row + (u64)h * seq + query;
            copy_word(&tops[stage][threadIdx.x], lse + from);
            copy_word(&deltas[stage][threadIdx.x], delta + from);
            lows[stage][threadIdx.x] = first_key(starts, window, query);
        }
        // With 16 queries half a warp copies, and the matrix loads that follow need a whole one.
        __syncwarp();
        copies_are_one_group();
    };
    copy_tile<D, ROWS, WARPS>(keys, qkv + head.k, first, seq, head.qkv_stride);
    copy_tile<D, ROWS, WARPS>(values, qkv + head.v, first, seq, head.qkv_stride);
    start(0, begin, 0);

    float dk[ROW_TILES][D / 8][4], dv[ROW_TILES][D / 8][4];
    clear(dk);
    clear(dv);
    wait_for_stage();
    // With dropout, more would be spilled.
    constexpr int KEPT_KEYS = DROPS && D == 64 ? 0 : D / 16, KEPT_VALUES = DROPS ? 0 : VALUES_WITHOUT_DROPOUT<D>;
    Rows<T, D, ROW_TILES, KEPT_KEYS> own_keys(keys, own);
    Rows<T, D, ROW_TILES, KEPT_VALUES> own_values(values, own);
    for (u32 h = 0, j = begin, stage = 0; h < group; stage ^= 1) {
        u32 this_j = j, line = (blockIdx.y * group + h) * seq;
        if (++j == end) j = begin, h++;
        if (h < group) start(h, j, stage ^ 1);
        const T *these_queries = queries + stage * QUERIES * D, *these_douts = douts + stage * QUERIES * D;
        // Scores and their gradients of 16 queries at a time, because registers do not hold those of all.
#pragma unroll 1
        for (u32 part = 0; part < QUERIES; part += 16) {
            u32 query = this_j * QUERIES + part;
            // Skips queries before all keys of the warp, and those whose first key is behind them.
            if (query + 16 <= first + own) continue;
            if (lows[stage][part] >= first + own + 16 * ROW_TILES) continue;
            const T *part_queries = these_queries + part * D, *part_douts = these_douts + part * D;
            Kept<ROW_TILES, 2> kept;
            if constexpr (DROPS) kept.of_keys(Draw(draw_keys, dropout, blockIdx.z), line + query, first + own);
            float p[ROW_TILES][2][4], ds[ROW_TILES][2][4];
            clear(p);
            clear(ds);
            multiply_rows<T, D, 16>(p, own_keys, part_queries);
            multiply_rows<T, D, 16>(ds, own_values, part_douts);
            // Queries behind the last are copies of it and are masked.
            if (query < first + own + 16 * ROW_TILES - 1 || query + 16 > seq || lows[stage][part + 15] > first + own)
                hide(p, [&](u32 key, u32 col) {
                    key += first + own;
                    return key > query + col || query + col >= seq || key < lows[stage][part + col];
                });
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
                            if constexpr (DROPS) {
                                float factor = kept.of(t, n, 2 * half + i) ? dropout.factor : 0.0f;
                                d = s * (d * factor - less);
                                s *= factor;
                            } else {
                                d = s * (d - less);
                            }
                        }
                }
            multiply_sums<T, D, 16, ROW_TILES>(dv, p, part_douts);
            multiply_sums<T, D, 16, ROW_TILES>(dk, ds, part_queries);
        }
        wait_for_stage();
    }
    float one[2] = {1.0f, 1.0f}, factor[2] = {slope, slope}, dk_sum[8] = {}, dv_sum[8] = {};
    Angles angles = {table, starts};
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        store_rows<D>(dqkv + head.k, head.qkv_stride, first, seq, keys, own + 16 * t, dk[t], factor, angles, dk_sum);
        store_rows<D>(dqkv + head.v, head.qkv_stride, first, seq, values, own + 16 * t, dv[t], one, {}, dv_sum);
    }
    if (!partials) return;
    float *dk_partials = partials_of<D>(partials, first / ROWS, heads + blockIdx.y, heads, kv_heads);
    store_sums<D, ROW_TILES, WARPS>(dk_partials, keys, dk_sum);
    store_sums<D, ROW_TILES, WARPS>(dk_partials + kv_heads * D, values, dv_sum);
}

// For each of forward, dq and dkv: tiles of 16 rows per warp, warps, and rows of a tile that is iterated over.
// src/cuda/attention.rs repeats these numbers and computes grids and shared memory from them.
#define FLASH(T, D, FT, FW, KEYS, QT, QW, Q_KEYS, KT, KW, QUERIES)                                                     \
    extern "C" __global__ __launch_bounds__(32 * FW) void NAME(flash_forward_##D)(                                     \
        T *out, float *lse, const T *qkv, const u32 *starts, const u32 *draw_keys, Dropout dropout, u32 seq,           \
        u32 heads, u32 kv_heads, u32 window, float scale) {                                                            \
        flash_forward<T, D, FT, FW, KEYS>(out, lse, qkv, starts, draw_keys, dropout, seq, heads, kv_heads, window,     \
                                          scale);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * QW) void NAME(flash_backward_dq_##D)(                                 \
        T *dqkv, float *partials, float *delta, const T *dout, const T *qkv, const T *out, const float *lse,           \
        const float *table, const u32 *starts, const u32 *draw_keys, Dropout dropout, u32 seq, u32 heads,              \
        u32 kv_heads, u32 window, float scale, float slope) {                                                          \
        flash_backward_dq<T, D, QT, QW, Q_KEYS>(dqkv, partials, delta, dout, qkv, out, lse, table, starts, draw_keys,  \
                                                dropout, seq, heads, kv_heads, window, scale, slope);                  \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * KW) void NAME(flash_backward_dkv_##D)(                                \
        T *dqkv, float *partials, const T *dout, const T *qkv, const float *lse, const float *delta,                   \
        const float *table, const u32 *starts, const u32 *draw_keys, Dropout dropout, u32 seq, u32 heads,              \
        u32 kv_heads, u32 window, float scale, float slope) {                                                          \
        flash_backward_dkv<T, D, KT, KW, QUERIES>(dqkv, partials, dout, qkv, lse, delta, table, starts, draw_keys,     \
                                                  dropout, seq, heads, kv_heads, window, scale, slope);                \
    }

FLASH(STORAGE, 32, 2, 4, 64, 2, 4, 32, 2, 4, 32)
FLASH(STORAGE, 64, 2, 4, 64, 2, 4, 32, 2, 4, 32)
FLASH(STORAGE, 128, 1, 8, 64, 1, 8, 32, 1, 8, 16)

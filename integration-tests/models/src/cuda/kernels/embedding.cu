// Token and position embedding. Host version: src/ops/embedding.rs.
//
// Shapes: tokens [batch * seq]; wte [vocab, n], wpe [positions, n], x, dx [batch * seq, n] in T; dwte, dwpe as wte,
// wpe in fp32. A thread owns W columns (8: n is a multiple of 8; else 1). If `documents` [batch * seq] is not null, a
// row's position is its place in the sequence, less documents[row], the place of the first token of its document, which
// never decreases within a sequence. The rows of a sequence are its `seq` tokens from `first` on. If `keys` is not null,
// x is multiplied by the factors of a dropout, and so is dx wherever it is read.
//
// A token IGNORED is in the part of the vocabulary of another rank: its row of wte is 0.
//
// forward: x[row] = wte[token] + wpe[position], without positions if wpe is null. Grid: any. Reads rows of wte and
// writes x: 2 rows n sizeof(T) bytes.
// backward_positions: dwpe[t] += sum of dx over the rows with position t, in the order of the rows. Grid: any.
// backward_tokens: dwte[token] += the rows of dx that have the token, unless it is `padding`. The host sorts the rows: `order` is all rows,
// sorted by token (stable), `starts[segment]` the position of a token's first row in `order`, and `segments[0]` the
// number of distinct tokens. Grid: (rows, ceil(n / (32 W))); a block sums a segment, each of its warps every WARPS-th
// row, in an order that depends only on the tokens.
// Each backward reads dx: rows n sizeof(T) bytes.

#define WARPS 8
#define IGNORED 0xffffffffu

template <class T, int W>
__device__ __forceinline__ void embedding_forward(T *x, const u32 *tokens, const T *wte, const T *wpe,
                                                  const u32 *documents, const u32 *keys, Dropout dropout, u32 rows,
                                                  u32 seq, u32 first, u32 n) {
    u32 groups = n / W;
    u64 count = (u64)rows * groups;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 row = (u32)(i / groups), col = (u32)(i % groups) * W;
        float e[W] = {};
        u32 token = tokens[row];
        if (token != IGNORED) load_columns<W>(wte + (u64)token * n + col, e);
        if (wpe) {
            u32 position = first + row % seq;
            if (documents) position -= documents[row];
            float p[W];
            load_columns<W>(wpe + (u64)position * n + col, p);
#pragma unroll
            for (int k = 0; k < W; k++) e[k] += p[k];
        }
        drop_columns<W>(e, keys, dropout, row, seq, col);
        store_columns<W>(x + (u64)row * n + col, e);
    }
}

// The first place behind the document of place `at` of a sequence with these `documents`.
__device__ __forceinline__ u32 end_of_document(const u32 *documents, u32 at, u32 seq) {
    u32 low = at + 1, end = seq;
    while (low < end) {
        u32 middle = (low + end) / 2;
        if (documents[middle] > documents[at])
            end = middle;
        else
            low = middle + 1;
    }
    return end;
}

template <class T, int W>
__device__ __forceinline__ void embedding_positions(float *dwpe, const T *dx, const u32 *documents, const u32 *keys,
                                                    Dropout dropout, u32 batch, u32 seq, u32 first, u32 n) {
    u32 groups = n / W;
    u64 count = (u64)(first + seq) * groups;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 t = (u32)(i / groups), col = (u32)(i % groups) * W;
        float sum[W] = {};
        auto add = [&](u32 row) {
            float d[W];
            load_columns<W>(dx + (u64)row * n + col, d);
            drop_columns<W>(d, keys, dropout, row, seq, col);
#pragma unroll
            for (int k = 0; k < W; k++) sum[k] += d[k];
        };
        for (u32 b = 0; b < batch; b++) {
            // From a document that begins at `start` to the next one that may have t + 1 tokens. Without documents
            // there is one. The first one's position t may be before the rows.
            const u32 *of = documents + (u64)b * seq;
            for (u32 at = max(t, first); at < first + seq;) {
                u32 start = documents ? of[at - first] : 0;
                if (at - start == t) add(b * seq + at - first);
                if (at - start >= t) start = first + (documents ? end_of_document(of, at - first, seq) : seq);
                at = start + t;
            }
        }
        float *place = dwpe + (u64)t * n + col;
#pragma unroll
        for (int k = 0; k < W; k++) place[k] += sum[k];
    }
}

template <class T, int W>
__device__ __forceinline__ void embedding_tokens(float *dwte, const u32 *tokens, const u32 *order, const u32 *starts,
                                                 const u32 *segments, const T *dx, const u32 *keys, Dropout dropout,
                                                 u32 rows, u32 seq, u32 n, u32 padding) {
    __shared__ float sums[WARPS][32 * W];
    u32 segment = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (segment >= segments[0]) return;
    u32 col = (blockIdx.y * 32 + lane) * W;
    u32 start = starts[segment], token = tokens[order[start]];
    if (token == padding || token == IGNORED) return;
    u32 end = segment + 1 < segments[0] ? starts[segment + 1] : rows;
    float sum[W] = {};
    if (col < n) {
#pragma unroll 2
        for (u32 i = start + warp; i < end; i += WARPS) {
            float d[W];
            u32 row = order[i];
            load_columns<W>(dx + (u64)row * n + col, d);
            drop_columns<W>(d, keys, dropout, row, seq, col);
#pragma unroll
            for (int k = 0; k < W; k++) sum[k] += d[k];
        }
    }
#pragma unroll
    for (int k = 0; k < W; k++) sums[warp][k * 32 + lane] = sum[k];
    __syncthreads();
    if (warp != 0 || col >= n) return;
    float *place = dwte + (u64)token * n + col;
#pragma unroll
    for (int k = 0; k < W; k++) {
        float total = place[k];
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][k * 32 + lane];
        place[k] = total;
    }
}

// Backward may have 64 registers: with the draws of a dropout ptxas would spill some, to fit more blocks.
#define EMBEDDING(T, W)                                                                                             \
    extern "C" __global__ __launch_bounds__(THREADS) void embedding_forward_##W(                                    \
        T *x, const u32 *tokens, const T *wte, const T *wpe, const u32 *documents, const u32 *keys,                 \
        Dropout dropout, u32 rows, u32 seq, u32 first, u32 n) {                                                     \
        embedding_forward<T, W>(x, tokens, wte, wpe, documents, keys, dropout, rows, seq, first, n);                \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS, 4) void embedding_positions_##W(                                \
        float *dwpe, const T *dx, const u32 *documents, const u32 *keys, Dropout dropout, u32 batch, u32 seq,       \
        u32 first, u32 n) {                                                                                         \
        embedding_positions<T, W>(dwpe, dx, documents, keys, dropout, batch, seq, first, n);                        \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(32 * WARPS, 4) void embedding_tokens_##W(                                \
        float *dwte, const u32 *tokens, const u32 *order, const u32 *starts, const u32 *segments, const T *dx,      \
        const u32 *keys, Dropout dropout, u32 rows, u32 seq, u32 n, u32 padding) {                                  \
        embedding_tokens<T, W>(dwte, tokens, order, starts, segments, dx, keys, dropout, rows, seq, n, padding);    \
    }

EMBEDDING(STORAGE, 8)
EMBEDDING(STORAGE, 1)

// The copies before and after an all-to-all between ranks that share sequences. Host version: src/ops/sequence.rs.
//
// Shapes in T, for S ranks: tokens [batch, seq / S, heads + 2 kv_heads, d], queries first and values last; heads
// [batch, seq, h + 2 k, d] with h = heads / S and k = max(1, kv_heads / S), or 0 without keys; segments
// [S, batch, seq / S, h + 2 k, d], one for each rank. A head of keys that several ranks have is in each of their
// segments. d is a multiple of W, and a thread owns W columns (8, or 1).
//
// pack_tokens: segments of tokens. unpack_heads: heads of segments. pack_heads: segments of heads. Each reads and writes
// batch seq (h + 2 k) d elements. unpack_tokens: tokens of segments; reads as many, sums the copies of a head of keys in
// fp32 in the order of the ranks, and writes batch seq / S (heads + 2 kv_heads) d. Grid: any.

struct Sizes {
    u32 ranks, batch, seq, heads, kv_heads, d;

    __device__ __forceinline__ u32 queries() const { return heads / ranks; }
    __device__ __forceinline__ u32 keys() const { return kv_heads ? max(1, kv_heads / ranks) : 0; }
    __device__ __forceinline__ u32 width() const { return (queries() + 2 * keys()) * d; }
    __device__ __forceinline__ u32 token_width() const { return (heads + 2 * kv_heads) * d; }
    // Tokens of a sequence on a rank, and rows of a segment.
    __device__ __forceinline__ u32 tokens() const { return seq / ranks; }
    __device__ __forceinline__ u32 rows() const { return batch * tokens(); }
};

// Calls `work(row, col)` for each thread's columns of `rows` rows of `width` elements.
template <int W, class Work> __device__ __forceinline__ void for_each(u32 rows, u32 width, Work work) {
    u32 groups = width / W;
    u64 count = (u64)rows * groups;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS)
        work((u32)(i / groups), (u32)(i % groups) * W);
}

template <class T, int W> __device__ __forceinline__ void copy(T *to, const T *from) {
    float x[W];
    load_columns<W>(from, x);
    store_columns<W>(to, x);
}

template <class T, int W> __device__ __forceinline__ void pack_tokens(T *segments, const T *tokens, Sizes z) {
    u32 h = z.queries() * z.d, k = z.keys() * z.d, width = z.width();
    for_each<W>(z.ranks * z.rows(), width, [&](u32 row, u32 col) {
        u32 rank = row / z.rows(), token = row % z.rows();
        u32 key = (z.heads + rank * z.kv_heads / z.ranks) * z.d;
        u32 from = col < h ? rank * h + col : col < h + k ? key + col - h : key + z.kv_heads * z.d + col - h - k;
        copy<T, W>(segments + (u64)row * width + col, tokens + (u64)token * z.token_width() + from);
    });
}

// The row of the segments of token `row` of the heads.
__device__ __forceinline__ u32 segment_row(u32 row, Sizes z) {
    u32 sequence = row / z.seq, token = row % z.seq;
    return token / z.tokens() * z.rows() + sequence * z.tokens() + token % z.tokens();
}

template <class T, int W> __device__ __forceinline__ void unpack_heads(T *heads, const T *segments, Sizes z) {
    u32 width = z.width();
    for_each<W>(z.batch * z.seq, width, [&](u32 row, u32 col) {
        copy<T, W>(heads + (u64)row * width + col, segments + (u64)segment_row(row, z) * width + col);
    });
}

template <class T, int W> __device__ __forceinline__ void pack_heads(T *segments, const T *heads, Sizes z) {
    u32 width = z.width();
    for_each<W>(z.batch * z.seq, width, [&](u32 row, u32 col) {
        copy<T, W>(segments + (u64)segment_row(row, z) * width + col, heads + (u64)row * width + col);
    });
}

template <class T, int W> __device__ __forceinline__ void unpack_tokens(T *tokens, const T *segments, Sizes z) {
    u32 h = z.queries() * z.d, k = z.keys() * z.d, width = z.width(), all = z.token_width();
    // Ranks that have a head of keys.
    u32 copies = z.kv_heads ? max(1, z.ranks / z.kv_heads) : 1;
    for_each<W>(z.rows(), all, [&](u32 row, u32 col) {
        T *to = tokens + (u64)row * all + col;
        u32 queries = z.heads * z.d, keys = z.kv_heads * z.d;
        if (col < queries) return copy<T, W>(to, segments + ((u64)(col / h) * z.rows() + row) * width + col % h);
        bool value = col >= queries + keys;
        u32 at = col - queries - (value ? keys : 0);
        u32 rank = at / k * copies;
        const T *from = segments + ((u64)rank * z.rows() + row) * width + h + (value ? k : 0) + at % k;
        float sum[W];
        load_columns<W>(from, sum);
        for (u32 i = 1; i < copies; i++) {
            float x[W];
            load_columns<W>(from + (u64)i * z.rows() * width, x);
#pragma unroll
            for (int j = 0; j < W; j++) sum[j] += x[j];
        }
        store_columns<W>(to, sum);
    });
}

#define EXCHANGE(T, W, NAME)                                                                                        \
    extern "C" __global__ __launch_bounds__(THREADS) void NAME##_##W(T *out, const T *in, u32 ranks, u32 batch,     \
                                                                     u32 seq, u32 heads, u32 kv_heads, u32 d) {     \
        NAME<T, W>(out, in, Sizes{ranks, batch, seq, heads, kv_heads, d});                                          \
    }

#define EXCHANGES(T, W)          \
    EXCHANGE(T, W, pack_tokens)  \
    EXCHANGE(T, W, unpack_heads) \
    EXCHANGE(T, W, pack_heads)   \
    EXCHANGE(T, W, unpack_tokens)

EXCHANGES(STORAGE, 8)
EXCHANGES(STORAGE, 1)

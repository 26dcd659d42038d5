// Dropout: the factors of src/ops/dropout.rs, which kernels draw wherever they need them, so that no mask is stored.
//
// The elements 4 g..4 g + 4 of a line of a sequence have the four numbers of Philox4x32-10 (src/random.rs) for the key
// of the sequence and the counter {g, site, line, 0}.

// A parameter of kernels, as in src/cuda/dropout.rs. An element whose number is less than `below` becomes 0, the others
// are multiplied by `factor`.
struct Dropout {
    u32 below;
    float factor;
    u32 site;
    u32 first_line;  // added to each line
};

// The dropout of one sequence.
struct Draw {
    u32 key[2];
    Dropout dropout;

    // `keys` [batch, 2].
    __device__ __forceinline__ Draw(const u32 *keys, Dropout dropout, u32 sequence)
        : key{keys[2 * sequence], keys[2 * sequence + 1]}, dropout(dropout) {}

    // Bit i is set if element 4 `group` + i of the line is kept.
    __device__ __forceinline__ u32 kept(u32 line, u32 group) const {
        u32 a = group, b = dropout.site, c = line + dropout.first_line, d = 0, k = key[0], l = key[1];
        // Keeps the keys of the rounds from being computed once for all draws, in 20 registers.
        asm volatile("" : "+r"(k), "+r"(l));
#pragma unroll
        for (int round = 0; round < 10; round++) {
            u64 left = (u64)a * 0xd2511f53u, right = (u64)c * 0xcd9e8d57u;
            a = (u32)(right >> 32) ^ b ^ k, b = (u32)right;
            c = (u32)(left >> 32) ^ d ^ l, d = (u32)left;
            k += 0x9e3779b9u, l += 0xbb67ae85u;
        }
        u32 below = dropout.below;
        return (u32)(a >= below) | (u32)(b >= below) << 1 | (u32)(c >= below) << 2 | (u32)(d >= below) << 3;
    }

    // x *= factors of W elements of a line from `col` on, which is a multiple of W; W is 8 or 1.
    template <int W> __device__ __forceinline__ void multiply(float (&x)[W], u32 line, u32 col) const {
        u32 bits = kept(line, col / 4);
        if constexpr (W == 8)
            bits |= kept(line, col / 4 + 1) << 4;
        else
            bits >>= col % 4;
#pragma unroll
        for (int i = 0; i < W; i++) x[i] *= bits >> i & 1 ? dropout.factor : 0.0f;
    }
};

// Multiplies W elements of row `row` of [batch * seq, n], if anything is dropped: `keys` is not null.
template <int W>
__device__ __forceinline__ void drop_columns(float (&x)[W], const u32 *keys, Dropout dropout, u32 row, u32 seq, u32 col) {
    if (keys) Draw(keys, dropout, row / seq).multiply<W>(x, row % seq, col);
}

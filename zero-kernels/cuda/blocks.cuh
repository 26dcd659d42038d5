// Blocks of codes of 8 or 4 bits: `BlockFormat` of zero-shard, with the bits of its plain loops. A warp has a tile of
// 256 elements, so one, two or four whole blocks of 256, 128 or 64: a scale is a maximum over 32, 16 or 8 lanes. A
// block is read once and written once, 4 bytes at a time (of 4-bit codes 2).
//
// A code is found in a tree of the midpoints in shared memory, node 1 above 2 and 3, which are above 4 to 7 and so on:
// BITS steps of a load, a comparison and an addition. Nodes of a level are adjacent, so its loads conflict in banks
// only below the fifth level; a binary search of the sorted midpoints would have conflicts of 8 threads from the
// fourth step on.

typedef unsigned char u8;

#define NAN_BITS 0x7fc00000u
#define LEAST_NORMAL 0x00800000

// The values of a format's codes.
template <u32 BITS> struct BlockValues { f32 of[1 << BITS]; };

// A format's tables in shared memory.
template <u32 BITS> struct BlockTables {
    f32 values[1 << BITS];
    // The midpoints, from index 1 on.
    f32 tree[1 << BITS];
};

// Fills the tables, by all threads of a block. A midpoint counts for the greater code, unless `ties_down`.
template <u32 BITS>
__device__ __forceinline__ void fill_tables(BlockTables<BITS> &tables, const BlockValues<BITS> &values, bool ties_down) {
    for (u32 node = threadIdx.x; node < 1u << BITS; node += blockDim.x) {
        tables.values[node] = values.of[node];
        if (node == 0) continue;
        u32 level = 31 - __clz(node);
        u32 at = ((2 * (node - (1u << level)) + 1) << (BITS - 1 - level)) - 1;
        float low = values.of[at], high = values.of[at + 1];
        float middle = (float)(((double)low + (double)high) * 0.5);
        if (ties_down) middle = __uint_as_float(__float_as_uint(middle) + (middle < 0.0f ? -1 : 1));
        if (low == high) middle = __uint_as_float(0xff800000u);
        // Only 0 has the code of 0 where values are not negative.
        if (at == 0 && low == 0.0f) middle = __uint_as_float(1u);
        tables.tree[node] = middle;
    }
}

// The code of a value times the block's reciprocal.
template <u32 BITS> __device__ __forceinline__ u32 code_of(const BlockTables<BITS> &tables, float x) {
    u32 node = 1;
#pragma unroll
    for (u32 level = 0; level < BITS; level++) node = 2 * node + (x >= tables.tree[node] ? 1 : 0);
    return node - (1u << BITS);
}

// A format: the elements of a block and the bits of a code.
template <u32 ELEMS_, u32 BITS_> struct Blocks {
    static const u32 ELEMS = ELEMS_;
    static const u32 BITS = BITS_;
    static const u32 BYTES = 4 + ELEMS * BITS / 8;
    static const u32 LANES = ELEMS / GROUP;

    // The address of this thread's block of a tile.
    static __device__ __forceinline__ u8 *of_tile(u8 *blocks, Tile tile) {
        return blocks + (tile.start / ELEMS + threadIdx.x % WARP / LANES) * BYTES;
    }

    // Whether the array has this thread's block.
    static __device__ __forceinline__ bool within(Tile tile) {
        return threadIdx.x % WARP / LANES * ELEMS < tile.count;
    }

    // The place in its block of this thread's element `i`, a multiple of 4, with `place` of an fp32 stream.
    static __device__ __forceinline__ u32 in_block(u32 i) { return place<f32>(i) % ELEMS; }

    // The codes of this thread's elements and the scale of their block, which is within the array.
    static __device__ __forceinline__ float load_codes(const u8 *block, u32 (&codes)[GROUP]) {
#pragma unroll
        for (u32 run = 0; run < GROUP; run += 4) {
            const u8 *at = block + 4 + in_block(run) * BITS / 8;
            u32 word = BITS == 8 ? *reinterpret_cast<const u32 *>(at) : *reinterpret_cast<const u16 *>(at);
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                codes[run + i] = BITS == 8 ? word >> 8 * i & 255 : word >> (8 * (i / 2) + 4 - i % 2 * 4) & 15;
        }
        return *reinterpret_cast<const f32 *>(block);
    }

    static __device__ __forceinline__ void store_codes(u8 *block, float scale, const u32 (&codes)[GROUP]) {
#pragma unroll
        for (u32 run = 0; run < GROUP; run += 4) {
            u8 *at = block + 4 + in_block(run) * BITS / 8;
            const u32 *c = codes + run;
            if (BITS == 8) *reinterpret_cast<u32 *>(at) = c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24;
            else *reinterpret_cast<u16 *>(at) = (u16)(c[0] << 4 | c[1] | c[2] << 12 | c[3] << 8);
        }
        if (threadIdx.x % LANES == 0) *reinterpret_cast<f32 *>(block) = scale;
    }

    // The decoded values of this thread's elements of a tile; 0 outside of the array.
    static __device__ __forceinline__ void load(const u8 *blocks, Tile tile, const BlockTables<BITS> &tables,
                                                f32 (&x)[GROUP]) {
        u32 codes[GROUP] = {};
        float scale = within(tile) ? load_codes(of_tile((u8 *)blocks, tile), codes) : 0.0f;
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = __fmul_rn(tables.values[codes[i]], scale);
    }

    // The scale of this thread's block. All threads of a warp call it.
    static __device__ __forceinline__ float scale_of(const f32 (&x)[GROUP], bool is_signed, bool signed_scale) {
        int magnitude = 0, greatest = 0;
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            int bits = (int)__float_as_uint(x[i]);
            magnitude = max(magnitude, bits & 0x7fffffff);
            greatest = max(greatest, bits);
        }
#pragma unroll
        for (u32 half = LANES / 2; half > 0; half /= 2) {
            magnitude = max(magnitude, (int)__shfl_xor_sync(0xffffffffu, (u32)magnitude, half));
            greatest = max(greatest, (int)__shfl_xor_sync(0xffffffffu, (u32)greatest, half));
        }
        if (magnitude > 0x7f7fffff) return __uint_as_float(NAN_BITS);
        if (!is_signed) magnitude = greatest;
        if (magnitude == 0) return 0.0f;
        bool negative = signed_scale && magnitude > greatest && magnitude >= LEAST_NORMAL;
        return __uint_as_float((u32)max(magnitude, LEAST_NORMAL) | (negative ? 0x80000000u : 0u));
    }

    // Encodes this thread's elements, 0 outside of the array, and returns their block's scale.
    static __device__ __forceinline__ float store(u8 *blocks, Tile tile, const BlockTables<BITS> &tables,
                                                  bool is_signed, bool signed_scale, const f32 (&x)[GROUP],
                                                  u32 (&codes)[GROUP]) {
        float scale = scale_of(x, is_signed, signed_scale);
        bool normal = scale != 0.0f && scale == scale;
        float reciprocal = normal ? __fdiv_rn(1.0f, scale) : 0.0f;
#pragma unroll
        for (int i = 0; i < GROUP; i++) codes[i] = code_of(tables, normal ? __fmul_rn(x[i], reciprocal) : 0.0f);
        if (within(tile)) store_codes(of_tile(blocks, tile), scale, codes);
        return scale;
    }
};

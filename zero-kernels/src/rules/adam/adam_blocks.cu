// Fused AdamW and Adam with moments in blocks of CODE_BITS bits: decoded, updated and encoded in one pass. The bits of
// decoding, adam.cu and encoding. An element with a bf16 gradient and parameter takes 16.06 bytes with 8-bit moments
// (14.13 with 4 bits; 28 in fp32): master read and written (8), moments read and written (4.06 or 2.13), gradient
// read (2), parameter written (2); with remainders 14.06 or 12.13. Beside adam.cu's arithmetic it takes two lookups and 2 CODE_BITS
// steps of searches in shared memory.
//
// adam8_GRAD, adam8_GRAD_PARAM and adam8_remainder_GRAD, and adam4_... Grid: any number of blocks. Streams of
// `span.wide`: 0 master, 1 gradient, 2 parameter; of remainders 0 parameter, 1 remainder, 2 gradient. The first tile
// starts at element 0. The first moment's format has signs, in its scale too, the second's has none.

#define MOMENT_ELEMS (CODE_BITS == 8 ? 256 : 128)
#define PASTE_(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE_(a, b, c)
#define ENTRY(name) PASTE(adam, CODE_BITS, _##name)

typedef Blocks<MOMENT_ELEMS, CODE_BITS> Moments;

// Constants of Adam, and the tables of both moments.
struct AdamBlockConstants {
    AdamConstants adam;
    BlockValues<CODE_BITS> first;
    BlockValues<CODE_BITS> second;
};

struct MomentTables {
    BlockTables<CODE_BITS> first;
    BlockTables<CODE_BITS> second;
};

__device__ __forceinline__ void fill_moments(MomentTables &tables, const AdamBlockConstants &c) {
    fill_tables(tables.first, c.first, false);
    fill_tables(tables.second, c.second, false);
    __syncthreads();
}

// Encodes the moments of a tile.
__device__ __forceinline__ void store_moments(u8 *first, u8 *second, Tile tile, const MomentTables &tables,
                                              f32 (&m)[GROUP], f32 (&v)[GROUP]) {
    u32 codes[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++)
        if (place<f32>(i) >= tile.count) m[i] = 0.0f, v[i] = 0.0f;
    Moments::store(first, tile, tables.first, true, true, m, codes);
    Moments::store(second, tile, tables.second, false, false, v, codes);
}

template <class G, class P, bool HAS_PARAM>
__device__ __forceinline__ void adam_blocks(f32 *master, u8 *first, u8 *second, const G *grad, P *param,
                                            const AdamScalars *scalars, const AdamBlockConstants &c, Span span) {
    __shared__ MomentTables tables;
    AdamScalars s = *scalars;
    if (s.skip) return;
    fill_moments(tables, c);
    float keep = adam_keep(s, c.adam);
    FOR_EACH_TILE(span, tile) {
        f32 w[GROUP] = {}, m[GROUP], v[GROUP];
        G g[GROUP] = {};
        load(master, span, tile, 0, w);
        load(grad, span, tile, 1, g);
        Moments::load(first, tile, tables.first, m);
        Moments::load(second, tile, tables.second, v);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) adam_element(s, c.adam, keep, w[i], m[i], v[i], widen(g[i]));
        store(master, span, tile, 0, w);
        if (HAS_PARAM) {
            P p[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) p[i] = narrow<P>(w[i]);
            trade(p);
            store(param, span, tile, 2, p);
        }
        store_moments(first, second, tile, tables, m, v);
    }
}

template <class G>
__device__ __forceinline__ void adam_blocks_remainder(bf16 *param, u16 *remainder, u8 *first, u8 *second, const G *grad,
                                                      const AdamScalars *scalars, const AdamBlockConstants &c,
                                                      Span span) {
    __shared__ MomentTables tables;
    AdamScalars s = *scalars;
    if (s.skip) return;
    fill_moments(tables, c);
    float keep = adam_keep(s, c.adam);
    FOR_EACH_TILE(span, tile) {
        bf16 p[GROUP] = {};
        u16 r[GROUP] = {};
        f32 m[GROUP], v[GROUP];
        G g[GROUP] = {};
        load(param, span, tile, 0, p);
        load(remainder, span, tile, 1, r);
        load(grad, span, tile, 2, g);
        Moments::load(first, tile, tables.first, m);
        Moments::load(second, tile, tables.second, v);
        trade(p);
        trade(r);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float w = join(p[i], r[i]);
            adam_element(s, c.adam, keep, w, m[i], v[i], widen(g[i]));
            split(w, p[i], r[i]);
        }
        trade(p);
        trade(r);
        store(param, span, tile, 0, p);
        store(remainder, span, tile, 1, r);
        store_moments(first, second, tile, tables, m, v);
    }
}

#define ADAM(G)                                                                                              \
    extern "C" __global__ __launch_bounds__(THREADS) void ENTRY(G)(                                          \
        f32 *master, u8 *first, u8 *second, const G *grad, const AdamScalars *scalars,                       \
        const __grid_constant__ AdamBlockConstants constants, Span span) {                                   \
        adam_blocks<G, f32, false>(master, first, second, grad, nullptr, scalars, constants, span);          \
    }
#define ADAM_PARAM(G, P)                                                                                     \
    extern "C" __global__ __launch_bounds__(THREADS) void ENTRY(G##_##P)(                                    \
        f32 *master, u8 *first, u8 *second, const G *grad, P *param, const AdamScalars *scalars,             \
        const __grid_constant__ AdamBlockConstants constants, Span span) {                                   \
        adam_blocks<G, P, true>(master, first, second, grad, param, scalars, constants, span);               \
    }
#define ADAM_REMAINDER(G)                                                                                    \
    extern "C" __global__ __launch_bounds__(THREADS) void ENTRY(remainder_##G)(                              \
        bf16 *param, u16 *remainder, u8 *first, u8 *second, const G *grad, const AdamScalars *scalars,       \
        const __grid_constant__ AdamBlockConstants constants, Span span) {                                   \
        adam_blocks_remainder(param, remainder, first, second, grad, scalars, constants, span);              \
    }

ADAM(f32)
ADAM(bf16)
ADAM(f16)
ADAM_PARAM(f32, f32)
ADAM_PARAM(f32, bf16)
ADAM_PARAM(f32, f16)
ADAM_PARAM(bf16, f32)
ADAM_PARAM(bf16, bf16)
ADAM_PARAM(bf16, f16)
ADAM_PARAM(f16, f32)
ADAM_PARAM(f16, bf16)
ADAM_PARAM(f16, f16)
ADAM_REMAINDER(f32)
ADAM_REMAINDER(bf16)
ADAM_REMAINDER(f16)

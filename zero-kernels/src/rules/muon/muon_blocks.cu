// The first phase of Muon with its momentum in blocks of CODE_BITS bits: the bits of decoding, muon.cu and encoding.
//
// muon8_GRAD and muon4_GRAD. Grid: any number of blocks. Streams of `span.wide`: 0 direction, 1 gradient. The first
// tile starts at element 0. The format has signs, in its scale too.

#define MOMENTUM_ELEMS (CODE_BITS == 8 ? 256 : 128)
#define PASTE_(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE_(a, b, c)

typedef Blocks<MOMENTUM_ELEMS, CODE_BITS> Momentum;

struct MuonBlockConstants {
    MuonConstants muon;
    BlockValues<CODE_BITS> values;
};

template <class G>
__device__ __forceinline__ void muon_blocks(f32 *direction, u8 *momentum, const G *grad, const MuonScalars *scalars,
                                            const MuonBlockConstants &c, Span span) {
    __shared__ BlockTables<CODE_BITS> tables;
    MuonScalars s = *scalars;
    if (s.skip) return;
    fill_tables(tables, c.values, false);
    __syncthreads();
    FOR_EACH_TILE(span, tile) {
        f32 u[GROUP], m[GROUP];
        G g[GROUP] = {};
        u32 codes[GROUP];
        load(grad, span, tile, 1, g);
        Momentum::load(momentum, tile, tables, m);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            muon_element(s, c.muon, u[i], m[i], widen(g[i]));
            if (place<f32>(i) >= tile.count) m[i] = 0.0f;
        }
        store(direction, span, tile, 0, u);
        Momentum::store(momentum, tile, tables, true, true, m, codes);
    }
}

#define MUON(G)                                                                                                    \
    extern "C" __global__ __launch_bounds__(THREADS) void PASTE(muon, CODE_BITS, _##G)(                            \
        f32 *direction, u8 *momentum, const G *grad, const MuonScalars *scalars,                                   \
        const __grid_constant__ MuonBlockConstants constants, Span span) {                                         \
        muon_blocks(direction, momentum, grad, scalars, constants, span);                                          \
    }

MUON(f32)
MUON(bf16)
MUON(f16)

// The element-wise phases of Muon. Host version: host.rs; the formula and its sources are in mod.rs.
//
// muon_GRAD writes the direction: 14 bytes an element with bf16 gradients, the momentum read and written, the gradient
// read, the direction written. Grid: any number of blocks; Span::blocks has one warp per tile. Streams of `span.wide`:
// 0 direction, 1 momentum, 2 gradient.

template <class G>
__device__ __forceinline__ void muon(f32 *direction, f32 *momentum, const G *grad, const MuonScalars *scalars,
                                     MuonConstants c, Span span) {
    MuonScalars s = *scalars;
    if (s.skip) return;
    FOR_EACH_TILE(span, tile) {
        f32 u[GROUP], m[GROUP];
        G g[GROUP];
        load(momentum, span, tile, 1, m);
        load(grad, span, tile, 2, g);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) muon_element(s, c, u[i], m[i], widen(g[i]));
        store(direction, span, tile, 0, u);
        store(momentum, span, tile, 1, m);
    }
}

#define MUON(G)                                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS) void muon_##G(f32 *direction, f32 *momentum, const G *grad, \
                                                                   const MuonScalars *scalars,                 \
                                                                   MuonConstants constants, Span span) {       \
        muon(direction, momentum, grad, scalars, constants, span);                                            \
    }

MUON(f32)
MUON(bf16)
MUON(f16)

// muon_apply and muon_apply_PARAM subtract the orthogonalised update from masters; muon_apply_PARAM also writes the
// parameter, rounded to its dtype. Streams: 0 master, 1 update, 2 parameter.

struct ApplyConstants {
    float weight_decay;
};

__device__ __forceinline__ float applied(MuonScalars s, ApplyConstants c, float w, float update) {
    float keep = __fsub_rn(1.0f, __fmul_rn(s.lr, c.weight_decay));
    return __fmaf_rn(-s.lr, update, __fmul_rn(w, keep));
}

template <class P, bool HAS_PARAM>
__device__ __forceinline__ void muon_apply(f32 *master, const f32 *update, P *param, const MuonScalars *scalars,
                                           ApplyConstants c, Span span) {
    MuonScalars s = *scalars;
    if (s.skip) return;
    FOR_EACH_TILE(span, tile) {
        f32 w[GROUP], o[GROUP];
        P p[GROUP];
        load(master, span, tile, 0, w);
        load(update, span, tile, 1, o);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            w[i] = applied(s, c, w[i], o[i]);
            if (HAS_PARAM) p[i] = narrow<P>(w[i]);
        }
        store(master, span, tile, 0, w);
        if (HAS_PARAM) {
            trade(p);
            store(param, span, tile, 2, p);
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void muon_apply(f32 *master, const f32 *update,
                                                                 const MuonScalars *scalars, ApplyConstants constants,
                                                                 Span span) {
    muon_apply<f32, false>(master, update, nullptr, scalars, constants, span);
}

#define MUON_APPLY(P)                                                                                         \
    extern "C" __global__ __launch_bounds__(THREADS) void muon_apply_##P(f32 *master, const f32 *update, P *param, \
                                                                         const MuonScalars *scalars,           \
                                                                         ApplyConstants constants, Span span) { \
        muon_apply<P, true>(master, update, param, scalars, constants, span);                                 \
    }

MUON_APPLY(f32)
MUON_APPLY(bf16)
MUON_APPLY(f16)

// muon_apply_remainder: the weights are bf16 parameters and remainders. Streams: 0 parameter, 1 remainder, 2 update.
extern "C" __global__ __launch_bounds__(THREADS) void muon_apply_remainder(bf16 *param, u16 *remainder,
                                                                           const f32 *update,
                                                                           const MuonScalars *scalars,
                                                                           ApplyConstants constants, Span span) {
    MuonScalars s = *scalars;
    if (s.skip) return;
    FOR_EACH_TILE(span, tile) {
        bf16 p[GROUP];
        u16 r[GROUP];
        f32 o[GROUP];
        load(param, span, tile, 0, p);
        load(remainder, span, tile, 1, r);
        load(update, span, tile, 2, o);
        trade(p);
        trade(r);
#pragma unroll
        for (int i = 0; i < GROUP; i++) split(applied(s, constants, join(p[i], r[i]), o[i]), p[i], r[i]);
        trade(p);
        trade(r);
        store(param, span, tile, 0, p);
        store(remainder, span, tile, 1, r);
    }
}

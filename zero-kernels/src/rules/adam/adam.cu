// Fused AdamW and Adam: unscale, clip, decay, moments, update and narrowing in one pass over memory.
// Host version: host.rs; the formula and its sources are in mod.rs. 28 bytes an element with bf16 gradients and
// parameters: fp32 master and moments read and written (24), gradient read (2), parameter written (2).
//
// adam_GRAD: the master is the parameter. adam_GRAD_PARAM: also writes the parameter, rounded to its dtype. Grid: any
// number of blocks; Span::blocks has one warp per tile. Streams of `span.wide`: 0 master, 1 first moment, 2 second
// moment, 3 gradient, 4 parameter. Three blocks per multiprocessor leave enough registers for the loads of a tile,
// without spills.

template <class G, class P, bool HAS_PARAM>
__device__ __forceinline__ void adam(f32 *master, f32 *first_moment, f32 *second_moment, const G *grad, P *param,
                                     const AdamScalars *scalars, AdamConstants c, Span span) {
    AdamScalars s = *scalars;
    if (s.skip) return;
    float keep = adam_keep(s, c);
    FOR_EACH_TILE(span, tile) {
        f32 w[GROUP], m[GROUP], v[GROUP];
        G g[GROUP];
        P p[GROUP];
        load(master, span, tile, 0, w);
        load(first_moment, span, tile, 1, m);
        load(second_moment, span, tile, 2, v);
        load(grad, span, tile, 3, g);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            adam_element(s, c, keep, w[i], m[i], v[i], widen(g[i]));
            if (HAS_PARAM) p[i] = narrow<P>(w[i]);
        }
        store(master, span, tile, 0, w);
        store(first_moment, span, tile, 1, m);
        store(second_moment, span, tile, 2, v);
        if (HAS_PARAM) {
            trade(p);
            store(param, span, tile, 4, p);
        }
    }
}

#define ADAM(G)                                                                                                    \
    extern "C" __global__ __launch_bounds__(THREADS, 3) void adam_##G(                                                \
        f32 *master, f32 *first_moment, f32 *second_moment, const G *grad, const AdamScalars *scalars,             \
        AdamConstants constants, Span span) {                                                                      \
        adam<G, f32, false>(master, first_moment, second_moment, grad, nullptr, scalars, constants, span);         \
    }
#define ADAM_PARAM(G, P)                                                                                           \
    extern "C" __global__ __launch_bounds__(THREADS, 3) void adam_##G##_##P(                                          \
        f32 *master, f32 *first_moment, f32 *second_moment, const G *grad, P *param, const AdamScalars *scalars,   \
        AdamConstants constants, Span span) {                                                                      \
        adam<G, P, true>(master, first_moment, second_moment, grad, param, scalars, constants, span);              \
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

// AdamW and Adam on weights stored as a bf16 parameter and a 16-bit remainder: together exactly fp32, with no
// separate master. 26 bytes an element with bf16 gradients: parameter, remainder and fp32 moments read and written
// (24), gradient read (2). Host version: remainder.rs; the format is in src/codec.rs.
//
// adam_remainder_GRAD. Streams of `span.wide`: 0 parameter, 1 remainder, 2 first moment, 3 second moment, 4 gradient.

template <class G>
__device__ __forceinline__ void adam_remainder(bf16 *param, u16 *remainder, f32 *first_moment, f32 *second_moment,
                                               const G *grad, const AdamScalars *scalars, AdamConstants c,
                                               Span span) {
    AdamScalars s = *scalars;
    if (s.skip) return;
    float keep = adam_keep(s, c);
    FOR_EACH_TILE(span, tile) {
        bf16 p[GROUP];
        u16 r[GROUP];
        f32 m[GROUP], v[GROUP];
        G g[GROUP];
        load(param, span, tile, 0, p);
        load(remainder, span, tile, 1, r);
        load(first_moment, span, tile, 2, m);
        load(second_moment, span, tile, 3, v);
        load(grad, span, tile, 4, g);
        trade(p);
        trade(r);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float w = join(p[i], r[i]);
            adam_element(s, c, keep, w, m[i], v[i], widen(g[i]));
            split(w, p[i], r[i]);
        }
        trade(p);
        trade(r);
        store(param, span, tile, 0, p);
        store(remainder, span, tile, 1, r);
        store(first_moment, span, tile, 2, m);
        store(second_moment, span, tile, 3, v);
    }
}

#define ADAM_REMAINDER(G)                                                                                          \
    extern "C" __global__ __launch_bounds__(THREADS, 3) void adam_remainder_##G(                                      \
        bf16 *param, u16 *remainder, f32 *first_moment, f32 *second_moment, const G *grad,                         \
        const AdamScalars *scalars, AdamConstants constants, Span span) {                                          \
        adam_remainder(param, remainder, first_moment, second_moment, grad, scalars, constants, span);             \
    }

ADAM_REMAINDER(f32)
ADAM_REMAINDER(bf16)
ADAM_REMAINDER(f16)

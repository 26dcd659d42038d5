// Fused AdamW and Adam: unscale, clip, decay, moments, update and narrowing in one pass over memory.
// Host version: src/host/adam.rs, with the formula and its sources. 28 bytes an element with bf16 gradients and
// parameters: fp32 master and moments read and written (24), gradient read (2), parameter written (2).
//
// adam_GRAD: the master is the parameter. adam_GRAD_PARAM: also writes the parameter, rounded to its dtype. Grid: any
// number of blocks; Span::blocks has one warp per tile. Streams of `span.wide`: 0 master, 1 first moment, 2 second
// moment, 3 gradient, 4 parameter. Three blocks per multiprocessor leave enough registers for the loads of a tile,
// without spills.

template <class G, class P, bool HAS_PARAM>
__device__ __forceinline__ void adam(f32 *master, f32 *first_moment, f32 *second_moment, const G *grad, P *param,
                                     const StepScalars *scalars, AdamConstants c, Span span) {
    StepScalars s = *scalars;
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
        f32 *master, f32 *first_moment, f32 *second_moment, const G *grad, const StepScalars *scalars,             \
        AdamConstants constants, Span span) {                                                                      \
        adam<G, f32, false>(master, first_moment, second_moment, grad, nullptr, scalars, constants, span);         \
    }
#define ADAM_PARAM(G, P)                                                                                           \
    extern "C" __global__ __launch_bounds__(THREADS, 3) void adam_##G##_##P(                                          \
        f32 *master, f32 *first_moment, f32 *second_moment, const G *grad, P *param, const StepScalars *scalars,   \
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

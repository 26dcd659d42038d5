// acc[i] += grad[i] in fp32. Host version: src/host/accumulate.rs.
//
// accumulate_GRAD. Streams of `span.wide`: 0 grad, 1 acc.

template <class G>
__device__ __forceinline__ void accumulate(const G *grad, f32 *acc, Span span) {
    FOR_EACH_TILE(span, tile) {
        G g[GROUP];
        f32 a[GROUP];
        load(grad, span, tile, 0, g);
        load(acc, span, tile, 1, a);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) a[i] = __fadd_rn(a[i], widen(g[i]));
        store(acc, span, tile, 1, a);
    }
}

#define ACCUMULATE(G)                                                                                             \
    extern "C" __global__ __launch_bounds__(THREADS) void accumulate_##G(const G *grad, f32 *acc, Span span) {    \
        accumulate(grad, acc, span);                                                                              \
    }

ACCUMULATE(f32)
ACCUMULATE(bf16)
ACCUMULATE(f16)

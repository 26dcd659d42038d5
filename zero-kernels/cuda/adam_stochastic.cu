// AdamW and Adam on bf16 weights without masters: the new weight is rounded stochastically, keyed by (seed, step,
// element), so that no rank count or shard changes it. Host twin: src/host/stochastic.rs.
//
// adam_stochastic_GRAD; `key` mixes seed and step (host: random::key), `first_element` is the number of the range's
// first element in the whole model. Streams of `span.wide`: 0 weights, 1 first moment, 2 second moment, 3 gradient.

template <class G>
__device__ __forceinline__ void adam_stochastic(bf16 *weights, f32 *first_moment, f32 *second_moment, const G *grad,
                                                const StepScalars *scalars, AdamConstants c, u64 key,
                                                u64 first_element, Span span) {
    StepScalars s = *scalars;
    if (s.skip) return;
    float keep = adam_keep(s, c);
    FOR_EACH_TILE(span, tile) {
        bf16 b[GROUP];
        f32 m[GROUP], v[GROUP];
        G g[GROUP];
        load(weights, span, tile, 0, b);
        load(first_moment, span, tile, 1, m);
        load(second_moment, span, tile, 2, v);
        load(grad, span, tile, 3, g);
        trade(b);
        trade(g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float w = widen(b[i]);
            adam_element(s, c, keep, w, m[i], v[i], widen(g[i]));
            b[i] = narrow_stochastic(w, random_bits(key, first_element + tile.start + place<f32>(i)));
        }
        trade(b);
        store(weights, span, tile, 0, b);
        store(first_moment, span, tile, 1, m);
        store(second_moment, span, tile, 2, v);
    }
}

#define ADAM_STOCHASTIC(G)                                                                                         \
    extern "C" __global__ __launch_bounds__(THREADS, 3) void adam_stochastic_##G(                                     \
        bf16 *weights, f32 *first_moment, f32 *second_moment, const G *grad, const StepScalars *scalars,           \
        AdamConstants constants, u64 key, u64 first_element, Span span) {                                          \
        adam_stochastic(weights, first_moment, second_moment, grad, scalars, constants, key, first_element, span); \
    }

ADAM_STOCHASTIC(f32)
ADAM_STOCHASTIC(bf16)
ADAM_STOCHASTIC(f16)

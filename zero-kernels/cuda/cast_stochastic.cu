// dst[i] = src[i] * scale as bf16, rounded stochastically, keyed by (seed, step, element).
// Host twin: src/host/stochastic.rs.
//
// cast_stochastic. Streams of `span.wide`: 0 src, 1 dst.

extern "C" __global__ __launch_bounds__(THREADS) void cast_stochastic(const f32 *src, bf16 *dst, float scale, u64 key,
                                                                      u64 first_element, Span span) {
    FOR_EACH_TILE(span, tile) {
        f32 x[GROUP];
        bf16 y[GROUP];
        load(src, span, tile, 0, x);
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            y[i] = narrow_stochastic(__fmul_rn(x[i], scale), random_bits(key, first_element + tile.start + place<f32>(i)));
        trade(y);
        store(dst, span, tile, 1, y);
    }
}

// x / max(norm, least), divided in fp64 and rounded to fp32 and then to bf16; NaN if an element of x is not finite. `stats`
// are those of grad_stats.cu for x. Host version: `plain` of tests/launch/newton_schulz_cuda.rs.

struct GradStats {
    double sum_sq;
    u64 nonfinite;
};

extern "C" __global__ __launch_bounds__(THREADS) void normalise_bf16(bf16 *x, const GradStats *stats, double least,
                                                                     Span span) {
    double norm = __dsqrt_rn(stats->sum_sq);
    norm = norm < least ? least : norm;
    bool finite = stats->nonfinite == 0;
    FOR_EACH_TILE(span, tile) {
        bf16 y[GROUP];
        load(x, span, tile, 0, y);
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            y[i] = narrow<bf16>(finite ? (float)((double)widen(y[i]) / norm) : __uint_as_float(0x7fc00000u));
        store(x, span, tile, 0, y);
    }
}

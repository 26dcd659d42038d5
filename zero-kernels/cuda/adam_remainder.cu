// AdamW and Adam on weights stored as a bf16 parameter and a 16-bit remainder: together exactly fp32, with no
// separate master. 26 bytes an element with bf16 gradients: parameter, remainder and fp32 moments read and written
// (24), gradient read (2). Host version: src/host/remainder.rs, which describes the format.
//
// adam_remainder_GRAD. Streams of `span.wide`: 0 parameter, 1 remainder, 2 first moment, 3 second moment, 4 gradient.

template <class G>
__device__ __forceinline__ void adam_remainder(bf16 *param, u16 *remainder, f32 *first_moment, f32 *second_moment,
                                               const G *grad, const StepScalars *scalars, AdamConstants c,
                                               Span span) {
    StepScalars s = *scalars;
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
            // The remainder is signed: (parameter << 16) + remainder.
            u32 joined = ((u32)p[i].bits << 16) + (u32)(int)(short)r[i];
            float w = __uint_as_float(joined);
            adam_element(s, c, keep, w, m[i], v[i], widen(g[i]));
            u32 bits = __float_as_uint(w);
            if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
            p[i].bits = (u16)((bits + 0x8000u) >> 16);
            r[i] = (u16)bits;
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
        const StepScalars *scalars, AdamConstants constants, Span span) {                                          \
        adam_remainder(param, remainder, first_moment, second_moment, grad, scalars, constants, span);             \
    }

ADAM_REMAINDER(f32)
ADAM_REMAINDER(bf16)
ADAM_REMAINDER(f16)

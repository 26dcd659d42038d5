// Packs parts of a unit into a bucket: dst has `count` segments of `len` elements; segment q has the elements of the unit from
// start + q * stride on. Each is rounded to nearest even, or 0 where no part has it. Host version: src/host/pack.rs.
//
// pack_SRC_DST. A block packs PACK_ELEMS elements of one segment, a thread GROUP of them, so that a division by the length of a
// segment is needed once a block. Parts ascend. Elements of the unit outside `from`..`until` belong to another launch.

#define PACK_ELEMS (THREADS * GROUP)

struct Segments {
    u64 start;
    u64 len;
    u64 stride;
    u64 count;
    u64 from;
    u64 until;
};

template <class S, class D>
__device__ __forceinline__ void pack_parts(const Ranges &parts, D *dst, const Segments &s) {
    u64 blocks = (s.len + PACK_ELEMS - 1) / PACK_ELEMS;
    for (u64 block = blockIdx.x; block < blocks * s.count; block += gridDim.x) {
        u64 segment = block / blocks, in = block % blocks * PACK_ELEMS + threadIdx.x * GROUP;
        if (in >= s.len) continue;
        u64 unit = s.start + segment * s.stride + in;
        D *to = dst + segment * s.len + in;
        u32 part = range_of(parts, unit);
        u64 first = parts.of[part].first;
        const S *src = (const S *)parts.of[part].at + (unit - first);
        bool whole = in + GROUP <= s.len && unit >= first && unit - first + GROUP <= parts.of[part].len &&
                     unit >= s.from && unit + GROUP <= s.until;
        if (whole && ((u64)src | (u64)to) % 16 == 0) {
            S x[GROUP];
            D y[GROUP];
            load_wide(src, x);
#pragma unroll
            for (int i = 0; i < GROUP; i++) y[i] = narrow<D>(widen(x[i]));
            store_wide(to, y);
            continue;
        }
        for (u32 i = 0; i < GROUP && in + i < s.len; i++) {
            u64 elem = unit + i;
            if (elem < s.from || elem >= s.until) continue;
            while (part + 1 < parts.count && parts.of[part + 1].first <= elem) part++;
            u64 at = elem - parts.of[part].first;
            // `at` wraps to a large number before the first part.
            to[i] = narrow<D>(at < parts.of[part].len ? widen(((const S *)parts.of[part].at)[at]) : 0.0f);
        }
    }
}

#define PACK(S, D)                                                                                          \
    extern "C" __global__ __launch_bounds__(THREADS) void pack_##S##_##D(const __grid_constant__ Ranges parts, \
                                                                         D *dst,                            \
                                                                         const __grid_constant__ Segments s) { \
        pack_parts<S, D>(parts, dst, s);                                                                    \
    }

PACK(f32, f32)
PACK(f32, bf16)
PACK(f32, f16)
PACK(bf16, f32)
PACK(bf16, bf16)
PACK(bf16, f16)
PACK(f16, f32)
PACK(f16, bf16)
PACK(f16, f16)

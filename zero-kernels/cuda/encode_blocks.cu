// Encodes an array into blocks, with the error of the last encoding added, and with sums of squares of the errors.
// Host version: encode_blocks of src/host/coded.rs. Each element of the source is read once (4 or 2 bytes) and each
// block written once (1.02 bytes an element, of 4 bits 0.53 or 0.56); with feedback the error is read and written (8).
//
// encode_blocks_ELEMS_BITS_SRC. Grid: a block for each SUM_ELEMS elements, and its entry of the sums; warp w has tiles
// w, w + 8, ... of it. Streams of `span.wide`: 0 source, 1 error. Without feedback `error` is null, without sums `sums`.
// An element takes BITS steps of the search, and with feedback or sums one lookup more.
//
// Order of a sum: the squares of a thread's elements of a tile are added pairwise, then tile by tile, then those of the
// lanes pairwise, then those of the warps.

#define SUM_ELEMS 16384
#define SUM_WARPS (THREADS / WARP)

struct EncodeFlags {
    u32 is_signed;
    u32 signed_scale;
    u32 ties_down;
    float keep;
    // The format's bound of errors, relative to the scale.
    float bound;
};

struct EncodeSums {
    double error_sq;
    double bound_sq;
    double value_sq;
};

__device__ __forceinline__ double add_group(double (&x)[GROUP]) {
#pragma unroll
    for (u32 half = GROUP / 2; half > 0; half /= 2)
#pragma unroll
        for (u32 i = 0; i < half; i++) x[i] = __dadd_rn(x[i], x[i + half]);
    return x[0];
}

__device__ __forceinline__ double square(double x) { return __dmul_rn(x, x); }

// The sum over the threads of the block, in thread 0.
__device__ __forceinline__ double add_threads(double x) {
    __shared__ double of_warps[SUM_WARPS];
    static_assert(SUM_WARPS == GROUP, "added by the same function");
#pragma unroll
    for (u32 half = WARP / 2; half > 0; half /= 2) x = __dadd_rn(x, __shfl_down_sync(0xffffffffu, x, half));
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
    __syncthreads();
    double sum = threadIdx.x == 0 ? add_group(of_warps) : 0.0;
    __syncthreads();
    return sum;
}

template <class B, class S>
__device__ __forceinline__ void encode_blocks(const S *src, u8 *blocks, f32 *error, EncodeSums *sums,
                                              const EncodeFlags &flags, const BlockValues<B::BITS> &values, Span span) {
    __shared__ BlockTables<B::BITS> tables;
    fill_tables(tables, values, flags.ties_down);
    __syncthreads();
    double error_sq = 0.0, bound_sq = 0.0, value_sq = 0.0;
    u64 first = (u64)blockIdx.x * (SUM_ELEMS / TILE_ELEMS), count = tile_count(span);
    u64 end = min(first + SUM_ELEMS / TILE_ELEMS, count);
#pragma unroll 1
    for (u64 index = first + threadIdx.x / WARP; index < end; index += SUM_WARPS) {
        Tile tile = tile_at(span, index);
        S s[GROUP] = {};
        f32 x[GROUP], e[GROUP] = {};
        u32 codes[GROUP];
        load(src, span, tile, 0, s);
        if (error) load(error, span, tile, 1, e);
        trade(s);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            x[i] = widen(s[i]);
            if (error) x[i] = __fadd_rn(x[i], e[i]);
            if (place<f32>(i) >= tile.count) x[i] = 0.0f;
        }
        float scale = B::store(blocks, tile, tables, flags.is_signed, flags.signed_scale, x, codes);
        if (!error && !sums) continue;

        f32 decoded[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) decoded[i] = __fmul_rn(tables.values[codes[i]], scale);
        if (error) {
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                float missing = __fsub_rn(x[i], decoded[i]);
                bool finite = (__float_as_uint(missing) & 0x7f800000u) != 0x7f800000u;
                float part = __fmul_rn(__fsub_rn(1.0f, flags.keep), finite ? missing : 0.0f);
                e[i] = __fmaf_rn(flags.keep, e[i], part);
            }
            store(error, span, tile, 1, e);
        }
        if (sums && scale == scale) {
            double errors[GROUP], squares[GROUP];
            u32 elems = 0;
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                bool within = place<f32>(i) < tile.count;
                elems += within;
                errors[i] = within ? square(__dsub_rn((double)x[i], (double)decoded[i])) : 0.0;
                squares[i] = square((double)x[i]);
            }
            error_sq = __dadd_rn(error_sq, add_group(errors));
            value_sq = __dadd_rn(value_sq, add_group(squares));
            double most = __dmul_rn((double)flags.bound, (double)fabsf(scale));
            bound_sq = __dadd_rn(bound_sq, __dmul_rn(square(most), (double)elems));
        }
    }
    if (!sums) return;
    error_sq = add_threads(error_sq);
    bound_sq = add_threads(bound_sq);
    value_sq = add_threads(value_sq);
    if (threadIdx.x == 0) {
        EncodeSums old = sums[blockIdx.x];
        sums[blockIdx.x] = {__dadd_rn(old.error_sq, error_sq), __dadd_rn(old.bound_sq, bound_sq),
                            __dadd_rn(old.value_sq, value_sq)};
    }
}

#define ENCODE(ELEMS, BITS, S)                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS) void encode_blocks_##ELEMS##_##BITS##_##S(              \
        const S *src, u8 *blocks, f32 *error, EncodeSums *sums, EncodeFlags flags,                           \
        const __grid_constant__ BlockValues<BITS> values, Span span) {                                       \
        encode_blocks<Blocks<ELEMS, BITS>, S>(src, blocks, error, sums, flags, values, span);                \
    }

ENCODE(256, 8, f32)
ENCODE(256, 8, bf16)
ENCODE(256, 8, f16)
ENCODE(128, 4, f32)
ENCODE(128, 4, bf16)
ENCODE(128, 4, f16)
ENCODE(64, 4, f32)
ENCODE(64, 4, bf16)
ENCODE(64, 4, f16)

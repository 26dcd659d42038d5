// Writes the sum of arrays in blocks, one after another in memory: in fp32, in their order. Host version:
// decode_blocks of src/host/coded.rs. Each block is read once (1.02 bytes an element and array, of 4 bits 0.53 or
// 0.56), each element written once (4 or 2 bytes).
//
// decode_blocks_ELEMS_BITS_DST. Grid: any number of blocks. Streams of `span.wide`: 0 destination. An element takes a
// lookup in shared memory for each array.

template <class B, class D>
__device__ __forceinline__ void decode_blocks(const u8 *blocks, u64 parts, D *dst,
                                              const BlockValues<B::BITS> &values, Span span) {
    __shared__ f32 table[1 << B::BITS];
    for (u32 code = threadIdx.x; code < 1u << B::BITS; code += THREADS) table[code] = values.of[code];
    __syncthreads();
    u64 bytes = (span.len + B::ELEMS - 1) / B::ELEMS * B::BYTES;
    FOR_EACH_TILE(span, tile) {
        f32 sum[GROUP] = {};
        for (u64 part = 0; part < parts && B::within(tile); part++) {
            u32 codes[GROUP];
            float scale = B::load_codes(B::of_tile((u8 *)blocks + part * bytes, tile), codes);
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                float value = __fmul_rn(table[codes[i]], scale);
                sum[i] = part == 0 ? value : __fadd_rn(sum[i], value);
            }
        }
        D out[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) out[i] = narrow<D>(sum[i]);
        trade(out);
        store(dst, span, tile, 0, out);
    }
}

#define DECODE(ELEMS, BITS, D)                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS) void decode_blocks_##ELEMS##_##BITS##_##D(              \
        const u8 *blocks, u64 parts, D *dst, const __grid_constant__ BlockValues<BITS> values, Span span) {  \
        decode_blocks<Blocks<ELEMS, BITS>, D>(blocks, parts, dst, values, span);                             \
    }

DECODE(256, 8, f32)
DECODE(256, 8, bf16)
DECODE(256, 8, f16)
DECODE(128, 4, f32)
DECODE(128, 4, bf16)
DECODE(128, 4, f16)
DECODE(64, 4, f32)
DECODE(64, 4, bf16)
DECODE(64, 4, f16)

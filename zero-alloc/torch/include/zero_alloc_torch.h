/* zero-alloc's arena as an allocator of PyTorch. README.md shows how to use it from Python.
 *
 * Every function may be called by any thread. No function throws: a failure is printed to stderr, kept for
 * zero_torch_last_error, and returned as null or -1. `stream` is a cudaStream_t (or CUstream) of the device's primary
 * context, also one of the default streams (0, cudaStreamLegacy, cudaStreamPerThread).
 *
 * In a process that was forked after the first call, CUDA does not work. There functions that free or end something do
 * nothing, since it is the parent's, and all others fail; none waits for a lock. */
#ifndef ZERO_ALLOC_TORCH_H
#define ZERO_ALLOC_TORCH_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Allocates `size` bytes, aligned to 256, for use on `stream`: what is enqueued there from now on runs after the earlier
 * users of the memory. Null if size is 0, and on failure (see zero_torch_abort_on_failure). */
void *zero_torch_malloc(ssize_t size, int device, void *stream);

/* Frees a block. The next user of its memory runs after what the stream of the allocation, and the streams of
 * zero_torch_record_stream, have enqueued so far. Those streams must live, or have been announced to
 * zero_torch_forget_stream; afterwards they are not touched for this block. `size` and `stream` are not used. Null is
 * ignored. Freeing twice, or an unknown pointer, is a failure that changes nothing. */
void zero_torch_free(void *ptr, ssize_t size, int device, void *stream);

/* `stream` uses the block, up to the moment when it is freed. */
void zero_torch_record_stream(void *ptr, void *stream);

/* To be called before a stream is destroyed on which blocks are live. PyTorch never destroys the streams of its pool.
 * Without this call zero_torch_free hands the driver a destroyed handle, which CUDA leaves undefined; where the driver
 * reports it, or has reused the handle (CUDA 12 and later), zero_torch_free waits for the whole device. Returns 0. */
int zero_torch_forget_stream(int device, void *stream);

/* Returns the free end of each arena to its device, for torch.cuda.empty_cache. Waits at most a second for its users. */
void zero_torch_empty_cache(void);

/* The limit of an arena's reserved bytes, the device's memory by default. Only before the first allocation. 0 or -1. */
int zero_torch_set_budget(int device, uint64_t bytes);
void zero_torch_set_memory_fraction(double fraction, int device);

/* With 1 a failed allocation ends the process with SIGABRT, behind the message. For PyTorch's whole-process path, which
 * does not check for null: the next kernel would write to address 0 and be reported elsewhere. */
void zero_torch_abort_on_failure(int abort);

/* Graph pools, as CUDAPluggableAllocator calls them: MempoolId_t is a std::pair of two 64-bit numbers, and the filter a
 * std::function, which the ABI of C++ passes by address. Blocks that are allocated while their stream is recorded stay
 * allocated until their pool is released as often as it was begun, which waits for the device; one that is freed later is
 * returned at once, after the same wait. */
typedef struct zero_torch_pool_id {
    uint64_t first;
    uint64_t second;
} zero_torch_pool_id;
void zero_torch_begin_graph_pool(int device, zero_torch_pool_id id, void *filter);
void zero_torch_end_graph_pool(int device, zero_torch_pool_id id);
void zero_torch_release_graph_pool(int device, zero_torch_pool_id id);

/* Fields are only ever added at the end. */
typedef struct zero_torch_statistics {
    uint64_t size;                /* in: sizeof this structure; out: the bytes that were written */
    uint64_t live_bytes;          /* requested by live blocks */
    uint64_t peak_live_bytes;     /* an upper bound if several threads allocate at once */
    uint64_t reserved_bytes;      /* from the device */
    uint64_t peak_reserved_bytes; /* as seen by this function and zero_torch_empty_cache */
    uint64_t free_bytes;          /* reserved and in no block */
    uint64_t largest_free_bytes;  /* the largest contiguous part of free_bytes */
    uint64_t budget_bytes;        /* the limit of reserved_bytes */
    uint64_t blocks;              /* live */
    uint64_t allocations;         /* so far, as all below */
    uint64_t frees;
    uint64_t out_of_memory;
    uint64_t stitched_pages;
    uint64_t moved_bytes;         /* 0: blocks do not move */
} zero_torch_statistics;
int zero_torch_get_statistics(int device, zero_torch_statistics *statistics);

/* Writes a map of the arena. 0 or -1. */
int zero_torch_write_svg(int device, const char *path);

/* Copies the text of the calling thread's last failure, cut to `bytes` with its zero. Returns its whole length; 0 if no
 * call has failed. */
size_t zero_torch_last_error(char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif

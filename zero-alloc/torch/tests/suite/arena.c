/* Threads that allocate, write, read, free and reuse memory of the arena on many streams:
 *   arena THREADS ROUNDS
 * A block is filled on its home stream and copied to the host on another stream, and freed while both may still be
 * pending. If the arena gave its memory to others too early, the copy has their bytes. Prints the counts, exits with 1 at
 * the first difference. The driver is found at run time, like the arena does. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zero_alloc_torch.h"

#define STREAMS 3
#define PENDING 8
#define MAX_BYTES 60000
/* Blocks of at least this many bytes have pages of their own. */
#define LARGE_BYTES (3 << 20)

typedef void *handle;
typedef unsigned long long address;

static int (*device_get)(int *, int);
static int (*retain)(handle *, int);
static int (*set_current)(handle);
static int (*stream_create)(handle *, unsigned);
static int (*stream_destroy)(handle);
static int (*stream_synchronize)(handle);
static int (*stream_wait)(handle, handle, unsigned);
static int (*event_create)(handle *, unsigned);
static int (*event_record)(handle, handle);
static int (*event_destroy)(handle);
static int (*fill)(address, unsigned char, size_t, handle);
static int (*copy_to_host)(void *, address, size_t, handle);
static int (*host_alloc)(void **, size_t, unsigned);

static handle context;
static int rounds;

static void check(int code, const char *what) {
    if (code != 0) {
        fprintf(stderr, "%s: error %d\n", what, code);
        exit(1);
    }
}

static void *function(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    int (*init)(unsigned) = (int (*)(unsigned))function(library, "cuInit");
    *(void **)&device_get = function(library, "cuDeviceGet");
    *(void **)&retain = function(library, "cuDevicePrimaryCtxRetain");
    *(void **)&set_current = function(library, "cuCtxSetCurrent");
    *(void **)&stream_create = function(library, "cuStreamCreate");
    *(void **)&stream_destroy = function(library, "cuStreamDestroy_v2");
    *(void **)&stream_synchronize = function(library, "cuStreamSynchronize");
    *(void **)&stream_wait = function(library, "cuStreamWaitEvent");
    *(void **)&event_create = function(library, "cuEventCreate");
    *(void **)&event_record = function(library, "cuEventRecord");
    *(void **)&event_destroy = function(library, "cuEventDestroy_v2");
    *(void **)&fill = function(library, "cuMemsetD8Async");
    *(void **)&copy_to_host = function(library, "cuMemcpyDtoHAsync_v2");
    *(void **)&host_alloc = function(library, "cuMemHostAlloc");
    /* Only the stand-in has it, and only it needs it. */
    int (*accept)(void) = (int (*)(void))dlsym(library, "standInAcceptDefaultStreams");
    int device;
    check(init(0), "cuInit");
    check(device_get(&device, 0), "cuDeviceGet");
    check(retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
    if (accept) check(accept(), "standInAcceptDefaultStreams");
}

/* A copy that is pending on `reader`, with the bytes that it must have. */
struct copy {
    handle reader;
    unsigned char *bytes;
    size_t size;
    unsigned char value;
};

static void verify(struct copy *copy) {
    if (copy->size == 0) return;
    check(stream_synchronize(copy->reader), "cuStreamSynchronize");
    for (size_t i = 0; i < copy->size; i++) {
        if (copy->bytes[i] != copy->value) {
            fprintf(stderr, "byte %zu of %zu is %u, not %u\n", i, copy->size, copy->bytes[i], copy->value);
            exit(1);
        }
    }
    copy->size = 0;
}

static void *work(void *number) {
    unsigned thread = (unsigned)(size_t)number;
    unsigned long long random = thread * 7919 + 1;
    check(set_current(context), "cuCtxSetCurrent");
    /* The default streams are of all threads, and of this thread. */
    handle streams[STREAMS + 2] = {0};
    streams[0] = (handle)0;
    streams[1] = (handle)2;
    for (int i = 0; i < STREAMS; i++) check(stream_create(&streams[2 + i], 1), "cuStreamCreate");
    struct copy pending[PENDING] = {0};
    for (int i = 0; i < PENDING; i++) check(host_alloc((void **)&pending[i].bytes, LARGE_BYTES, 0), "cuMemHostAlloc");

    for (int round = 0; round < rounds; round++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        unsigned bits = (unsigned)(random >> 33);
        handle home = streams[bits % (STREAMS + 2)];
        handle reader = streams[bits / 8 % (STREAMS + 2)];
        size_t size = bits % 61 == 0 ? LARGE_BYTES : 1 + bits / 64 % MAX_BYTES;
        struct copy *copy = &pending[round % PENDING];
        verify(copy);

        unsigned char *block = zero_torch_malloc((ssize_t)size, 0, home);
        if (!block) exit(1);
        *copy = (struct copy){reader, copy->bytes, size, (unsigned char)(thread * 31 + round)};
        check(fill((address)(size_t)block, copy->value, size, home), "cuMemsetD8Async");
        if (reader != home) {
            handle filled;
            check(event_create(&filled, 2), "cuEventCreate");
            check(event_record(filled, home), "cuEventRecord");
            check(stream_wait(reader, filled, 0), "cuStreamWaitEvent");
            check(event_destroy(filled), "cuEventDestroy");
            zero_torch_record_stream(block, reader);
        }
        check(copy_to_host(copy->bytes, (address)(size_t)block, size, reader), "cuMemcpyDtoHAsync");
        zero_torch_free(block, (ssize_t)size, 0, home);

        /* A stream ends while memory that it used is free. */
        if (bits % 29 == 0) {
            int last = STREAMS + 1;
            for (int i = 0; i < PENDING; i++)
                if (pending[i].reader == streams[last]) verify(&pending[i]);
            check(stream_destroy(streams[last]), "cuStreamDestroy");
            check(stream_create(&streams[last], 1), "cuStreamCreate");
        }
    }
    for (int i = 0; i < PENDING; i++) verify(&pending[i]);
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    int threads = atoi(arguments[1]);
    rounds = atoi(arguments[2]);
    load();
    pthread_t *started = calloc((size_t)threads, sizeof *started);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&started[i], NULL, work, (void *)(size_t)i)) return 1;
    for (int i = 0; i < threads; i++) pthread_join(started[i], NULL);

    zero_torch_statistics found = {.size = sizeof found};
    if (zero_torch_get_statistics(0, &found)) return 1;
    char last[8];
    printf("%llu allocated, %llu freed, %llu live, %llu out of memory\n", (unsigned long long)found.allocations,
           (unsigned long long)found.frees, (unsigned long long)found.live_bytes,
           (unsigned long long)found.out_of_memory);
    unsigned long long expected = (unsigned long long)threads * (unsigned long long)rounds;
    return found.allocations != expected || found.frees != expected || found.live_bytes != 0 ||
           zero_torch_last_error(last, sizeof last) != 0;
}

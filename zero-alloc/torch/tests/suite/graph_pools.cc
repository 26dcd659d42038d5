// The calls of graph pools with PyTorch's C++ types: MempoolId_t is a std::pair, and the filter a std::function by value.
// A block that is allocated while its stream is recorded must be live until the pool with this id is released.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>

#include "zero_alloc_torch.h"

using Id = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(void *)>;

template <typename F>
static F *function(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        std::fprintf(stderr, "the driver has no %s\n", name);
        std::exit(1);
    }
    return reinterpret_cast<F *>(found);
}

static void check(bool ok, const char *what) {
    if (!ok) {
        std::fprintf(stderr, "failed: %s\n", what);
        std::exit(1);
    }
}

static unsigned long long live_bytes() {
    zero_torch_statistics found = {};
    found.size = sizeof found;
    check(zero_torch_get_statistics(0, &found) == 0, "statistics");
    return found.live_bytes;
}

// As PyTorch gets its functions: addresses from Python.
static void *address(const char *name) {
    return dlsym(RTLD_DEFAULT, name);
}

int main() {
    auto *begin = reinterpret_cast<void (*)(int, Id, Filter)>(address("zero_torch_begin_graph_pool"));
    auto *end = reinterpret_cast<void (*)(int, Id)>(address("zero_torch_end_graph_pool"));
    auto *release = reinterpret_cast<void (*)(int, Id)>(address("zero_torch_release_graph_pool"));
    check(begin && end && release, "functions");
    void *context, *stream, *graph;
    check(function<int(unsigned)>("cuInit")(0) == 0, "init");
    check(function<int(void **, int)>("cuDevicePrimaryCtxRetain")(&context, 0) == 0, "context");
    check(function<int(void *)>("cuCtxSetCurrent")(context) == 0, "current");
    check(function<int(void **, unsigned)>("cuStreamCreate")(&stream, 1) == 0, "stream");

    int called = 0;
    begin(0, Id(5, 6), [&called](void *) { return ++called > 0; });
    check(function<int(void *, int)>("cuStreamBeginCapture_v2")(stream, 0) == 0, "begin");
    void *block = zero_torch_malloc(1 << 20, 0, stream);
    check(block != nullptr, "allocated");
    zero_torch_free(block, 1 << 20, 0, stream);
    check(function<int(void *, void **)>("cuStreamEndCapture")(stream, &graph) == 0, "end");
    end(0, Id(5, 6));
    check(live_bytes() == 1 << 20, "kept");
    release(0, Id(6, 5));
    check(live_bytes() == 1 << 20, "kept by another pool");
    release(0, Id(5, 6));
    check(live_bytes() == 0, "released");
    std::puts("ok");
}

"""PyTorch on zero-alloc's arena. README.md in the folder above has examples."""

import contextlib
import ctypes
import functools
import os

PATH = os.environ.get("ZERO_ALLOC_TORCH", "libzero_alloc_torch.so")
FIELDS = """size live_bytes peak_live_bytes reserved_bytes peak_reserved_bytes free_bytes largest_free_bytes budget_bytes
    blocks allocations frees out_of_memory stitched_pages moved_bytes""".split()
Statistics = type("Statistics", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_uint64) for name in FIELDS]})
# What torch calls, by the name of its setter.
HOOKS = {
    "set_record_stream_fn": "record_stream",
    "set_reset_fn": "empty_cache",
    "set_memory_fraction_fn": "set_memory_fraction",
    "set_begin_allocate_to_pool": "begin_graph_pool",
    "set_end_allocate_to_pool_fn": "end_graph_pool",
    "set_release_pool": "release_graph_pool",
}


@functools.cache
def allocator():
    """The arena as a torch.cuda.memory.CUDAPluggableAllocator, which must outlive all of its memory."""
    import torch

    made = torch.cuda.memory.CUDAPluggableAllocator(PATH, "zero_torch_malloc", "zero_torch_free")
    for setter, name in HOOKS.items():
        function = getattr(ctypes.CDLL(PATH), f"zero_torch_{name}")
        getattr(made.allocator(), setter)(ctypes.cast(function, ctypes.c_void_p).value)
    return made


@contextlib.contextmanager
def mem_pool():
    """Memory of this thread comes from the arena inside the context, with torch's cache on top; backward runs here, too."""
    import torch

    arena = allocator()
    pool = torch.cuda.MemPool(arena.allocator())
    with torch.cuda.use_mem_pool(pool), torch.autograd.set_multithreading_enabled(False):
        yield arena, pool


def use_for_process():
    """All memory of torch comes from the arena from now on. Must precede torch's first use of a GPU."""
    import torch

    ctypes.CDLL(PATH).zero_torch_abort_on_failure(1)
    torch.cuda.memory.change_current_allocator(allocator())


def statistics(device=0):
    """The arena's numbers, by name. Bytes are live, reserved or free."""
    found = Statistics(size=ctypes.sizeof(Statistics))
    if ctypes.CDLL(PATH).zero_torch_get_statistics(device, ctypes.byref(found)) != 0:
        raise RuntimeError(f"device {device} has no arena")
    return {name: getattr(found, name) for name in FIELDS[1:]}


def write_svg(path, device=0):
    """Writes a map of the arena's memory."""
    if ctypes.CDLL(PATH).zero_torch_write_svg(device, os.fsencode(path)) != 0:
        raise RuntimeError(f"the map was not written to {path}; see stderr")

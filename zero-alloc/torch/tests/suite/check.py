"""The Python file on the stand-in driver or a device, without torch; and with torch as far as it loads."""

import ctypes
import os
import sys
import tempfile

import zero_alloc_torch as arena

library = ctypes.CDLL(arena.PATH)
library.zero_torch_malloc.restype = ctypes.c_void_p
library.zero_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
library.zero_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

try:
    arena.statistics()
    sys.exit("there is no arena yet")
except RuntimeError as error:
    assert str(error) == "device 0 has no arena"

driver = ctypes.CDLL("libcuda.so.1")
context, stream = ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0
assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0

block = library.zero_torch_malloc(1 << 20, 0, stream)
found = arena.statistics()
assert found["live_bytes"] == 1 << 20 and found["reserved_bytes"] >= 1 << 20, found
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "map.svg")
    arena.write_svg(path)
    assert "1048576 bytes live" in open(path).read()
library.zero_torch_free(block, 1 << 20, 0, stream)
found = arena.statistics()
assert (found["live_bytes"], found["allocations"], found["frees"]) == (0, 1, 1), found
for name in arena.HOOKS.values():
    assert hasattr(library, f"zero_torch_{name}"), name
print("ok: statistics, map")

try:
    import torch
except ImportError as error:
    print(f"SKIPPED: the part with torch: {error}")
    sys.exit()
if not hasattr(torch._C, "_cuda_customAllocator"):
    print(f"SKIPPED: the part with torch: {torch.__version__} has no CUDA")
    sys.exit()
made = arena.allocator()
print(f"ok: torch {torch.__version__} made {type(made.allocator()).__name__}")
arena.use_for_process()
assert torch.cuda.memory._get_current_allocator().allocator() is made.allocator()
print("ok: the allocator of the process")
print("SKIPPED: the part that trains, which is benches/peers/torch_arena.py")

"""Memory and time of a step beside FSDP2, DDP and DeepSpeed: torchrun --nproc-per-node N tests/beside.py ENGINE [STAGE]

GPT-2 of 42 million parameters in fp32, 1 x 64 tokens a rank, clip 1, one thread a rank. Peak: VmHWM of rank 0 from the third step on, less the
memory after the imports. Run with MALLOC_MMAP_THRESHOLD_=131072 and OMP_NUM_THREADS=1 for all.
"""

import gc
import json
import os
import sys
import time

import torch
from programs import loss_of

kind, stage = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

if kind == "zero":
    import zero_torch as deepspeed
else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if kind == "deepspeed":
        import deepspeed


def status(name):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


base = status("VmRSS")
torch.manual_seed(0)
config = GPT2Config(vocab_size=8192, n_embd=512, n_layer=12, n_head=8, n_positions=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
model = GPT2LMHeadModel(config).train()
elems = sum(param.numel() for param in model.parameters())
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
}
if kind in ("zero", "deepspeed"):
    if kind == "deepspeed":
        settings["optimizer"]["params"]["torch_adam"] = True
        settings["zero_allow_untested_optimizer"] = True
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(rows):
        engine.backward(loss_of(engine, rows))
        engine.step()
else:
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def step(rows):
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


gc.collect()
at_start = status("VmHWM") - base
rows = torch.arange(64).remainder(8192).view(1, 64) + rank
for _ in range(2):
    step(rows)
with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
    file.write("5")
times = []
for _ in range(6):
    begun = time.perf_counter()
    step(rows)
    times.append(time.perf_counter() - begun)
if rank == 0:
    peak = status("VmHWM") - base
    result = {"engine": kind, "stage": stage, "ranks": ranks, "parameters": elems, "start MiB": round(at_start), "peak MiB": round(peak)}
    print("RESULT", json.dumps({**result, "ms": round(1000 * sorted(times)[3])}), flush=True)
if kind == "zero":
    engine.destroy()
else:
    dist.destroy_process_group()

"""Memory and time of a step beside FSDP2, DDP and DeepSpeed: torchrun --nproc-per-node N tests/beside.py ENGINE [STAGE] [MODEL ROWS TOKENS]

GPT-2 of 42 million parameters in fp32, 1 x 64 tokens a rank, clip 1, one thread a rank; or a model of benches/torch_models.py. On a GPU in bf16.
Peak: VmHWM of rank 0 from the third step on, less the memory after the imports; on a GPU what the device has less than at first, which torch and
the engine keep. Run with MALLOC_MMAP_THRESHOLD_=131072 and OMP_NUM_THREADS=1 for all.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

kind, stage = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
preset, size, length = (sys.argv[3], int(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 3 else (None, 1, 64)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
torch.set_num_threads(1)

if preset:
    sys.path.append(str(Path(__file__).resolve().parents[4] / "benches"))
    import torch_models
else:
    from transformers import GPT2Config, GPT2LMHeadModel
if kind == "zero":
    import zero_torch as deepspeed
else:
    import torch.distributed as dist

    dist.init_process_group("nccl" if on_gpu else "gloo")
    if kind == "deepspeed":
        import deepspeed


def status(name):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def used():
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


base = used() if on_gpu else status("VmRSS")
torch.manual_seed(0)
if preset:
    vocabulary = torch_models.PRESETS[preset].vocabulary
    model = torch_models.build(torch_models.PRESETS[preset], length)
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
else:
    vocabulary = 8192
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=512, n_layer=12, n_head=8, n_positions=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
    )
    model = GPT2LMHeadModel(config).train()
    blocks = model.transformer.h


def loss_of(model, rows):
    return model(rows, rows.roll(-1, 1)) if preset else model(input_ids=rows, labels=rows).loss


elems = sum(param.numel() for param in model.parameters())
settings = {
    "train_micro_batch_size_per_gpu": size,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": on_gpu},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
}
if kind in ("zero", "deepspeed"):
    if kind == "deepspeed":
        settings["optimizer"]["params"]["torch_adam"] = not on_gpu
        settings["zero_allow_untested_optimizer"] = True
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(rows):
        engine.backward(loss_of(engine, rows))
        engine.step()
else:
    model = model.to(device)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if on_gpu else MixedPrecisionPolicy()
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=on_gpu or None)

    def step(rows):
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu and kind == "ddp"):
            loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


gc.collect()
at_start = (used() if on_gpu else status("VmHWM")) - base
rows = (torch.arange(size * length) + rank).remainder(vocabulary).view(size, length).to(device)
for _ in range(2):
    step(rows)
with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
    file.write("5")
times = []
for _ in range(6):
    begun = time.perf_counter()
    step(rows)
    if on_gpu:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - begun)
if rank == 0:
    peak = (used() if on_gpu else status("VmHWM")) - base
    result = {"engine": kind, "stage": stage, "model": preset, "ranks": ranks, "parameters": elems, "start MiB": round(at_start), "peak MiB": round(peak)}
    print("RESULT", json.dumps({**result, "ms": round(1000 * sorted(times)[3])}), flush=True)
if kind == "zero":
    engine.destroy()
else:
    dist.destroy_process_group()

"""Trains a small GPT-2 on a text file: torchrun --nproc-per-node 4 examples/train_text.py FILE [FOLDER]

With a second argument it goes on from the newest checkpoint in FOLDER, and saves one at the end.
"""

import os
import sys

import torch
import zero_torch as deepspeed
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS, STEPS = 128, 200
torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
torch.manual_seed(0)

with open(sys.argv[1], "rb") as file:
    text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=TOKENS, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0))
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    },
)
folder = sys.argv[2] if len(sys.argv) > 2 else None
if folder and os.path.isdir(folder):
    engine.load_checkpoint(folder)

# Each rank has rows of its own.
generator = torch.Generator().manual_seed(1 + engine.global_rank + 1000 * engine.global_steps)
while engine.global_steps < STEPS:
    for _ in range(engine.gradient_accumulation_steps()):
        starts = torch.randint(0, len(text) - TOKENS, (engine.train_micro_batch_size_per_gpu(),), generator=generator)
        rows = torch.stack([text[start:start + TOKENS] for start in starts])
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
    if engine.global_rank == 0 and engine.global_steps % 20 == 1:
        print(f"step {engine.global_steps} loss {engine.loss:.3f}", flush=True)
if folder:
    engine.save_checkpoint(folder)
engine.eval()
with torch.no_grad():
    made = engine.module.generate(input_ids=text[None, :32], max_new_tokens=64, do_sample=False, pad_token_id=0)
if engine.global_rank == 0:
    print(bytes(made[0].tolist()).decode(errors="replace"))

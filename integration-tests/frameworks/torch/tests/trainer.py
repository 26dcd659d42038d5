"""The Trainer of transformers beside plain PyTorch: torchrun --nproc-per-node N tests/trainer.py STAGE"""

import json
import os
import sys
import tempfile

import torch
import zero_torch
from programs import ROWS, loss_of, make, rows_of
from safetensors.torch import load_file

zero_torch.install_as_deepspeed()
from transformers import Trainer, TrainingArguments  # noqa: E402

STAGE, STEPS, RANKS = int(sys.argv[1]), 6, int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset):
    """Of steps of all ranks, one behind the other."""

    def __len__(self):
        return ROWS * STEPS

    def __getitem__(self, index):
        row = rows_of(index // ROWS)[index % ROWS]
        # The Trainer divides by the labels, and counts the first, which no token predicts.
        return {"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])}


class InOrder(Trainer):
    def _get_train_sampler(self, *_args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": STAGE, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder, deepspeed=config, use_cpu=True, per_device_train_batch_size=ROWS // RANKS // 2, gradient_accumulation_steps=2,
        num_train_epochs=1, learning_rate=1e-3, weight_decay=0.01, max_grad_norm=1.0, lr_scheduler_type="linear", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )
    trainer = InOrder(model=make("gpt2"), args=args, train_dataset=Rows())
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(folder)
    if args.process_index == 0:
        saved = load_file(os.path.join(folder, "model.safetensors"))

if args.process_index == 0:
    model = make("gpt2")
    # With an optimizer of the configuration, the Trainer makes no groups.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, rows_of(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    worst = max(abs(entry["loss"] - want) / want for entry, want in zip(logged, losses, strict=True))
    of_norms = max(abs(entry["grad_norm"] - want) / want for entry, want in zip(logged, norms, strict=True))
    of_weights = max((saved[name] - value).abs().max().item() for name, value in model.state_dict().items() if name in saved)
    print("RESULT", json.dumps({"stage": STAGE, "ranks": RANKS, "worst loss": worst, "worst norm": of_norms, "saved": of_weights}))
    assert worst < 1e-6 and of_norms < 1e-6 and len(saved) > 40, (logged, losses, norms)
    assert of_weights < (1e-2 if STAGE == 3 else 1e-5)

"""Checkpoints of GPT-2 across stages, ranks and programs, beside plain PyTorch: tests/interchange.py ZERO

Stage 3 with 4 ranks (10 steps), stage 1 with 2 (10), stage 2 with 4 (5), `zero train` with 3 (5), stage 3 with 2 (5): each resumes from the
checkpoint of the one before, and the losses of all steps are those of one run of torch's AdamW. ZERO is the program. Its rows are all
alike, as it chooses them by itself. Its exported folder has the same logits in transformers.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import zero_torch as deepspeed
from programs import ROWS, TOKENS, loss_of, make, rows_of
from torch import nn

LR, DECAY, TOKEN = 1e-3, 0.01, 7
# (Stage, ranks, the last step).
PARTS = [(3, 4, 10), (1, 2, 20), (2, 4, 25), ("zero", 3, 30), (3, 2, 35)]


def loss_of_zero(model, _rows):
    """What `zero train` computes: each token is followed by a next one, also the last."""
    rows = torch.full((1, TOKENS), TOKEN)
    return nn.functional.cross_entropy(model(input_ids=rows).logits[0], rows[0])


def part(folder, stage, first, last):
    """A rank's part of a run: called under torchrun."""
    torch.set_num_threads(1)
    config = {
        "train_batch_size": ROWS,
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
    }
    engine, *_ = deepspeed.initialize(model=make("gpt2"), config=config)
    if first:
        engine.load_checkpoint(folder)
        assert engine.global_steps == first, engine.global_steps
    size = engine.train_micro_batch_size_per_gpu()
    losses = []
    for step in range(first, last):
        start = engine.global_rank * size
        engine.backward(loss_of(engine, rows_of(step)[start:start + size]))
        engine.step()
        losses.append(engine.loss)
    engine.save_checkpoint(folder)
    if engine.global_rank == 0:
        pathlib.Path(folder, f"losses-{last}.json").write_text(json.dumps(losses))
    engine.destroy()


def run(*command):
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, timeout=300)


def main(zero):
    plain = make("gpt2")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=DECAY)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoints, first = folder / "checkpoints", 0
        (folder / "tokens.bin").write_bytes(TOKEN.to_bytes(2, "little") * 4096)
        for stage, ranks, last in PARTS:
            if stage == "zero":
                run(
                    zero, "train", "--resume", checkpoints, "--data", folder / "tokens.bin", "--ranks", ranks, "--steps", last,
                    "--seq-len", TOKENS, "--micro-batch", 1, "--grad-accum", 1, "--lr", LR, "--schedule", "constant", "--weight-decay", DECAY, "--clip", 0,
                    "--no-decay-1d=false", "--metrics", folder / "metrics", "--betas", "0.9,0.999", "--eps", "1e-8",
                )
                got = [json.loads(line)["loss"] for line in (folder / "metrics").read_text().splitlines()]
            else:
                run(
                    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, __file__,
                    checkpoints, stage, first, last,
                )
                got = json.loads((checkpoints / f"losses-{last}.json").read_text())
            run(zero, "ckpt", "verify", checkpoints)

            loss_here = loss_of_zero if stage == "zero" else loss_of
            want = []
            for step in range(first, last):
                loss = loss_here(plain, rows_of(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                want.append(loss.item())
            worst = max(abs(a - b) / b for a, b in zip(got, want, strict=True))
            print(f"RESULT stage {stage}, {ranks} ranks, steps {first} to {last}: largest relative difference {worst:.1e}", flush=True)
            assert worst < 1e-6, (got, want)
            first = last

        from transformers import AutoModelForCausalLM

        run(zero, "ckpt", "export", checkpoints, folder / "exported")
        exported = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
        with torch.no_grad():
            got, want = exported(input_ids=rows_of(0)).logits, plain.eval()(input_ids=rows_of(0)).logits
        print(f"RESULT exported: logits {(got - want).abs().max():.1e} apart, of at most {want.abs().max():.1f}")
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


if len(sys.argv) > 2:
    part(sys.argv[1], *map(int, sys.argv[2:]))
else:
    main(sys.argv[1])

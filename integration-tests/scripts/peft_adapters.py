"""Adapters of zero against those of PEFT: losses, the adapters after training, logits of the exported folder, and the merged model.

    python peft_adapters.py PATH/TO/zero [--nf4] [--model HF_DIR --seq-len 128 --lr 1e-3]     # prints a table; fails above the limits

Each variant is a small random model of transformers with adapters of PEFT, whose B is not zero. PyTorch and `zero train --lora`
train them on the same tokens (AdamW, fp32); `zero ckpt export` then writes a folder that PEFT loads, and with --merge a model that
is compared with PEFT's merge_and_unload. --model compares a model of yours, with r=16, and the bytes of the last checkpoint: at most
1.1 times those of the adapters and their state. Needs torch, transformers and peft.

--nf4: the base is in NF4 on both sides, by --quantize-frozen nf4 and by bitsandbytes on the CPU, which then is needed, too. Both
multiply by the decoded matrices in fp32. Only losses and adapters are compared.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

transformers.utils.logging.disable_progress_bar()
ROWS, STEPS, DECAY = 4, 10, 0.1
SHAPE = dict(
    vocab_size=97, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40,
    max_position_embeddings=64, initializer_range=0.2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)
GPT2 = dict(
    vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {
    "gpt2, PEFT's targets": ("gpt2", GPT2, dict(r=4)),
    "gpt2, all": ("gpt2", GPT2, dict(r=5, lora_alpha=7, target_modules=["c_attn", "c_proj", "c_fc"])),
    "gpt2, mlp.c_proj": ("gpt2", GPT2, dict(r=2, target_modules=["mlp.c_proj"])),
    "llama, PEFT's targets": ("llama", SHAPE, dict(r=4, lora_alpha=16)),
    "llama, all, rslora": ("llama", SHAPE, dict(r=6, use_rslora=True, target_modules=ALL)),
    "qwen2, tied": ("qwen2", SHAPE | dict(tie_word_embeddings=True), dict(r=3, target_modules=ALL)),
    "qwen3": ("qwen3", SHAPE | dict(head_dim=12), dict(r=4)),
    "mistral": ("mistral", SHAPE, dict(r=4, target_modules=["o_proj", "up_proj"])),
}


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr or done.stdout}")


def distance(a, b):
    return float((a - b).norm() / b.norm())


def load(base, nf4=False):
    """The model in fp32; its linear layers except for the head in NF4."""
    blocks = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    flags = dict(quantization_config=blocks, device_map="cpu") if nf4 else {}
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **flags)


def compare(zero, folder, base, lora, seq, ranks, stage, lr, nf4):
    """Differences of losses, of adapters, of logits, of merged weights; bytes of the checkpoint by those of adapters and state."""
    torch.manual_seed(3)
    model = get_peft_model(load(base, nf4), LoraConfig(task_type="CAUSAL_LM", **lora))
    # Outside of training, bitsandbytes rounds the scales of blocks to bf16 and multiplies in it, on CPUs that can. Nothing is dropped.
    model.train()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    model.save_pretrained(folder / "lora")
    vocab = model.config.vocab_size
    tokens = numpy.random.default_rng(5).integers(0, min(vocab, 1 << 16), STEPS * ROWS * seq + 1).astype("<u2")
    tokens.tofile(folder / "tokens.bin")

    ids = torch.tensor(tokens.astype("int64"))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        rows = ids[step * ROWS * seq :][: ROWS * seq + 1]
        inputs, targets = rows[:-1].view(ROWS, seq), rows[1:].view(ROWS, seq)
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, vocab), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    run(zero, "train", "--model", base, "--lora", folder / "lora", "--data", folder / "tokens.bin", "--ranks", ranks, "--stage", stage,
        "--micro-batch", ROWS // ranks, "--seq-len", seq, "--steps", STEPS, "--lr", lr, "--weight-decay", DECAY, "--threads", 1,
        "--checkpoint", folder / "saves", "--metrics", folder / "metrics.jsonl", "--device", "cpu",
        *(["--quantize-frozen", "nf4"] if nf4 else []))
    run(zero, "ckpt", "export", folder / "saves", folder / "peft")
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    ours = [line["loss"] for line in lines if "loss" in line]

    ours_last = load_file(folder / "peft/adapter_model.safetensors")
    model.save_pretrained(folder / "last")
    last = load_file(folder / "last/adapter_model.safetensors")
    assert ours_last.keys() == last.keys(), ours_last.keys() ^ last.keys()
    flat = [torch.cat([tensors[name].flatten() for name in sorted(last)]) for tensors in (ours_last, last)]
    # Masters and two moments in fp32.
    saved = sum(file.stat().st_size for file in (folder / "saves").rglob("*") if file.is_file()) / (12 * len(flat[0]))
    found = [max(abs(a - b) for a, b in zip(ours, losses, strict=True)), distance(*flat)]
    if nf4:
        return *found, None, None, saved

    run(zero, "ckpt", "export", "--merge", folder / "saves", folder / "merged")
    loaded = PeftModel.from_pretrained(load(base), folder / "peft")
    prompt = ids[:seq].view(1, seq)
    with torch.no_grad():
        theirs = loaded(input_ids=prompt).logits
        merged = load(folder / "merged")
        logits = distance(merged(input_ids=prompt).logits, theirs)
    weights = loaded.merge_and_unload().state_dict()
    of_merged = max(distance(tensor, weights[name]) for name, tensor in merged.state_dict().items() if tensor.norm() > 0)
    return *found, logits, of_merged, saved


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("zero")
    parser.add_argument("--model")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--seq-len", type=int, default=32)
    args = parser.parse_args()
    # The configurations of small models are larger than their adapters.
    limits = [2e-5, 1e-3, 1e-5, 1e-6, 1.1 if args.model else float("inf")]
    failed = False
    variants = {"--model": (None, None, dict(r=16, lora_alpha=32))} if args.model else VARIANTS
    if args.nf4:
        # bitsandbytes has no module for GPT-2's matrices, which are transposed, and in 0.50 its CPU decodes rows that are not whole
        # blocks of 64 with scales of other blocks. Ours keeps matrices below 4,096 elements as they are.
        wide = dict(hidden_size=128, intermediate_size=128, head_dim=32)
        variants = {
            name: (kind, kind and keys | wide, lora) for name, (kind, keys, lora) in variants.items() if kind != "gpt2"
        }
    print(f"{'variant':<24} ranks stage    losses  adapters    logits    merged     saved")
    for at, (name, (kind, keys, lora)) in enumerate(variants.items()):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            base = args.model or folder / "base"
            if kind:
                torch.manual_seed(1)
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys), dtype=torch.float32)
                model.save_pretrained(base)
            ranks, stage = [(1, 0), (2, 3), (4, 2), (2, 1)][at % 4]
            found = compare(args.zero, folder, base, lora, args.seq_len, ranks, stage, args.lr, args.nf4)
            failed |= any(value is not None and not value <= limit for value, limit in zip(found, limits))
            print(f"{name:<24} {ranks:>5} {stage:>5} " + " ".join(f"{'':>9}" if value is None else f"{value:9.1e}" for value in found), flush=True)
    sys.exit("a difference is above its limit" if failed else 0)


if __name__ == "__main__":
    main()

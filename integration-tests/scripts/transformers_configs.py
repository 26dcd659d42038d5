"""Variants of config.json: the loss and the continuation of zero against those of transformers.

    python transformers_configs.py PATH/TO/zero            # prints a table; fails above 1e-6
    python transformers_configs.py --frequencies           # writes tests/data/rope.json, which a test of zero-models reads

A small random model of each variant is saved by transformers, its config.json is edited as people edit it, and both read
that folder: `zero train` with a learning rate of 0 for the loss of a batch, `zero generate --json` for the next tokens.
The column "plain" is transformers' loss without the edits: how much they matter.
Needs torch and transformers.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

transformers.utils.logging.disable_progress_bar()
DATA = pathlib.Path(__file__).parent.parent / "tests/data"
ROWS, SEQ, PROMPT, TOKENS = 3, 48, 24, 12

SHAPE = dict(
    vocab_size=97, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=40, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)
GPT2 = dict(
    vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2, bos_token_id=None,
    eos_token_id=None,
)
YARN = dict(rope_type="yarn", factor=4.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SLIDING, FULL = "sliding_attention", "full_attention"


def parameters(**keys):
    """The spelling of transformers 5: one object with theta inside."""
    return dict(rope_parameters={"rope_theta": 10_000.0, **keys})


def old(theta=10_000.0, **keys):
    """The spelling before: two keys, and `type` for the kind."""
    if "rope_type" in keys:
        keys["type"] = keys.pop("rope_type")
    return dict(rope_parameters=None, rope_theta=theta, rope_scaling=keys or None)


def variants():
    """(name, model_type, keys of the model, edits of its config.json: None removes a key)"""
    for name, keys in [
        ("tied", {}),
        ("untied", dict(tie_word_embeddings=False)),
        ("gelu", dict(activation_function="gelu")),
        ("relu", dict(activation_function="relu")),
        ("silu", dict(activation_function="silu")),
        ("n_inner", dict(n_inner=50)),
        ("unscaled", dict(scale_attn_weights=False)),
        ("by layer", dict(scale_attn_by_inverse_layer_idx=True)),
        ("upcast", dict(reorder_and_upcast_attn=True)),
        ("epsilon", dict(layer_norm_epsilon=1e-3)),
    ]:
        yield f"gpt2 {name}", "gpt2", {**GPT2, **keys}, {}
    for family, name, keys in [
        ("llama", "plain", {}),
        ("llama", "tied", dict(tie_word_embeddings=True)),
        ("llama", "one head of keys", dict(num_key_value_heads=1)),
        ("llama", "all heads of keys", dict(num_key_value_heads=4)),
        ("llama", "head_dim", dict(head_dim=10)),
        ("llama", "attention_bias", dict(attention_bias=True)),
        ("llama", "mlp_bias", dict(mlp_bias=True)),
        ("llama", "rms_norm_eps", dict(rms_norm_eps=1e-3)),
        ("llama", "weights in fp64", dict(dtype=torch.float64)),
        ("llama", "weights in bf16", dict(dtype=torch.bfloat16)),
        ("mistral", "without a window", dict(sliding_window=None)),
        ("mistral", "window", dict(sliding_window=7)),
        ("mistral", "long window", dict(sliding_window=400)),
        ("qwen2", "plain", {}),
        ("qwen2", "tied", dict(tie_word_embeddings=True)),
        ("qwen2", "window of upper layers", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
        ("qwen2", "layer_types",
         dict(use_sliding_window=True, sliding_window=5, layer_types=[SLIDING, FULL, SLIDING])),
        ("qwen3", "plain", dict(head_dim=12)),
        ("qwen3", "attention_bias", dict(head_dim=12, attention_bias=True)),
        ("qwen3", "head_dim", dict(head_dim=20)),
    ]:
        yield f"{family} {name}", family, {**SHAPE, **keys}, {}
    for name, edits in ROPES:
        yield f"llama {name}", "llama", SHAPE, edits
    for family, name, edits in [
        ("qwen2", "yarn, as the cards of Qwen2.5 say", old(1e6, **YARN, original_max_position_embeddings=16)),
        ("qwen2", "yarn beside rope_parameters",
         dict(rope_parameters=dict(rope_type="default", rope_theta=1e6),
              rope_scaling=dict(**YARN, original_max_position_embeddings=16))),
        ("qwen2", "dynamic", old(1e6, rope_type="dynamic", factor=2.5)),
        ("qwen3", "yarn", parameters(**YARN, original_max_position_embeddings=16)),
        ("qwen3", "yarn, as the cards of Qwen3 say",
         dict(rope_theta=1e6, rope_parameters=None,
              rope_scaling=dict(**YARN, original_max_position_embeddings=16))),
        ("qwen3", "llama3", parameters(**LLAMA3, original_max_position_embeddings=16)),
        ("mistral", "yarn", parameters(**YARN, original_max_position_embeddings=16)),
        ("mistral", "linear", old(rope_type="linear", factor=2.0)),
    ]:
        keys = dict(head_dim=12) if family == "qwen3" else dict(sliding_window=9) if family == "mistral" else {}
        yield f"{family} {name}", family, {**SHAPE, **keys}, edits


ROPES = [
    ("theta", parameters(rope_theta=500_000.0)),
    ("theta, old", old(500_000.0)),
    ("theta, old, not a whole number", old(12_345.678)),
    ("linear", parameters(rope_type="linear", factor=4.0)),
    ("linear, old", old(rope_type="linear", factor=4.0)),
    ("dynamic", parameters(rope_type="dynamic", factor=2.0)),
    ("dynamic, old", old(rope_type="dynamic", factor=8.3)),
    ("dynamic with an original length",
     old(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)),
    ("llama3", parameters(**LLAMA3, original_max_position_embeddings=16)),
    ("llama3, old", old(**LLAMA3, original_max_position_embeddings=32)),
    ("llama3 without an original length", parameters(**LLAMA3)),
    ("llama3, original length at the top", dict(**parameters(**LLAMA3), original_max_position_embeddings=16)),
    ("yarn, original below the sequence", parameters(**YARN, original_max_position_embeddings=16)),
    ("yarn, original equal to it", parameters(**YARN, original_max_position_embeddings=SEQ)),
    ("yarn, original above it", parameters(**YARN, original_max_position_embeddings=64)),
    ("yarn, old", old(**YARN, original_max_position_embeddings=16)),
    ("yarn, both keys of the kind", dict(
        rope_parameters=None, rope_theta=10_000.0,
        rope_scaling=dict(type="linear", rope_type="yarn", factor=4.0, original_max_position_embeddings=16))),
    ("yarn without an original length", parameters(**YARN)),
    ("yarn, original length at the top",
     dict(**parameters(**YARN, original_max_position_embeddings=64), original_max_position_embeddings=16)),
    ("yarn, factor null", parameters(rope_type="yarn", factor=None, original_max_position_embeddings=16)),
    ("yarn, factor 1", parameters(rope_type="yarn", factor=1.0, original_max_position_embeddings=16)),
    ("yarn, factor below 1", parameters(rope_type="yarn", factor=0.5, original_max_position_embeddings=16)),
    ("yarn, attention_factor", parameters(**YARN, original_max_position_embeddings=16, attention_factor=0.8)),
    ("yarn, betas", parameters(**YARN, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5)),
    ("yarn, betas 0", parameters(**YARN, original_max_position_embeddings=16, beta_fast=0, beta_slow=0)),
    ("yarn, betas null", parameters(**YARN, original_max_position_embeddings=16, beta_fast=None, beta_slow=None)),
    ("yarn, mscale alone", parameters(**YARN, original_max_position_embeddings=16, mscale=0.7)),
    ("yarn, both mscales", parameters(**YARN, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.4)),
    ("yarn, mscale 0", parameters(**YARN, original_max_position_embeddings=16, mscale=0.0, mscale_all_dim=0.4)),
    ("yarn, not truncated", parameters(**YARN, original_max_position_embeddings=16, truncate=False)),
    ("yarn, truncate null", parameters(**YARN, original_max_position_embeddings=16, truncate=None)),
    ("yarn, long original", parameters(**YARN, original_max_position_embeddings=4096, truncate=False)),
    ("yarn, ramp of one point", parameters(**YARN, original_max_position_embeddings=2)),
    ("both, theta in the first",
     dict(rope_parameters=dict(rope_type="default", rope_theta=500_000.0),
          rope_scaling=dict(**YARN, original_max_position_embeddings=16))),
    ("both, theta in the second",
     dict(rope_parameters=dict(rope_type="default", rope_theta=500_000.0),
          rope_scaling=dict(**YARN, rope_theta=500_000.0, original_max_position_embeddings=16))),
    ("both, theta at the top",
     dict(rope_parameters=dict(rope_type="default", rope_theta=500_000.0), rope_theta=1_000.0,
          rope_scaling=dict(rope_type="linear", factor=2.0))),
    ("both, the second null",
     dict(rope_parameters=dict(rope_type="linear", rope_theta=500_000.0, factor=2.0), rope_scaling=None)),
    ("both, the second empty",
     dict(rope_parameters=dict(rope_type="linear", rope_theta=500_000.0, factor=2.0), rope_scaling={})),
]

# Keys that are written as null, and not removed.
KEPT_NULLS = {"rope_scaling"}


def edit(config, edits):
    for key, value in edits.items():
        if value is None and key not in KEPT_NULLS:
            config.pop(key, None)
        else:
            config[key] = value
    return config


def save(folder, family, keys, edits, seed):
    torch.manual_seed(seed)
    dtype = keys.pop("dtype", torch.float32)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **keys), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()), edits), indent=1))


def plain(folder, edits, tokens):
    """The loss without the edits, with the theta of the default."""
    if not edits:
        return None
    path = folder / "config.json"
    text = path.read_text()
    config = {key: value for key, value in json.loads(text).items() if key not in edits}
    path.write_text(json.dumps(config))
    loss, _ = expected(folder, tokens)
    path.write_text(text)
    return loss


def expected(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(tokens.astype(numpy.int64))
    inputs = torch.stack([tokens[row * SEQ:(row + 1) * SEQ] for row in range(ROWS)])
    targets = torch.stack([tokens[row * SEQ + 1:(row + 1) * SEQ + 1] for row in range(ROWS)])
    with torch.no_grad():
        logits = model(input_ids=inputs).logits.double()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        ids = tokens[:PROMPT][None]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                             eos_token_id=None, pad_token_id=0)
    return loss, out[0, PROMPT:].tolist()


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command}: {done.stderr}")
    return done.stdout, done.stderr


def ours(zero, folder, work, tokens):
    data, metrics = work / "tokens.u16.bin", work / "metrics.jsonl"
    tokens.tofile(data)
    metrics.unlink(missing_ok=True)
    _, notes = run(zero, "train", "--model", folder, "--data", data, "--seq-len", SEQ, "--micro-batch", ROWS, "--ranks", 1,
                   "--steps", 1, "--lr", 0, "--no-checkpoint", "--dtype", "fp32", "--device", "cpu", "--dropout", 0,
                   "--metrics", metrics)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    loss = next(step["loss"] for step in steps if "loss" in step)
    ids = ",".join(map(str, tokens[:PROMPT]))
    out, _ = run(zero, "generate", "--model", folder, "--token-ids", ids, "--tokens", TOKENS, "--json", "--dtype", "fp32")
    return loss, json.loads(out)["tokens"], "replaces" in notes


def compare(zero):
    worst, bad, count = 0.0, [], 0
    for seed, (name, family, keys, edits) in enumerate(variants()):
        tokens = numpy.random.default_rng(seed).integers(0, 97, ROWS * SEQ + 1, dtype=numpy.uint16)
        with tempfile.TemporaryDirectory() as work:
            work = pathlib.Path(work)
            save(work / "model", family, keys, edits, seed)
            theirs, their_next = expected(work / "model", tokens)
            without = plain(work / "model", edits, tokens)
            loss, following, warned = ours(zero, work / "model", work, tokens)
        differs = abs(loss - theirs)
        worst = max(worst, differs)
        count += 1
        ok = differs < 1e-6 and following == their_next
        bad += [] if ok else [name]
        without = "" if without is None else f"{without:.7f}"
        print(f"{name:40} plain {without:9}  transformers {theirs:.7f}  zero {loss:.7f}  differs {differs:.1e}  next {TOKENS} tokens "
              f"{'equal' if following == their_next else 'DIFFER'}{', warns' if warned else ''}"
              f"{'' if ok else '  DIFFERS'}", flush=True)
    print(f"{count - len(bad)} of {count} variants agree, losses within {worst:.1e}; transformers "
          f"{transformers.__version__}, torch {torch.__version__}")
    if bad:
        sys.exit(f"variants that differ: {bad}")


def frequencies():
    """Each kind at two widths of a head, as transformers computes it from the file."""
    lines = []
    for name, edits in ROPES:
        for head_dim in (12, 64):
            keys = dict(SHAPE, model_type="llama", hidden_size=4 * head_dim, head_dim=head_dim)
            text = json.dumps(edit(dict(keys), edits))
            config = AutoConfig.for_model(**json.loads(text))
            kind = config.rope_parameters["rope_type"]
            rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
            compute = ROPE_INIT_FUNCTIONS.get(kind, rotary.compute_default_rope_parameters)
            numbers, factor = compute(config)
            bits = numbers.to(torch.float32).numpy().view(numpy.uint32).tolist()
            lines.append(json.dumps(dict(name=name, config=text, bits=bits, attention_factor=factor)))
    (DATA / "rope.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--frequencies"]:
        frequencies()
    elif len(sys.argv) == 2:
        compare(sys.argv[1])
    else:
        sys.exit(__doc__)

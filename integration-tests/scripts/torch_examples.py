"""Trains the tiny Llama of tests/data/llama-gqa on prompts and completions with PyTorch.

Writes the tokenizer, the examples and the losses to tests/data/examples. Each example runs through the model alone, so
neither padding nor packing can change a loss. The loss of a step is the mean over its trained tokens.
Needs torch, transformers and tokenizers:  python torch_examples.py
"""

import json
import pathlib

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

DATA = pathlib.Path(__file__).parent.parent / "tests/data"
OUT = DATA / "examples"
SEQ_LEN, ROWS, EPOCHS, SEED = 40, 8, 3, 5
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
PROMPTS = [
    ("Which shard does rank 0 own?", " The first of each unit."),
    ("Who sums the gradients?", " All ranks, in rank order."),
    ("What is a unit?", " One flat parameter."),
    ("Stage 1 shards", " the optimizer state."),
    ("Stage 2 shards", " the optimizer state and the gradients."),
    ("Stage 3 shards", " the optimizer state, the gradients and the parameters."),
    ("Who waits?", " Streams wait for events."),
    ("Who waits once a step?", " The host."),
    ("Who frees a gathered unit?", " The pool, behind the last use."),
    ("1 + 1 =", " 2"),
    ("2 + 2 =", " 4"),
    ("3 + 5 =", " 8"),
    ("Name a stream.", " comm"),
    ("Name another stream.", " compute"),
    ("A bucket holds", " gradients until they are reduced."),
    ("A prompt that is long enough to need the whole row by itself, so that its completion is cut by the row: which",
     " one is it? It is this one, of all the prompts in the file, and it goes on for a while."),
    ("", "No prompt at all."),
    ("Empty?", ""),
    ("Größe?", " Groß."),
    ("What is saved?", " A copy of the state."),
    ("How many bytes a parameter?", " Sixteen."),
]
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    text = [part for pair in PROMPTS for part in pair]
    made.train_from_iterator(text + ["".join(map(chr, range(32, 127))), "user assistant system\n"], trainer)
    folder = OUT / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"eos_token": "<|end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return made


def philox(counter, key):
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (right >> 32) ^ counter[1] ^ key[0],
            right & 0xFFFFFFFF,
            (left >> 32) ^ counter[3] ^ key[1],
            left & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def order(rows, epoch):
    """The order of an epoch, as zero draws it."""
    purpose = b"order of an epoch"
    name = 0xCBF29CE484222325
    for byte in purpose:
        name = ((name ^ byte) * 0x100000001B3) % 2**64
    key = philox([name & 0xFFFFFFFF, name >> 32, len(purpose), 0x5A45524F], [SEED, 0])[:2]
    out = list(range(rows))
    for i in range(rows - 1, 0, -1):
        a, b = philox([i, 0, epoch, 0], key)[:2]
        j = ((a | b << 32) * (i + 1)) >> 64
        out[i], out[j] = out[j], out[i]
    return out


def pack(lengths):
    """Best fit, the longest example first; of rows with equal room the one that got it last."""
    rows, room = [], []
    for example in sorted(lengths, key=lambda one: (-lengths[one], one)):
        fits = [left for left in room if left[0] >= lengths[example]]
        if fits:
            least = min(left[0] for left in fits)
            best = [left for left in fits if left[0] == least][-1]
            room.remove(best)
            left, row = best
        else:
            rows.append([])
            left, row = SEQ_LEN, len(rows) - 1
        rows[row].append(example)
        if left > lengths[example]:
            room.append((left - lengths[example], row))
    return [sorted(row) for row in rows]


def train(rows, examples):
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(DATA / "llama-gqa/model", dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for epoch in range(EPOCHS):
        shuffled = order(len(rows), epoch)
        for first in range(0, len(rows), ROWS):
            members = [one for row in shuffled[first : first + ROWS] for one in rows[row]]
            total, trained = 0.0, 0
            for member in members:
                tokens, given = examples[member]
                logits = model(torch.tensor([tokens[:-1]])).logits[0]
                start = max(given - 1, 0)
                targets = torch.tensor(tokens[start + 1 :])
                total = total + torch.nn.functional.cross_entropy(logits[start:], targets, reduction="sum")
                trained += len(targets)
            loss = total / trained
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def main():
    torch.use_deterministic_algorithms(True)
    made = tokenizer()
    lines = [json.dumps({"prompt": p, "completion": c}, ensure_ascii=False) for p, c in PROMPTS]
    (OUT / "examples.jsonl").write_text("\n".join(lines) + "\n")
    end = made.token_to_id("<|end|>")
    examples = {}
    for index, (prompt, completion) in enumerate(PROMPTS):
        tokens = (made.encode(prompt + completion).ids + [end])[: SEQ_LEN + 1]
        given = len(made.encode(prompt).ids)
        if len(tokens) > max(given, 1):
            examples[index] = (tokens, given)
    padded = [[index] for index in examples]
    packed = pack({index: len(tokens) - 1 for index, (tokens, _) in examples.items()})
    expected = {
        "seq_len": SEQ_LEN,
        "rows_of_step": ROWS,
        "epochs": EPOCHS,
        "seed": SEED,
        "examples": {str(i): {"tokens": t, "given": g} for i, (t, g) in examples.items()},
        "packed_rows": packed,
        "padded": train(padded, examples),
        "packed": train(packed, examples),
    }
    text = json.dumps(expected).replace('"packed_rows"', '\n"packed_rows"').replace('"padded"', '\n"padded"')
    (OUT / "expected.json").write_text(text.replace('"packed":', '\n"packed":') + "\n")


main()

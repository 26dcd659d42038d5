"""Compares what `zero data inspect` trains with the masks of trl's training templates.

trl publishes chat templates in two forms. The second, NAME_training.jinja, encloses the assistant's text in generation
blocks. For each conversation that both forms render alike, the text and the mask of `zero` by the first must be those
of transformers by the second. Needs transformers, jinja2 and trl:  python trl_masks.py ZERO [-v]
"""

import collections
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile

import trl
from transformers import PreTrainedTokenizerFast

from transformers_chat import TOOL, TURNS

TEMPLATES = pathlib.Path(trl.__file__).parent / "chat_templates"


def in_parts(messages):
    """The messages with contents as lists."""
    part = lambda text: [{"type": "text", "text": text}]
    return [{**one, "content": part(one["content"])} if one.get("content") is not None else one for one in messages]


CASES = {name: (messages, [TOOL] if "tool" in name else None) for name, messages in TURNS.items()}
CASES |= {f"{name}, in parts": (in_parts(messages), tools) for name, (messages, tools) in CASES.items()}


def byte_tokenizer():
    """One token a byte, so that tokens show the text to the byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    vocab = {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def expected(tokenizer, base, twin, messages, tools):
    """Text and mask, a reason for which they cannot be compared, or nothing if the template refuses."""
    # What an earlier run of the list's objects changed would be seen.
    messages = json.loads(json.dumps(messages))
    try:
        text = tokenizer.apply_chat_template(messages, tools, chat_template=base, tokenize=False)
    except Exception:
        return None
    try:
        made = tokenizer.apply_chat_template(
            messages, tools, chat_template=twin, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:
        return "the twin refuses"
    if bytes(made["input_ids"]) != text.encode():
        return "other text"
    return made["input_ids"], made["assistant_masks"]


def trained(zero, folder, name, messages, tools):
    """Tokens and mask of `zero`, or its error."""
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False) + "\n")
    args = [zero, "data", "inspect", "--tokenizer", folder, "--data", path, "--json", "--seq-len", "65536"]
    made = subprocess.run(args, capture_output=True, text=True, timeout=60)
    if made.returncode != 0:
        return made.stderr.strip()
    rows = json.loads(made.stdout)["first_rows"]
    pieces = rows[0] if rows else []
    tokens = [token for piece in pieces for token in piece["tokens"]]
    return tokens, [int(piece["trained"]) for piece in pieces for _ in piece["tokens"]]


def shown(text, mask):
    out = b""
    for at, (byte, is_trained) in enumerate(zip(text, mask)):
        before = mask[at - 1] if at else 0
        out += (b"[[" if is_trained else b"]]") if is_trained != before else b""
        out += bytes([byte])
    return out.decode(errors="replace")[-400:]


def compare(zero, name, work):
    base, twin = ((TEMPLATES / f"{name}{form}.jinja").read_text() for form in ("", "_training"))
    folder = work / name
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(base)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    # As text of the template only.
    tokenizer._special_tokens_map.update(special)

    counts, lines = collections.Counter(), []
    for case, (messages, tools) in CASES.items():
        want = expected(tokenizer, base, twin, messages, tools)
        got = trained(zero, folder, case.replace(" ", "_"), messages, tools)
        if isinstance(want, str):
            kind = f"not compared: {want}"
            if isinstance(got, str):
                kind += ", zero refuses"
        elif want is None:
            kind = "both refuse" if isinstance(got, str) else "zero accepts"
        elif isinstance(got, str):
            kind = "zero refuses"
        elif not got[0]:
            kind = "equal" if not any(want[1]) else "other mask"
        elif got[0] != want[0]:
            kind = "other text"
        else:
            kind = "equal" if got[1] == want[1] else "other mask"
        counts[kind] += 1
        if kind in ("zero accepts", "zero refuses", "other text"):
            lines.append(f"{name}, {case}: {kind}: {got if isinstance(got, str) else bytes(got[0])[-300:]}")
        if kind == "other mask":
            lines.append(f"{name}, {case}:\n  zero {shown(*got)!r}\n  trl  {shown(*want)!r}")
    return counts, lines


def main():
    zero = sys.argv[1]
    names = sorted(path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.jinja"))
    total = collections.Counter()
    with tempfile.TemporaryDirectory() as work:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            results = threads.map(lambda name: compare(zero, name, pathlib.Path(work)), names)
            for name, (counts, lines) in zip(names, results):
                total += counts
                print(name, dict(counts))
                if "-v" in sys.argv:
                    print("\n".join(lines))
    print("all", dict(total))


main()

#!/usr/bin/env python3
"""Records the bits of about 60 short trainings, and compares them with an earlier record.

    cargo build --release -p zero
    integration-tests/scripts/bits.py target/release/zero before.json
    integration-tests/scripts/bits.py target/release/zero after.json --compare before.json

A change without a change of logic keeps them all. A record has, of each training, the losses, gradient
norms and bytes sent of every step, and the SHA-256 of the tensors of its checkpoint; of other commands
the SHA-256 of what they print. Takes about half a minute on two cores. Python 3.8 or later, no packages.
"""

import argparse
import hashlib
import json
import pathlib
import struct
import subprocess
import tempfile

DATA = pathlib.Path(__file__).resolve().parents[1] / "tests/data"
GROUPS = [{"names": ["transformer.h.0.*"], "trainable": False}, {"names": ["*.bias"], "weight_decay": 0.0, "lr_scale": 2.0}]

# Of each training: the model, the ranks and the flags.
STAGES = [f"--stage {stage}" for stage in range(4)]
TRAININGS = [
    *[("nano", ranks, stage) for ranks in (1, 2, 3) for stage in STAGES],
    *[("nano", 4, f"{stage} --dtype bf16 --grad-accum 2 --clip 0.5") for stage in STAGES],
    *[("nano", 2, f"{stage} --dtype fp16 --no-decay-1d") for stage in STAGES],
    *[(model, 2, f"{stage} --dtype bf16") for model in ("llama-gqa", "gpt2-tiny") for stage in STAGES],
    *[("llama-gqa", 4, f"--stage {stage} --tensor-parallel 2{more}") for stage in (0, 2, 3) for more in ("", " --sequence-parallel")],
    *[("gpt2-tiny", 4, f"--stage {stage} --ulysses 2 --activation-checkpointing") for stage in (1, 3)],
    *[("nano", 2, f"--stage {stage} --offload {home} --grad-accum 2") for stage in (1, 3) for home in ("cpu", "nvme:{tmp}")],
    *[("llama-gqa", 2, f"--stage 3 --dtype bf16 --offload {home} --offload-params {home}{more}") for home in ("cpu", "nvme:{tmp}")
      for more in ("", " --moments bf16 --masters remainder")],
    *[("nano", 4, f"--stage {stage} --shard-group 2{more}") for stage in (2, 3) for more in ("", " --shard-optimizer world")],
    ("nano", 4, "--stage 3 --hpz 2 --dtype bf16"),
    ("nano", 4, "--stage 3 --collectives two-level --ranks-per-node 2"),
    ("nano", 4, "--stage 3 --tensor-parallel 2 --activation-checkpointing --partition-activations --clip 1"),
    ("nano", 3, "--stage 2 --dtype bf16 --masters remainder"),
    ("nano", 2, "--stage 3 --activation-checkpointing --offload-activations --offload cpu"),
    ("nano", 2, "--stage 1 --grad-accum 3 --reduce-every-micro-batch"),
    ("nano", 2, "--stage 3 --no-overlap --bucket-elems 5000"),
    ("nano", 2, "--stage 3 --schedule cosine --warmup-steps 2 --val-split 0.2 --eval-every 2"),
    ("nano", 2, "--stage 2 --config {tmp}/groups.json --dropout 0.2"),
    ("llama-gqa", 2, "--stage 3 --data {data}/examples/examples.jsonl --tokenizer {data}/examples/tokenizer --pack"),
    ("llama-gqa", 2, "--stage 1 --data {data}/examples/examples.jsonl --tokenizer {data}/examples/tokenizer --grad-accum 2"),
    ("gpt2-tiny", 2, "--stage 3 --sample-every 2 --sample-prompt The --sample-tokens 8"),
    ("qwen2-tied", 2, "--stage 2 --ulysses 2"),
    ("qwen2-tied", 3, "--stage 3 --activation-checkpointing"),
    ("qwen2-tied", 4, "--stage 2 --tensor-parallel 2 --dropout 0.1"),
]
COMMANDS = [
    "generate --checkpoint {tmp}/0/checkpoint --prompt The --tokens 24 --temperature 0.8 --seed 3",
    "generate --model {data}/llama-gqa/model --token-ids 1,2,3 --tokens 24",
    "generate --model {data}/qwen2-tied/model --token-ids 1,2,3 --tokens 24",
    "plan --model llama3-8b --gpus 16 --nodes 2 --gpu-memory 80GiB --tensor-parallel 2 --sequence-parallel",
    "plan --model gpt2-1.5b --gpus 8 --gpu-memory 40GiB --activation-checkpointing",
    "plan --model qwen2.5-0.5b --gpus 4 --gpu-memory 24GiB --ulysses 2",
]


def run(zero, arguments):
    result = subprocess.run([zero, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if result.returncode:
        raise SystemExit(f"zero {' '.join(arguments)} failed:\n{result.stderr.decode()}")
    return result.stdout


def train(zero, tmp, folder, model, ranks, flags):
    flags = flags.format(tmp=tmp, data=DATA).split()
    tokens = f"{DATA}/{'gpt2-tiny' if model == 'nano' else model}/tokens.u16.bin"
    data = [] if "--data" in flags else ["--data", tokens]
    name = model if model == "nano" else f"{DATA}/{model}/model"
    run(zero, ["train", "--model", name, "--ranks", str(ranks), *data, *flags, "--steps", "4", "--seq-len", "40",
               "--micro-batch", "2", "--threads", "1", "--device", "cpu",
               "--metrics", f"{folder}/metrics.jsonl", "--checkpoint", f"{folder}/checkpoint"])

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    keys = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "comm_bytes", "validation")
    shards = {}
    for file in sorted((folder / "checkpoint").glob("step-*/*.safetensors")):
        content = file.read_bytes()
        tensors = content[8 + struct.unpack("<Q", content[:8])[0]:]
        shards[f"{file.parent.name}/{file.name}"] = hashlib.sha256(tensors).hexdigest()
    assert len(steps) == 4 and shards, folder
    return {"steps": [{key: step[key] for key in keys if key in step} for step in steps], "shards": shards}


def record(zero, tmp):
    (tmp / "groups.json").write_text(json.dumps({"gradient_clipping": 0.3, "param_groups": GROUPS}))
    bits = {}
    for index, (model, ranks, flags) in enumerate(TRAININGS):
        folder = tmp / str(index)
        folder.mkdir()
        bits[f"{model}, {ranks} ranks, {flags}"] = train(zero, tmp, folder, model, ranks, flags)
    for command in COMMANDS:
        printed = run(zero, command.format(tmp=tmp, data=DATA).split())
        bits[command] = hashlib.sha256(printed.replace(str(tmp).encode(), b"")).hexdigest()
    return bits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zero", help="the program")
    parser.add_argument("record", type=pathlib.Path, help="the file to write")
    parser.add_argument("--compare", type=pathlib.Path, help="an earlier record")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as tmp:
        bits = record(arguments.zero, pathlib.Path(tmp))
    arguments.record.write_text(json.dumps(bits, indent=1))
    print(f"{len(bits)} recorded")
    if arguments.compare:
        earlier = json.loads(arguments.compare.read_text())
        differ = [name for name in {**earlier, **bits} if earlier.get(name) != bits.get(name)]
        print("".join(f"differs: {name}\n" for name in differ) or f"all {len(bits)} are equal")
        raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# `zero train` and PyTorch eager, in turn, train the same GPT-2 on the CPU from the same weights on the same tokens.
#
#   benches/train_side_by_side.sh            # 3 rounds of 12 steps, 2 threads
#   ROUNDS=5 STEPS=20 THREADS=4 benches/train_side_by_side.sh
#
# The model: 6 layers, width 384, 6 heads, 256 positions, vocabulary 256; batch 8, fp32, AdamW, clipping at 1.
# Needs Python with torch and safetensors. Prints each round, the ratio of the medians and both last losses. Fails if
# the losses differ by more than 1 in 1000, since the two then did not do the same work.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${ROUNDS:-3} steps=${STEPS:-12} threads=${THREADS:-2} warm_up=2

python3 -c 'import torch, safetensors' || { echo "this comparison needs: pip install torch safetensors numpy" >&2; exit 2; }
cargo build --release --bin zero
zero=${CARGO_TARGET_DIR:-target}/release/zero
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 benches/torch_train.py --steps "$steps" --threads "$threads" --write "$work/model"

for round in $(seq "$rounds"); do
    python3 benches/torch_train.py --steps "$steps" --threads "$threads" --warm-up $warm_up >"$work/torch-$round.json"
    "$zero" train --no-checkpoint --threads "$threads" --model "$work/model" --data "$work/model/tokens.bin" \
        --device cpu --ranks 1 --stage 0 --dtype fp32 --micro-batch 8 --grad-accum 1 --seq-len 256 \
        --steps "$steps" --lr 1e-3 --weight-decay 0.1 --clip 1.0 \
        --metrics "$work/zero-$round.jsonl" >"$work/zero-$round.log" 2>&1 \
        || { cat "$work/zero-$round.log" >&2; exit 1; }
done

python3 - "$work" "$rounds" $warm_up <<'PYTHON'
import json
import statistics
import sys

work, rounds, warm_up = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch_speeds, zero_speeds = [], []
for round in range(1, rounds + 1):
    torch = json.load(open(f"{work}/torch-{round}.json"))
    zero = [json.loads(line) for line in open(f"{work}/zero-{round}.jsonl")]
    torch_speeds.append(torch["tokens_per_s"])
    zero_speeds.append(statistics.median(step["tokens_per_s"] for step in zero[warm_up:]))
    ratio = zero_speeds[-1] / torch_speeds[-1]
    print(f"round {round}: zero {zero_speeds[-1]:8.0f} tokens/s, torch {torch_speeds[-1]:8.0f} tokens/s, ratio {ratio:.2f}")
ratio = statistics.median(zero_speeds) / statistics.median(torch_speeds)
print(f"zero / torch {torch['torch']}, {torch['threads']} threads, {torch['parameters']:,} parameters: {ratio:.2f}")
ours, theirs = zero[-1]["loss"], torch["last_loss"]
print(f"loss of the last step: zero {ours:.5f}, torch {theirs:.5f}")
if abs(ours - theirs) > 1e-3 * abs(theirs):
    sys.exit("the losses differ: the two did not train the same model")
PYTHON

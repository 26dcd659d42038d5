#!/usr/bin/env bash
# Compares the speed of stages 1, 2 and 3 with stage 0: the same model, data and ranks, in turn, without
# checkpointing.
#
#   benches/stage_cost.sh                 # 3 rounds of 12 steps, 2 ranks
#   ROUNDS=5 RANKS=4 benches/stage_cost.sh
#
# The model has the shape of that of train_side_by_side.sh, with micro-batch 4 per rank; LAYERS and ZERO (a built program) make a
# short test of the script. Prints tokens/s of each stage and its ratio
# to stage 0 (the median of the rounds' ratios).
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${ROUNDS:-3} steps=${STEPS:-12} ranks=${RANKS:-2} layers=${LAYERS:-6} warm_up=2

zero=${ZERO:-}
if [ -z "$zero" ]; then
    cargo build --release --bin zero
    zero=${CARGO_TARGET_DIR:-target}/release/zero
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PYTHONPATH=benches PYTHONDONTWRITEBYTECODE=1 python3 - "$work/model" "$layers" <<'PYTHON'
import sys

from simulated_cpu import write_model, write_tokens

write_model(sys.argv[1], int(sys.argv[2]), 384, 6, 256)
write_tokens(f"{sys.argv[1]}/tokens.bin", 1_000_000)
PYTHON

for round in $(seq "$rounds"); do
    for stage in 0 1 2 3; do
        "$zero" train --no-checkpoint --model "$work/model" --data "$work/model/tokens.bin" \
            --device cpu --ranks "$ranks" --stage $stage --dtype fp32 --micro-batch 4 --grad-accum 1 --seq-len 256 \
            --steps "$steps" --lr 1e-3 --metrics "$work/$stage-$round.jsonl" >"$work/log" 2>&1 \
            || { cat "$work/log" >&2; exit 1; }
    done
done

python3 - "$work" "$rounds" $warm_up "$ranks" <<'PYTHON'
import json
import statistics
import sys

work, rounds, warm_up, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])


def speed(stage, round):
    steps = [json.loads(line) for line in open(f"{work}/{stage}-{round}.jsonl")]
    return statistics.median(step["tokens_per_s"] for step in steps[warm_up:])


speeds = {stage: [speed(stage, round) for round in range(1, rounds + 1)] for stage in range(4)}
for stage, values in speeds.items():
    ratios = [value / base for value, base in zip(values, speeds[0])]
    print(f"stage {stage}, {ranks} ranks: {statistics.median(values):8.0f} tokens/s, {statistics.median(ratios):.3f} of stage 0"
          f" (rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)})")
PYTHON

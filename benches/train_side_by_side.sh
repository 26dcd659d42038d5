#!/usr/bin/env bash
# `zero train` and PyTorch eager, in turn, train the same GPT-2 on the CPU from the same weights on the same tokens: without
# dropout, and with GPT-2's own.
#
#   benches/train_side_by_side.sh            # 3 rounds of 12 steps, 2 threads
#   ROUNDS=5 STEPS=20 THREADS=4 DROPOUTS="0" benches/train_side_by_side.sh
#   PRESET=smollm2-135m DTYPE=bf16 BATCH=2 LR=1e-4 DROPOUTS=0 benches/train_side_by_side.sh    # torch under autocast
#
# The model: 6 layers, width 384, 6 heads, 256 positions, vocabulary 256; batch 8, fp32, AdamW, clipping at 1.
# PRESET is one of torch_models.py's. LAYERS and ZERO (a built program) make a short test of the script. Without AMX, which
# Intel's CPUs have since 2023: ZERO_BF16_PRODUCTS=avx512 for zero and ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 for torch. Needs Python with torch. Prints each
# round, the losses of both side by side and the ratio of the medians. Fails if the losses of a step differ by more than 1
# in 10,000 (in bf16, whose roundings differ, 1 in 200), or with dropout, whose masks differ, by more than 1 in 50 (masks make
# 1.2% in six steps, dropout on one side only 4%): the two then did not train the same model.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${ROUNDS:-3} steps=${STEPS:-12} threads=${THREADS:-2} layers=${LAYERS:-6} warm_up=2
dtype=${DTYPE:-fp32} batch=${BATCH:-8} lr=${LR:-1e-3}
model_flags=(--layers "$layers" --batch "$batch")
[ -z "${PRESET:-}" ] || model_flags+=(--preset "$PRESET")
read -ra dropouts <<<"${DROPOUTS:-0 0.1}"

export PYTHONDONTWRITEBYTECODE=1
python3 -c 'import torch' || { echo "this comparison needs: pip install torch numpy" >&2; exit 2; }
zero=${ZERO:-}
if [ -z "$zero" ]; then
    cargo build --release --bin zero
    zero=${CARGO_TARGET_DIR:-target}/release/zero
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for dropout in "${dropouts[@]}"; do
    python3 benches/torch_train.py "${model_flags[@]}" --steps "$steps" --dropout "$dropout" --write "$work/model-$dropout"
done
for round in $(seq "$rounds"); do
    for dropout in "${dropouts[@]}"; do
        model=$work/model-$dropout run=$work/$dropout-$round
        python3 benches/torch_train.py "${model_flags[@]}" --steps "$steps" --threads "$threads" --warm-up $warm_up \
            --dropout "$dropout" --dtype "$dtype" --lr "$lr" >"$run.torch.json"
        "$zero" train --no-checkpoint --threads "$threads" --model "$model" --data "$model/tokens.bin" \
            --device cpu --ranks 1 --stage 0 --dtype "$dtype" --micro-batch "$batch" --grad-accum 1 --seq-len 256 \
            --steps "$steps" --lr "$lr" --weight-decay 0.1 --clip 1.0 \
            --metrics "$run.jsonl" >"$run.log" 2>&1 || { cat "$run.log" >&2; exit 1; }
    done
done

python3 - "$work" "$rounds" $warm_up "$dtype" "${dropouts[@]}" <<'PYTHON'
import json
import statistics
import sys

work, rounds, warm_up, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
medians, differ = {}, []
for dropout in sys.argv[5:]:
    print(f"dropout {dropout}")
    theirs, ours = [], []
    for round in range(1, rounds + 1):
        torch = json.load(open(f"{work}/{dropout}-{round}.torch.json"))
        zero = [json.loads(line) for line in open(f"{work}/{dropout}-{round}.jsonl")]
        theirs.append(torch["tokens_per_s"])
        ours.append(statistics.median(step["tokens_per_s"] for step in zero[warm_up:]))
        print(f"  round {round}: zero {ours[-1]:8.0f} tokens/s, torch {theirs[-1]:8.0f} tokens/s, ratio {ours[-1] / theirs[-1]:.2f}")

    limit = 2e-2 if float(dropout) > 0 else 5e-3 if dtype == "bf16" else 1e-4
    losses = [(step["loss"], loss) for step, loss in zip(zero, torch["losses"], strict=True)]
    worst = max(abs(a - b) / b for a, b in losses)
    print("  losses, zero:  " + " ".join(f"{a:.5f}" for a, _ in losses))
    print("  losses, torch: " + " ".join(f"{b:.5f}" for _, b in losses))
    print(f"  they differ by at most {worst:.1e} (limit {limit:.0e})")
    if not worst <= limit:
        differ.append(dropout)
    medians[dropout] = statistics.median(ours), statistics.median(theirs)
    ratio = medians[dropout][0] / medians[dropout][1]
    print(f"  zero / torch {torch['torch']}, {torch['threads']} threads, {torch['parameters']:,} parameters: {ratio:.2f}")

base = medians.get("0")
for dropout, pair in medians.items():
    if base and dropout != "0":
        costs = [without / with_dropout - 1 for without, with_dropout in zip(base, pair)]
        print(f"dropout {dropout} adds to a step: zero {costs[0]:.1%}, torch {costs[1]:.1%}")
if differ:
    sys.exit(f"the losses differ at dropout {', '.join(differ)}: the two did not train the same model")
PYTHON

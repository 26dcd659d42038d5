#!/usr/bin/env bash
# Runs the trainer and PyTorch on one GPU, in turn, on the same models: GPT-2 124M at batch 32, GPT-2 1.5B at batch 8,
# 1024 tokens, bf16. Prints one line of JSON per run, and a line "FAILED" for one that failed; the others run. Needs a GPU,
# NVRTC, cuBLASLt and Python with torch.
#
#   benches/cuda_side_by_side.sh
#   ROUNDS=3 STEPS=40 MODES="eager compile" benches/cuda_side_by_side.sh
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${ROUNDS:-3} steps=${STEPS:-25} modes=${MODES:-eager compile fsdp2} stages=${STAGES:-0 1 2 3}

ours=cuda_train # on PATH if benches/gpu/pack packed it for a machine without Rust
if command -v cargo >/dev/null; then
    cargo build --release --bin cuda_train
    ours=${CARGO_TARGET_DIR:-target}/release/cuda_train
fi
failed=0
# Runs one measurement.
run() { "$@" || { echo "FAILED ($?): $*"; failed=1; }; }
for _ in $(seq "$rounds"); do
    for model in "gpt2-124m 32" "gpt2-1.5b 8"; do
        read -r name batch <<<"$model"
        for stage in $stages; do
            run "$ours" "$name" "$batch" 1024 "$stage" "$steps" bf16
        done
        for mode in $modes; do
            run python3 benches/peers/torch_gpu_train.py --model "$name" --batch "$batch" --steps "$steps" --mode "$mode"
        done
    done
done
exit $failed

#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over the tests that need a CUDA device: wild and leaked memory, and in kernels races, reads of
# what nobody wrote, and barriers that not all threads reach. Needs a GPU; ends with 1 if a tool found something.
#
#   benches/sanitize.sh
#   .gpu/run -- benches/sanitize.sh        without Rust, packed by ../shared/tools/gpu-bundle
#   TOOLS="memcheck" LIMIT_S=300 benches/sanitize.sh
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${TOOLS:-memcheck racecheck initcheck synccheck} limit=${LIMIT_S:-600}

# The paths of test programs, given as CRATE.TEST.
programs() {
    if command -v cargo >/dev/null; then
        for name in "$@"; do
            cargo test --release --no-run --message-format=json -p "${name%.*}" --test "${name#*.}" |
                python3 -c 'import json, sys; print(*filter(None, (json.loads(l).get("executable") for l in sys.stdin)), sep="\n")'
        done
    else
        packed=$(dirname "$(command -v adam_cuda)")/../tests
        printf "$packed/%s.test\n" "$@"
    fi
}

failed=0
check() {
    echo "== $*"
    timeout "$limit" compute-sanitizer --error-exitcode 9 "$@" --ignored --test-threads=1 cuda || failed=1
}
kernels=$(programs zero-kernels.launch zero-optim.on_device)
for tool in $tools; do
    for program in $kernels; do check --tool "$tool" "$program"; done
done
for program in $(programs zero-alloc.cuda zero-alloc.conformance); do check --tool memcheck --leak-check full "$program"; done
exit $failed

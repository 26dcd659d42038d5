#!/usr/bin/env bash
# Runs the tests that need a CUDA device under NVIDIA's compute-sanitizer: invalid accesses and leaks, and in kernels
# races, uninitialized reads and divergent barriers. Needs a GPU. Exits with 1 if a tool reports an error.
#
#   benches/sanitize.sh
#   .gpu/run -- benches/sanitize.sh        # on a machine without Rust, packed by ../shared/tools/gpu-bundle
#   TOOLS="memcheck" LIMIT_S=300 benches/sanitize.sh
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${TOOLS:-memcheck racecheck initcheck synccheck} limit=${LIMIT_S:-600}

# Prints the paths of test programs. Arguments: CRATE.TEST.
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
memory=$(programs zero-alloc.cuda zero-alloc.suite)
for program in $memory; do check --tool memcheck --leak-check full "$program"; done
exit $failed

#!/usr/bin/env bash
# Runs tests that need a CUDA device under NVIDIA's compute-sanitizer: invalid accesses (memcheck), races in shared memory
# (racecheck), uninitialized reads (initcheck) and divergent barriers (synccheck). Needs a GPU. Exits with 1 if a tool
# reports an error or a program exceeds its limit. Leaks are counted by the tests of zero-alloc.
#
#   benches/sanitize.sh                        # the kernels of zero-kernels: at most ten minutes
#   benches/sanitize.sh model                  # the kernels of the model: at most ten minutes
#   benches/sanitize.sh tools                  # the kernels of zero-kernels under initcheck and synccheck: at most seven minutes
#   benches/sanitize.sh rest                   # the other programs: at most nine minutes
#   zero-gpu/run -- benches/sanitize.sh model  # on a machine without Rust, packed by benches/gpu/pack
set -euo pipefail
cd "$(dirname "$0")/.."

# Prints the path of a test program, given as CRATE.TEST.
program() {
    if command -v cargo >/dev/null; then
        cargo test --release --no-run --message-format=json -p "${1%.*}" --test "${1#*.}" |
            python3 -c 'import json, sys; print(*filter(None, (json.loads(l).get("executable") for l in sys.stdin)), sep="\n")'
    else
        echo "$(dirname "$(command -v adam_cuda)")/../tests/$1.test"
    fi
}

failed=0
# check TOOL SECONDS CRATE.TEST [FILTER...]
check() {
    local tool=$1 limit=$2 path
    path=$(program "$3")
    local options=(--tool "$tool" --error-exitcode 9)
    # Tests provoke errors of the driver on purpose.
    [[ $tool == memcheck ]] && options+=(--report-api-errors no)
    shift 3
    echo "== $tool $path $*"
    timeout "$limit" compute-sanitizer "${options[@]}" "$path" --ignored --test-threads=1 "${@:-cuda}" ||
        { echo "FAILED ($?): $tool $path $*"; failed=1; }
}

case ${1:-kernels} in
    kernels)
        check memcheck 280 zero-kernels.launch
        check racecheck 300 zero-kernels.launch ;;
    model)
        check memcheck 240 integration-tests.cuda cuda_ops::
        check racecheck 300 integration-tests.cuda cuda_ops:: ;;
    tools)
        check initcheck 200 zero-kernels.launch
        check synccheck 200 zero-kernels.launch ;;
    rest)
        check memcheck 100 zero-optim.on_device
        check racecheck 100 zero-optim.on_device
        # A fault on purpose, in a child process; and thousands of allocations.
        check memcheck 150 zero-alloc.cuda cuda --skip faults:: --skip leaks::
        check memcheck 150 zero-alloc.suite ;;
    *)
        echo "usage: benches/sanitize.sh [kernels|model|tools|rest]" >&2
        exit 2 ;;
esac
exit $failed

# Sourced by every step: goes to the root of the repository, names the step, and prints its time at its end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Nothing here asks a question, and nothing is kept for a next build.
export CI=true CARGO_INCREMENTAL=0 CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"
exec </dev/null

step_name=$(basename "$0")
step_temporary=
step_finish() {
    local status=$? verdict=ok
    [ "$status" -eq 0 ] || verdict="FAILED (exit status $status)"
    [ -z "$step_temporary" ] || rm -rf "$step_temporary"
    echo "==== $step_name: ${step_skipped:-$verdict}, $SECONDS s"
}
SECONDS=0
trap step_finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
echo "==== $step_name"

# Ends a step that cannot run here, with the reason; that is no failure.
skip() {
    step_skipped="SKIPPED: $*"
    exit 0
}

# A folder for the step's files, removed at its end.
temporary_folder() {
    step_temporary=$(mktemp -d)
}

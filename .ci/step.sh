# Sourced by every step: changes to the repository's root, and prints the step's name, and its time at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# No prompts, and no incremental build files.
export CI=true CARGO_INCREMENTAL=0 CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"
# `cargo build` and `cargo test` share what they build: tests have no debug information.
export CARGO_PROFILE_DEV_DEBUG=0
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

# Ends a step that cannot run on this machine, with the reason. Not a failure.
skip() {
    step_skipped="SKIPPED: $*"
    exit 0
}

# Creates a folder for the step's files, which is removed at the end.
temporary_folder() {
    step_temporary=$(mktemp -d)
}

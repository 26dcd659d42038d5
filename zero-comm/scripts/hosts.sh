# Sourced. Makes two network namespaces, which stand in for two machines, with a link and separate host names.
# Needs root, iproute2 and Open MPI; prints `skipped` and exits if one is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
command -v ip >/dev/null && command -v mpirun >/dev/null && [ "$(id -u)" = 0 ] ||
    { echo "skipped: needs root, ip and mpirun"; exit 0; }

a=zero-a-$$ b=zero-b-$$
work=$(mktemp -d)
hosts_down() {
    # With the link cut, mpirun waits for its daemon even after SIGTERM, so SIGKILL follows.
    for signal in TERM KILL; do
        { ip netns pids $a; ip netns pids $b; } 2>/dev/null | xargs -r kill -$signal 2>/dev/null && sleep 1
    done
    ip netns del $a
    ip netns del $b
    rm -rf "$work"
}
ip netns add $a 2>/dev/null || { rm -rf "$work"; echo "skipped: no network namespaces here"; exit 0; }
trap hosts_down EXIT
ip netns add $b
ip link add zero-a netns $a type veth peer name zero-b netns $b
for side in a:$a:1 b:$b:2; do
    IFS=: read -r letter name number <<<"$side"
    ip -n "$name" addr add 10.77.0.$number/24 dev zero-$letter
    ip -n "$name" link set zero-$letter up
    ip -n "$name" link set lo up
done

# mpirun runs this instead of ssh to start its daemon on the other "machine", which has a different host name.
cat >"$work/agent" <<AGENT
#!/usr/bin/env bash
shift
exec ip netns exec $b unshare --uts bash -c 'hostname zero-b; exec "\$@"' - bash -c "\$*"
AGENT
chmod +x "$work/agent"

# Runs a program as four ranks, two on each host, for at most two minutes.
on_hosts() {
    ip netns exec $a unshare --uts bash -c 'hostname zero-a; exec "$@"' - \
        timeout --kill-after=5 120 mpirun --allow-run-as-root --oversubscribe --enable-recovery \
        --host 10.77.0.1:2,10.77.0.2:2 -n 4 \
        --mca plm_rsh_agent "$work/agent" --mca btl tcp,self --mca btl_tcp_if_include 10.77.0.0/24 \
        --mca oob_tcp_if_include 10.77.0.0/24 "$@"
}

bytes_over_link() {
    ip -n $a -s link show zero-a | awk '/TX:/ {getline; print $1}'
}

cut_link() {
    ip -n $a link set zero-a down
}

# Waits, at most a minute, until a command succeeds.
eventually() {
    for _ in $(seq 120); do
        "$@" && return
        sleep 0.5
    done
    return 1
}

# there_are N PATTERN: succeeds if exactly N files in $work match.
there_are() {
    [ "$(find "$work" -name "$2" | wc -l)" = "$1" ]
}

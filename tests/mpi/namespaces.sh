#!/usr/bin/env bash
# Network namespaces that stand for nodes, joined by a bridge that is in a namespace of its own, so that nothing of this machine's
# network is touched; addresses are private to them. They go when this script ends, however it ends.
#   namespaces.sh probe                      may they be made here? (77: no, with the reason)
#   namespaces.sh run NODES MPIRUN RANKS SCRIPT PROGRAM ARG..
# starts PROGRAM by mpirun on all nodes, RANKS a node. SCRIPT is what happens meanwhile, when all ranks say that they run:
#   none; kill: kill -9 to all processes of the last node; stop: SIGSTOP to its ranks; cut: its link goes down. HEDDLE_EVENT_AFTER: seconds between.
# HEDDLE_RATE, such as 1gbit: what each node can send.
set -uo pipefail

readonly tag=hdl$$
spaces=()

clean() {
  local space pid
  for space in "${spaces[@]}"; do
    for pid in $(ip netns pids "$space" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
    ip netns del "$space" 2>/dev/null
  done
  rm -rf "$scratch"
}
scratch=$(mktemp -d)
trap clean EXIT
trap 'exit 143' INT TERM

make_space() { ip netns add "$1" && spaces+=("$1") && ip -n "$1" link set lo up; }

# make_nodes NODES: node i is $tag.i with the address 10.231.77.(i + 1).
make_nodes() {
  local i
  make_space "$tag.hub" && ip -n "$tag.hub" link add bridge type bridge && ip -n "$tag.hub" link set bridge up || return
  for ((i = 0; i < $1; ++i)); do
    make_space "$tag.$i" &&
      ip -n "$tag.hub" link add "port$i" type veth peer name eth0 netns "$tag.$i" &&
      ip -n "$tag.hub" link set "port$i" master bridge up &&
      ip -n "$tag.$i" address add "10.231.77.$((i + 1))/24" dev eth0 &&
      ip -n "$tag.$i" link set eth0 up || return
    [[ -z ${HEDDLE_RATE:-} ]] || ip netns exec "$tag.$i" tc qdisc add dev eth0 root tbf rate "$HEDDLE_RATE" burst 1mb limit 8mb || return
  done
}

# What mpirun starts its daemons with, in place of ssh: by address into the namespace, under a host name of its own.
write_agent() {
  cat >"$scratch/agent" <<END
#!/usr/bin/env bash
address=\$1
shift
exec ip netns exec "$tag.\$((\${address##*.} - 1))" unshare --uts bash -c 'hostname "node\$0"; exec bash -c "\$1"' "\${address##*.}" "\$*"
END
  chmod +x "$scratch/agent"
}

probe() {
  command -v ip >/dev/null || { echo "ip (iproute2) is not here"; exit 77; }
  make_nodes 2 2>"$scratch/why" || { echo "network namespaces cannot be made here: $(tr '\n' ' ' <"$scratch/why")"; exit 77; }
  ip netns exec "$tag.0" unshare --uts true 2>"$scratch/why" || { echo "no host name of its own: $(<"$scratch/why")"; exit 77; }
}

# Each rank writes into a file of its own, which is there whatever becomes of mpirun; the last line is its exit status.
write_wrapper() {
  cat >"$scratch/rank" <<END
#!/usr/bin/env bash
log=$scratch/log.\$OMPI_COMM_WORLD_RANK
"\$@" >"\$log" 2>&1
status=\$?
echo "status \$status" >>"\$log"
exit \$status
END
  chmod +x "$scratch/rank"
}

count_of() { cat "$scratch"/log.* 2>/dev/null | grep -cE "$1"; }

# wait_for COUNT PATTERN SECONDS: until so many lines of the ranks' files match.
wait_for() {
  local tenths
  for ((tenths = 10 * $3; tenths > 0; --tenths)); do
    (($(count_of "$2") >= $1)) && return
    sleep 0.1
  done
  echo "only $(count_of "$2") of $1 ranks wrote '$2' within $3 s"
}

run() {
  local nodes=$1 mpirun=$2 ranks=$3 event=$4 i hosts="" job left last
  shift 4
  make_nodes "$nodes" || exit 2
  write_agent
  write_wrapper
  for ((i = 0; i < nodes; ++i)); do hosts+="${hosts:+,}10.231.77.$((i + 1)):$ranks"; done
  mkdir -p "$scratch/tmp"
  ip netns exec "$tag.0" unshare --uts bash -c 'hostname node1; exec "$@"' bash \
    env TMPDIR="$scratch/tmp" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    "$mpirun" --host "$hosts" -n $((nodes * ranks)) --map-by slot --bind-to none --oversubscribe --enable-recovery \
    --mca plm_rsh_agent "$scratch/agent" --mca plm_rsh_no_tree_spawn 1 --mca btl tcp,vader,self --mca btl_tcp_if_include 10.231.77.0/24 \
    --mca oob_tcp_if_include 10.231.77.0/24 --mca btl_vader_single_copy_mechanism none "$scratch/rank" "$@" >"$scratch/mpirun" 2>&1 &
  job=$!
  left=$((nodes * ranks))
  last=$tag.$((nodes - 1))
  [[ $event == none ]] || { wait_for $left ' runs$' 30; sleep "${HEDDLE_EVENT_AFTER:-0}"; }
  case $event in
    kill | stop) left=$(((nodes - 1) * ranks)) ;;&
    kill) kill -9 $(ip netns pids "$last") ;;
    stop) for i in $(ip netns pids "$last"); do [[ $(readlink "/proc/$i/exe") != "$1" ]] || kill -STOP "$i"; done ;;
    cut) ip -n "$last" link set eth0 down ;;
  esac
  wait_for $left '^status ' 60
  grep -H . "$scratch"/log.* | sed "s|^$scratch/log[.]|rank |"
  [[ -z ${HEDDLE_MPIRUN_TEXT:-} ]] || sed 's/^/mpirun: /' "$scratch/mpirun"
  kill -9 "$job" 2>/dev/null
  wait "$job" 2>/dev/null
}

case ${1:-} in
  probe) probe ;;
  run) shift && run "$@" ;;
  *) echo "see the head of $0" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# Several "hosts" on one machine: network namespaces joined by a bridge, each with its own
# hostname, IP address and /etc/hosts. The bridge sits in a namespace of its own (host 0, the
# hub), so nothing but one veth end shows up outside. Needs root. See README.md.
set -euo pipefail

usage() {
  cat <<'TXT'
usage: netns_hosts.sh install            apt-get what is needed (iproute2, util-linux, procps)
       netns_hosts.sh up N               hosts 1..N (and the hub, host 0); adds what is missing
       netns_hosts.sh exec I CMD...      run CMD on host I (replaces this process: same pid, same exit status)
       netns_hosts.sh cut I | heal I     unplug / replug host I's network cable
       netns_hosts.sh crash I            SIGKILL every process on host I
       netns_hosts.sh pids I             processes on host I
       netns_hosts.sh ip I               address of host I (0: the hub, root: this side)
       netns_hosts.sh status | down
environment: NETNS_HOSTS_STATE   state folder   (default /tmp/netns_hosts; one folder = one network)
             NETNS_HOSTS_NAME    host name stem (default host: host1, host2, ...; read at the first up)
             NETNS_HOSTS_SUBNET  first three octets (default 10.213.X, X from the state folder's name)
             NETNS_HOSTS_PRIVATE=DIR  with exec: host I has its own DIR (a folder that is there)
TXT
}

die() { echo "netns_hosts: $*" >&2; exit 1; }

STATE=$(realpath -ms "${NETNS_HOSTS_STATE:-/tmp/netns_hosts}")
SUM=$(cksum <<<"$STATE" | cut -d' ' -f1)
TAG=$(printf 'nh%04x' $((SUM % 65536)))          # prefix of namespace and interface names
NAME=${NETNS_HOSTS_NAME:-host}
SUBNET=${NETNS_HOSTS_SUBNET:-10.213.$((SUM % 250 + 1))}
[[ -f $STATE/config ]] && . "$STATE/config"      # as laid down by the first `up`
HUB=250 ROOT=254 MAX=200

ns() { if [[ $1 == 0 ]]; then echo "$TAG-hub"; else echo "$TAG-$NAME$1"; fi; }
hostname_of() { if [[ $1 == 0 ]]; then echo hub; else echo "$NAME$1"; fi; }
address() { case $1 in 0) echo "$SUBNET.$HUB" ;; root) echo "$SUBNET.$ROOT" ;; *) echo "$SUBNET.$1" ;; esac; }
exists() { [[ -e /run/netns/$(ns "$1") ]]; }
count() { cat "$STATE/count" 2>/dev/null || echo 0; }

need_root() { [[ $(id -u) == 0 ]] || die "must run as root"; }
need_tools() { for t in ip nsenter unshare flock; do command -v "$t" >/dev/null || die "no '$t' here: run '$0 install'"; done; }
need_host() {
  [[ ${1:-} =~ ^[0-9]+$ ]] || die "which host? (a number)"
  exists "$1" || die "no host $1: run '$0 up N' first"
}
# One change of the network at a time. The lock is the state folder itself; nothing inherits fd 9.
lock() { mkdir -p "$STATE"; exec 9<"$STATE"; flock -w 60 9 || die "another run holds $STATE"; }

hub_up() {
  exists 0 && return
  local hub; hub=$(ns 0)
  ip -4 -br addr show | grep -qF " $SUBNET." && die "$SUBNET.0/24 is in use here: set NETNS_HOSTS_SUBNET"
  ip netns add "$hub"
  ip -n "$hub" link set lo up
  ip -n "$hub" link add br0 type bridge stp_state 0 forward_delay 0
  ip -n "$hub" addr add "$(address 0)/24" dev br0
  ip -n "$hub" link set br0 up
  ip link add "$TAG-root" type veth peer name port-root netns "$hub"
  ip -n "$hub" link set dev port-root master br0 up
  ip addr add "$(address root)/24" dev "$TAG-root"
  ip link set dev "$TAG-root" up
}

host_up() {
  exists "$1" && return
  local host hub; host=$(ns "$1") hub=$(ns 0)
  ip netns add "$host"
  ip -n "$host" link set lo up
  ip -n "$host" link add eth0 type veth peer name "port$1" netns "$hub"
  ip -n "$hub" link set dev "port$1" master br0 up
  ip -n "$host" addr add "$(address "$1")/24" dev eth0
  ip -n "$host" link set eth0 up
  # A default route that leads nowhere: "which is my address?" probes work, nothing gets out.
  ip -n "$host" route add default via "$SUBNET.253" dev eth0
}

up() {
  local n=${1:-} i
  [[ $n =~ ^[0-9]+$ ]] && ((n >= 1 && n <= MAX)) || die "up N, with N from 1 to $MAX"
  need_tools; lock
  [[ -f $STATE/config ]] || printf 'NAME=%q\nSUBNET=%q\n' "$NAME" "$SUBNET" >"$STATE/config"
  hub_up
  for ((i = 1; i <= n; i++)); do host_up "$i"; done
  ((n > $(count))) && echo "$n" >"$STATE/count"
  {
    echo "127.0.0.1 localhost"
    echo "$(address 0) hub"
    echo "$(address root) $(hostname -s)"
    for ((i = 1; i <= $(count); i++)); do echo "$(address "$i") $(hostname_of "$i")"; done
  } >"$STATE/hosts.new"
  # In place: running hosts have this very file mounted on /etc/hosts.
  cat "$STATE/hosts.new" >"$STATE/hosts"; rm "$STATE/hosts.new"
  : >"$STATE/resolv.conf"                        # no DNS: unknown names fail at once
}

# Runs in the host's namespaces; arguments: state folder, host name, command...
# shellcheck disable=SC2016
ENTER='
  set -e; state=$1 name=$2; shift 2
  echo "$name" >/proc/sys/kernel/hostname
  mount --bind "$state/hosts" /etc/hosts
  if [ -e /etc/resolv.conf ]; then mount --bind "$state/resolv.conf" /etc/resolv.conf; fi
  if [ -n "${NETNS_HOSTS_PRIVATE:-}" ]; then
    mkdir -p "$state/$name"; mount --bind "$state/$name" "$NETNS_HOSTS_PRIVATE"
  fi
  exec "$@"'

exec_on() {
  need_host "${1:-}"; local i=$1; shift
  [[ $# -gt 0 ]] || die "exec I CMD..."
  need_tools
  exec nsenter --net="/run/netns/$(ns "$i")" -- \
    unshare --mount --uts -- bash -c "$ENTER" "host-$i" "$STATE" "$(hostname_of "$i")" "$@"
}

live_pids() {                                    # of host I; zombies left out: they may never be reaped
  local p
  for p in $(ip netns pids "$(ns "$1")" 2>/dev/null); do
    grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$p/status" && echo "$p"
  done
  return 0
}

crash() {
  local pids _
  for _ in 1 2 3 4 5; do                         # again for what was forked meanwhile
    pids=$(live_pids "$1"); [[ -z $pids ]] && return
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null || true
    sleep 0.1
  done
}

down() {
  [[ -d $STATE ]] || { echo "down already"; return; }
  need_tools; lock
  local i pids all="" t n; n=$(count)
  for ((i = 0; i <= n; i++)); do exists "$i" && all+=" $(live_pids "$i" | tr '\n' ' ')"; done
  # shellcheck disable=SC2086
  if [[ -n ${all// /} ]]; then
    kill -TERM $all 2>/dev/null || true
    for ((t = 0; t < 30; t++)); do
      pids=""; for ((i = 0; i <= n; i++)); do exists "$i" && pids+=$(live_pids "$i"); done
      [[ -z $pids ]] && break; sleep 0.1
    done
  fi
  for ((i = n; i >= 0; i--)); do
    exists "$i" || continue
    crash "$i"; ip netns del "$(ns "$i")"
  done
  # The kernel takes a namespace apart in the background; wait for our last visible trace.
  ip link del "$TAG-root" 2>/dev/null || true
  for ((t = 0; t < 50; t++)); do [[ -e /sys/class/net/$TAG-root ]] || break; sleep 0.1; done
  rm -rf "$STATE"
}

status() {
  [[ -f $STATE/config ]] || { echo "down"; return 1; }
  local i link
  for ((i = 0; i <= $(count); i++)); do
    exists "$i" || { echo "$i $(hostname_of "$i") missing"; continue; }
    link=-; [[ $i != 0 ]] && link=$(ip -n "$(ns 0)" -br link show "port$i" | awk '{print $2}')
    echo "$i $(hostname_of "$i") $(address "$i") ns=$(ns "$i") link=$link processes=$(live_pids "$i" | wc -l)"
  done
}

cmd=${1:-}; [[ $# -gt 0 ]] && shift
case $cmd in -h | --help | help | "") usage; exit 0 ;; esac
need_root
case $cmd in
  install)
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2 util-linux procps >/dev/null ;;
  up) up "$@" ;;
  exec) exec_on "$@" ;;
  cut) need_host "${1:-}"; ip -n "$(ns 0)" link set dev "port$1" down ;;
  heal) need_host "${1:-}"; ip -n "$(ns 0)" link set dev "port$1" up ;;
  crash) need_host "${1:-}"; crash "$1" ;;
  pids) need_host "${1:-}"; live_pids "$1" ;;
  ip) [[ -n ${1:-} ]] || die "ip I"; address "$1" ;;
  status) status ;;
  down) down ;;
  *) usage >&2; exit 2 ;;
esac

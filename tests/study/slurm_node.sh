#!/usr/bin/env bash
# One machine as a whole SLURM cluster, for tests/test_slurm.py and as root: munge, slurmctld and slurmd of Debian's packages, one
# node with two stand-in GPUs, a partition for CPUs and one for GPUs.
#   tests/study/slurm_node.sh install        apt-get, where the programs are missing
#   tests/study/slurm_node.sh start FOLDER   state and logs go to FOLDER; prints the node when it is idle
#   tests/study/slurm_node.sh stop FOLDER
set -euo pipefail

CONF=/etc/slurm
MARK="# Written by Tilewright's tests."
HOST=$(hostname -s)

fail() { echo "slurm_node: $1" >&2; exit 1; }

install_packages() {
  for name in slurmctld slurmd munged; do command -v $name >/dev/null || missing=1; done
  [ -n "${missing:-}" ] || return 0
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || fail "expected apt-get and root"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
}

# Jobs do not get SLURM_CONF from Snakemake, so the configuration stands where every command looks for it; a real one stays.
configure() {
  local state=$1 track=$2 task=$3 gather=$4 cores memory
  [ ! -e $CONF/slurm.conf ] || grep -qF "$MARK" $CONF/slurm.conf || fail "$CONF/slurm.conf: expected none, found a cluster's own"
  mkdir -p "$state"/{ctld,d,log} $CONF
  # A job of four cores has to fit, on whatever machine this is.
  cores=$(($(nproc) > 4 ? $(nproc) : 4))
  memory=$(awk '/MemTotal/ {printf "%d", $2 / 1024 * 0.9}' /proc/meminfo)
  # Device numbers of local use: a node needs a file for each GPU, and nothing opens it.
  for i in 0 1; do [ -e /dev/standin$i ] || mknod /dev/standin$i c 240 $i; done
  cat >$CONF/slurm.conf <<EOF
$MARK
ClusterName=tilewright
SlurmctldHost=$HOST
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/d
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.log
SlurmdParameters=config_overrides
MpiDefault=none
ProctrackType=$track
TaskPlugin=$task
$gather
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
MinJobAge=3600
KillWait=2
# Time limits hold to the minute, as tests want them.
OverTimeLimit=0
GresTypes=gpu
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$cores Boards=1 SocketsPerBoard=1 CoresPerSocket=$cores ThreadsPerCore=1 RealMemory=$memory Gres=gpu:a100:2 State=UNKNOWN
PartitionName=cpu Nodes=$HOST Default=YES MaxTime=INFINITE DefMemPerCPU=1000 State=UP
PartitionName=gpu Nodes=$HOST MaxTime=INFINITE DefMemPerCPU=1000 State=UP
EOF
  printf 'AutoDetect=off\nNodeName=%s Name=gpu Type=a100 File=/dev/standin[0-1]\n' "$HOST" >$CONF/gres.conf
  printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n' >$CONF/cgroup.conf
}

start_munge() {
  munge -n >/dev/null 2>&1 && return
  touch "$1/munged"
  install -d -o munge -g munge -m 755 /run/munge
  [ -s /etc/munge/munge.key ] || setpriv --reuid munge --regid munge --clear-groups mungekey
  setpriv --reuid munge --regid munge --clear-groups munged >>"$1/log/start.log" 2>&1
  for _ in $(seq 50); do munge -n >/dev/null 2>&1 && return; sleep 0.1; done
  fail "munged: expected a credential within 5 s, found none"
}

start() {
  [ "$(id -u)" = 0 ] || fail "expected root, found $(id -un)"
  for name in slurmctld slurmd munged; do command -v $name >/dev/null || fail "$name: not installed; known: slurm_node.sh install"; done
  mkdir -p "$1"
  if [ -d /sys/fs/cgroup/memory ] && [ -d /sys/fs/cgroup/freezer ]; then
    configure "$1" proctrack/cgroup task/cgroup ""
  else # Without the first version of cgroups slurmd polls memory itself, and what it kills is FAILED, not OUT_OF_MEMORY.
    configure "$1" proctrack/linuxproc task/none JobAcctGatherParams=OverMemoryKill
  fi
  start_munge "$1"
  # -c: nothing of an earlier node is remembered.
  # Into files: who waits for this script's output does not wait for the daemons'.
  slurmctld -c >>"$1/log/start.log" 2>&1
  slurmd -N "$HOST" >>"$1/log/start.log" 2>&1
  for _ in $(seq 100); do
    if sinfo -h -o %T 2>/dev/null | grep -q idle; then
      sinfo -N -o "%N %P %T %c %m %G"
      return
    fi
    sleep 0.2
  done
  tail -n 5 "$1"/log/*.log >&2
  stop "$1"
  fail "expected an idle node within 20 s, found: $(sinfo -h -o %T 2>&1 | sort -u | tr '\n' ' ')"
}

stop() {
  for name in slurmd slurmctld; do
    [ ! -s "$1/$name.pid" ] || kill "$(cat "$1/$name.pid")" 2>/dev/null || true
  done
  # munged is left where it ran before.
  [ ! -e "$1/munged" ] || kill "$(cat /run/munge/munged.pid)" 2>/dev/null || true
  for _ in $(seq 50); do [ -e "$1/slurmd.pid" ] || [ -e "$1/slurmctld.pid" ] || break; sleep 0.1; done
  ! grep -qF "$MARK" $CONF/slurm.conf 2>/dev/null || rm -f $CONF/{slurm,gres,cgroup}.conf
  rm -f /dev/standin[01]
}

case "${1:-} $#" in
  "install 1") install_packages ;;
  "start 2") start "$(realpath -m "$2")" ;;
  "stop 2") stop "$(realpath -m "$2")" ;;
  *) sed -n 2,6p "$0" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# A SLURM cluster of one node on this machine, for tests/slurm: munged, slurmctld and slurmd in a directory of their own.
#   cluster.sh start DIRECTORY    starts them and waits until the node is idle
#   cluster.sh stop DIRECTORY     ends them, by the process ids that they wrote there
# Needs Debian's slurm-wlm and munge, and root. Afterwards: export SLURM_CONF=DIRECTORY/slurm.conf
set -euo pipefail

command=$1
directory=$(realpath "$2")
export SLURM_CONF=$directory/slurm.conf

write_configuration() {
    mkdir -p "$directory"/{state,spool,munge}
    chmod 700 "$directory/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$directory/munge/key")
    local host cpus controller_port node_port
    host=$(hostname -s)
    # More than there are: two tasks must run beside each other on any machine.
    cpus=$(($(nproc) > 4 ? $(nproc) : 4))
    controller_port=$((20000 + $$ % 10000))
    node_port=$((controller_port + 10000))
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again starts when its old credentials have expired: two minutes, unless it is said otherwise.
AuthInfo=socket=$directory/munge/socket,cred_expire=10
CredType=cred/munge
SlurmctldPort=$controller_port
SlurmdPort=$node_port
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool
SlurmctldPidFile=$directory/slurmctld.pid
SlurmdPidFile=$directory/slurmd.pid
SlurmctldLogFile=$directory/slurmctld.log
SlurmdLogFile=$directory/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=60
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
    write_configuration
    munged --force --key-file="$directory/munge/key" --socket="$directory/munge/socket" \
        --pid-file="$directory/munge/pid" --log-file="$directory/munge/log" --seed-file="$directory/munge/seed"
    slurmctld -f "$SLURM_CONF"
    slurmd -f "$SLURM_CONF" -N "$(hostname -s)"
    for _ in $(seq 100); do
        if sinfo -h -o %t 2>/dev/null | grep -qx idle; then return; fi
        sleep 0.2
    done
    sinfo >&2 || true
    tail -n 20 "$directory"/slurm*.log >&2
    exit 1
}

stop() {
    for file in slurmd.pid slurmctld.pid munge/pid; do
        if [ -s "$directory/$file" ]; then kill "$(cat "$directory/$file")" || true; fi
    done
}

case $command in
start) start ;;
stop) stop ;;
*) echo "usage: cluster.sh start|stop DIRECTORY" >&2 && exit 2 ;;
esac

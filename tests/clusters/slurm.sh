#!/bin/bash
# A Slurm cluster of one machine, without systemd and without privileges: munged, slurmctld and slurmd in the foreground of
# this script, which runs until it is ended. Debian's packages are fetched and unpacked, never installed.
#
#   tests/clusters/slurm.sh FOLDER [CPUS]      then, in another shell:  . FOLDER/env; sinfo
set -euo pipefail
folder=$(realpath -m "$1") cpus=${2:-2} host=$(hostname -s)
packages="slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0"
mkdir -p "$folder"/{debs,root,state,spool,run}
if [ ! -x "$folder/root/usr/sbin/slurmctld-wlm" ]; then
  (cd "$folder/debs" && apt-get download $packages) >"$folder/fetch.log" 2>&1
  for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root"; done
fi
root=$folder/root lib=$folder/root/usr/lib/x86_64-linux-gnu
cat >"$folder/env" <<END
export PATH=$root/usr/bin:\$PATH LD_LIBRARY_PATH=$lib:$lib/slurm-wlm\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} SLURM_CONF=$folder/slurm.conf
END
. "$folder/env"
cat >"$folder/slurm.conf" <<END
ClusterName=one
SlurmctldHost=$host
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$((20000 + RANDOM % 10000))
SlurmdPort=$((30000 + RANDOM % 10000))
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.socket
CredType=cred/munge
PluginDir=$lib/slurm-wlm
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
MinJobAge=600
SchedulerParameters=sched_min_interval=0,bf_interval=1,requeue_delay=0
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=$host Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=high Nodes=$host MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
END
head -c 1024 /dev/urandom >"$folder/run/munge.key" && chmod 400 "$folder/run/munge.key"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
"$root/usr/sbin/munged" --force -F --socket "$folder/run/munge.socket" --key-file "$folder/run/munge.key" \
  --pid-file "$folder/run/munged.pid" --log-file "$folder/munged.log" --seed-file "$folder/run/munge.seed" &
until [ -S "$folder/run/munge.socket" ]; do sleep 0.2; done
"$root/usr/sbin/slurmctld-wlm" -D -i &
"$root/usr/sbin/slurmd-wlm" -D -N "$host" -d "$root/usr/sbin/slurmstepd-wlm" &
wait -n

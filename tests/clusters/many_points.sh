#!/bin/bash
# A sweep of 1,500 trivial points on the cluster of slurm.sh, in arrays of 1,000 jobs: one point is trained on
# this machine, the others are queued, 50 are canceled, and the same command is repeated until nothing is left to queue.
#
#   tests/clusters/slurm.sh FOLDER &      tests/clusters/many_points.sh FOLDER [POINTS]
#
# The jobs are Slurm's own. 1,500 training runs would import torch 1,500 times, so only the first job of each array trains.
# In the others, a function of the shell stands for `srun`: it copies the result of the trained point.
set -euo pipefail
folder=$(realpath "$1") points=${2:-1500} runs=$(realpath "$1")/runs
. "$folder/env"
cat >"$folder/finish.py" <<'PYTHON'
import json, sys, time
from pathlib import Path

folder, job = Path(sys.argv[1]), sys.argv[2]
result = json.loads((folder / "first.json").read_text())
while True:  # the name of the job follows the submission of the array
    for named in folder.glob("runs/*/slurm_job"):
        if named.read_text() == job:
            file = named.with_name("status.json")
            status = {**json.loads(file.read_text()), "status": "done"}
            (file.parent / "result.json").write_text(json.dumps({**result, **status}))
            part = file.with_suffix(".part")
            part.write_text(json.dumps(status))
            part.rename(file)
            sys.exit()
    time.sleep(1)
PYTHON
cat >"$folder/setup.sh" <<SETUP
export SUBMITIT_PREEMPT_SIGNAL=URG
srun() {
  if [ "\$SLURM_ARRAY_TASK_ID" = 0 ]; then command srun "\$@"; return; fi
  python3 -S "$folder/finish.py" "$folder" "\${SLURM_ARRAY_JOB_ID}_\$SLURM_ARRAY_TASK_ID"
}
SETUP
sweep() {
  distill-run -m task=demo_sentences teacher=minilm_l6 student=fresh student.layers=1 student.width=64 method=nkd \
    optim.max_steps=1 runtime.device=cpu runtime.threads=1 store.dir="$folder/store" hydra.sweep.dir="$runs" "$@"
}
queue() {
  sweep "seed=range($points)" hydra/launcher=submitit_slurm hydra.launcher.cpus_per_task=1 sweep.wait=false \
    "hydra.launcher.setup=['. $folder/setup.sh']" >"$folder/$1.txt" 2>&1 || true
  echo "$1: $(grep -E '^[0-9]+ points|queued [0-9]+ points' "$folder/$1.txt" | paste -sd ';')"
  squeue --me -h -r -t all -o '%F %T' | sort | uniq -c | awk '{printf "  array %s: %s jobs %s\n", $2, $1, $3}'
}
last_array() { squeue --me -h -r -t pending -o %F | sort -n | tail -1; }

sweep seed=0 >"$folder/one.txt" 2>&1
cp "$runs"/*/result.json "$folder/first.json"
queue first
scancel "$(last_array)_[$((points % 1000 - 51))-$((points % 1000 - 2))]"
queue second
while [ -n "$(squeue --me -h -t pending,running,completing -o %i)" ]; do sleep 5; done
queue third
echo "statuses: $(cat "$runs"/*/status.json | grep -o '"status": "[a-z]*"' | sort | uniq -c | paste -sd ';')"
distill-run table "$runs"

#!/usr/bin/env bash
# The learner of a run, on one node; actors.sh starts its actors, as many jobs of them as wanted, whenever wanted.
#
#   sbatch deploy/slurm/learner.sh experiment=deploy/run.yaml run.name=shop
#   sbatch --nodes=2 deploy/slurm/actors.sh experiment=deploy/run.yaml run.name=shop
#
# Both get the same settings. RUNS is a folder on a filesystem that all nodes share (default: outputs in the current
# directory); in RUNS/RUN_NAME lie the run itself, the keys, and `learner`, the file that says where the learner is now.
#
# --exclusive: a node's /dev/shm takes the learner or one job of actors of a run, and is refused to a second.
#SBATCH --job-name=impala-learner
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

# sbatch copies one file to the node, so what both scripts begin with stands in both.
read_settings() {
  python - "$@" <<'PYTHON'
import sys
from impala_llm.config import ConfigError, load
try:
    config = load(sys.argv[1:])
except ConfigError as error:
    sys.exit(f"impala-llm: {error}")
print(config.run.name, config.learner.tensor_parallel)
PYTHON
}
settings=$(read_settings "$@")
read -r name width <<<"$settings"
run=$(realpath -m "${RUNS:-outputs}/$name")
if [[ $run == *\'* ]]; then
  echo "the run's folder $run has an apostrophe, which cannot be quoted in settings: set RUNS to a folder without one" >&2
  exit 2
fi
port=${PORT:-7400}
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}} # those that srun gets: as many as the job asks for
ranks=${RANKS:-$((${gpus##*:} / width))}
if [ "$ranks" -lt 1 ]; then
  echo "learner.tensor_parallel=$width needs $width GPUs, and this job has ${gpus##*:}: raise --gpus-per-node" >&2
  exit 2
fi

mkdir -p "$run"
# Keys are made once. The folder is this user's alone, on every node.
[ -d "$run/keys" ] || impala-llm keys --dir "$run/keys" >/dev/null

# Renamed into place: actors read it at any moment. A learner that cannot start, as another one of this run lives, gives
# that one its place back.
before=$(cat "$run/learner" 2>/dev/null || true)
own="tcp://${LEARNER_ADDRESS:-$(hostname -f)}:$port"
echo "$own" >"$run/learner.new"
mv "$run/learner.new" "$run/learner"

# The ranks of a learner share the memory of one host, hence --standalone: one node. torchrun starts them again when one
# dies, and passes the signal on that Slurm sends three minutes before the end of the job: time to save what was learned.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150
# Since Slurm 22.05 srun does not take the cores of a task over from sbatch.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
trap : TERM # which srun gets as well: wait for what it saves
status=0
srun --ntasks=1 --kill-on-bad-exit=1 \
  torchrun --standalone --nproc-per-node "$((ranks * width))" --max-restarts "${RESTARTS:-3}" -m impala_llm.learner \
  "$@" "run.dir='$run'" actor.num_actors=0 learner.num_ranks="$ranks" \
  pipeline.bind="tcp://${BIND_ADDRESS:-0.0.0.0}:$port" "pipeline.keys='$run/keys'" || status=$?
# Not where a later learner has written its own.
if [ "$status" -ne 0 ] && [ -n "$before" ] && [ "$(cat "$run/learner")" = "$own" ]; then
  echo "$before" >"$run/learner.new"
  mv "$run/learner.new" "$run/learner"
fi
exit "$status"

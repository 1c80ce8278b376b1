#!/usr/bin/env bash
# Actors of a run on any number of nodes, one supervisor a node; see learner.sh, which may be submitted before or after.
#
#   sbatch --nodes=2 deploy/slurm/actors.sh experiment=deploy/run.yaml run.name=shop learner.num_ranks=4
#
# learner.num_ranks must be what the learner has: its ports are counted from it. With engine=sglang each node has as many
# actors as its GPUs hold servers; otherwise ACTORS says how many, by default one. A node that is lost, and a job of
# actors that ends or joins, is no error: the learner goes on with those that it has. With the first node of a job, where
# this script runs, the job ends.
#
# --exclusive: a node's /dev/shm takes the learner or one job of actors of a run, and is refused to a second.
#SBATCH --job-name=impala-actors
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

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
read -r name _ <<<"$settings"
run=$(realpath -m "${RUNS:-outputs}/$name")
if [[ $run == *\'* ]]; then
  echo "the run's folder $run has an apostrophe, which cannot be quoted in settings: set RUNS to a folder without one" >&2
  exit 2
fi

until [ -d "$run/keys/authorised" ] && [ -s "$run/learner" ]; do
  echo "waiting for the learner of run $name to write $run/learner"
  sleep 10
done

words=("$@" "pipeline.connect='@$run/learner'" "pipeline.keys='$run/keys'" run.terminal=false)
[ -z "${ACTORS:-}" ] || words+=("actor.num_actors=$ACTORS")
# Since Slurm 22.05 srun does not take the cores of a task over from sbatch.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Each node has logs of its own: the folder of the run is shared, and actors of every node are numbered from 0.
# shellcheck disable=SC2016  # the shell of each node expands it
exec srun --kill-on-bad-exit=0 --no-kill \
  bash -c 'run=$1; shift; exec impala-llm actors "$@" "run.dir='\''$run/actors/$(hostname)'\''"' \
  actors "$run" "${words[@]}"

#!/usr/bin/env bash
# Actors alone, for a learner on this host that somebody started by torchrun with the same settings:
#   torchrun --standalone --nproc-per-node 1 impala_llm/learner.py experiment=toy actor.num_actors=2
#   tools/launch_actors.sh --num-actors 2 experiment=toy
# Both need the same run.name, run.dir and actor.num_actors: from the last each process takes its share of the cores.
# With engine=sglang each actor starts an SGLang server on GPUs of its own (engine.tensor_parallel of those that are
# visible); without --num-actors there is one actor for each such share, or one on a host without GPU.
# Logs: logs/ in run.dir. Ends when the learner says stop (status 0), when an actor is lost for good or finds its learner
# gone (status 1), and with all its actors on Ctrl-C or SIGTERM.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
num_actors=()
if [ "${1:-}" = "--num-actors" ] && [ -n "${2:-}" ]; then
  num_actors=("actor.num_actors=$2")
  shift 2
fi
case ${1:-} in -*)
  echo "usage: ${0##*/} [--num-actors N] [key=value ...]" >&2
  exit 2 ;;
esac
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m impala_llm.launch "$@" ${num_actors[@]+"${num_actors[@]}"}

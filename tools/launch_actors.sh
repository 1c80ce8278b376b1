#!/usr/bin/env bash
# `impala-llm actors` from a checkout: actors alone, for a learner on this host that somebody started by hand with the
# same settings:
#   python impala_llm/learner.py experiment=toy actor.num_actors=2
#   tools/launch_actors.sh --num-actors 2 experiment=toy
# Both need the same run.name, run.dir and actor.num_actors: from the last each process takes its share of the cores.
# With engine=sglang each actor starts an SGLang server on GPUs of its own (engine.tensor_parallel of those that are
# visible and not the learner's); without --num-actors there is one actor for each such share, or one on a host without GPU.
# Logs: logs/ in run.dir. Ends when the learner says stop (status 0), when an actor is lost for good or finds its learner
# gone (status 1), and with all its actors on Ctrl-C or SIGTERM.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m impala_llm.cli actors "$@"

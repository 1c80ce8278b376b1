#!/usr/bin/env bash
# The tiny shopper learns for 50 updates from episodes on an SGLang server of its actor, here on a CPU. The environment
# and the algorithm are the quickstart's; settings follow as key=value:
#   tools/sglang_webshop.sh run.seed=1 run.name=sglang_webshop-1
# Uses .venv and .venv-sglang, which it makes on the first call, or, with IMPALA_LLM_SGLANG_PYTHON set, the impala-llm on
# PATH and that interpreter. The last line says where the curve is: a row an update.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [ -z "${IMPALA_LLM_SGLANG_PYTHON:-}" ]; then
  tools/setup_venv.sh
  tools/install_sglang_cpu.sh
  export PATH=$root/.venv/bin:$PATH
  IMPALA_LLM_SGLANG_PYTHON=$root/.venv-sglang/bin/python
fi
name=sglang_webshop
for word in "$@"; do
  case $word in run.name=*) name=${word#run.name=} ;; esac
done
impala-llm train experiment=quickstart run.name="$name" run.dir="outputs/$name" \
  engine=sglang engine.python="$IMPALA_LLM_SGLANG_PYTHON" actor.max_episodes=32 \
  learner.total_updates=50 learner.max_minutes=null learner.decay=constant evaluation.before_and_after=false "$@"

python - "outputs/$name" <<'PY'
import csv
import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
columns = (
    "rollout/score", "rollout/success_rate", "rollout/turns", "rollout/action_tokens", "loss/entropy", "ratio/ess",
    "staleness/mean", "staleness/oldest", "staleness/span", "mismatch/tokens", "mismatch/logprob_mean",
    "mismatch/logprob_max", "weights/pause_s", "weights/transfer_s", "actor/generated_tokens_per_s",
    "learner/trained_tokens_per_s", "time/step_s", "time/idle_share", "pipeline/received", "buffer/evicted",
)
steps = [json.loads(line) for line in (run / "tensorboard" / "metrics.jsonl").read_text().splitlines()]
with (run / "curve.csv").open("w", newline="") as out:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["update", "seconds", *columns])
    for step in steps:
        figures = ("" if (value := step.get(name)) is None else f"{value:.5g}" for name in columns)
        writer.writerow([step["step"], f"{step['time_s'] - steps[0]['time_s']:.1f}", *figures])
print(run / "curve.csv")
PY

#!/usr/bin/env bash
# From a fresh clone to a trained shopper: makes .venv on the first call, then trains. Settings follow as key=value:
#   tools/quickstart.sh run.name=second run.seed=1        each run has a folder of its own
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/tools/setup_venv.sh"
cd "$root"
exec .venv/bin/impala-llm train experiment=quickstart "$@"

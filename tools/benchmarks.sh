#!/usr/bin/env bash
# Measures eight of the ten benchmarks (not `checkpoint` and `gateway`), one after the other, and writes their tables
# into docs/benchmarks.md. The machine must have nothing else to do.
#
#     PYTHON=/path/to/python tools/benchmarks.sh [results.jsonl]     # with the file: only writes the tables
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
results=${1:-outputs/benchmarks.jsonl}
if [ $# -eq 0 ]; then
  mkdir -p outputs
  rm -f "$results"
  for name in transport weights replay engine vtrace learner webshop schedule; do
    echo "$(date +%T) $name" >&2
    "$python" -m impala_llm.cli bench "$name" --json | tail -n 1 >>"$results"
  done
fi
"$python" tools/benchmark_tables.py "$results"

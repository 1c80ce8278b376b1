#!/usr/bin/env bash
# One command on a host with GPUs, and a table: does it compute there what it computes on a CPU, and how fast?
#   tools/gpu_check.sh                         every part; those that need more than there is say what they need
#   tools/gpu_check.sh --model DIRECTORY       speed with a model of your own
#   tools/gpu_check.sh --device cpu engine     one part, on the CPU
# Status 0 where nothing has failed. The package is installed into .venv at the first run; a Python that has it is taken
# in its place where PYTHON names it. Then `--help` lists the parts.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
case " $* " in *" -h "* | *" --help "*)
  if ! command -v "$python" >/dev/null; then # the list of parts needs the package; these lines do not
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
  fi
  ;;
esac
[ -n "${PYTHON:-}" ] || "$root/tools/setup_venv.sh"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/tools/gpu_check.py" "$@"

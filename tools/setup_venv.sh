#!/usr/bin/env bash
# Makes .venv with everything that training and tests need, pinned by constraints.txt. A second call does nothing.
#   tools/setup_venv.sh            uses python3; another interpreter: PYTHON=/path/to/python tools/setup_venv.sh
# torch comes first and by itself: its CPU build on a machine without an NVIDIA GPU, its CUDA build with one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
torch_version=$(sed -n 's/^torch==//p' constraints.txt)
torch_cpu_index=https://download.pytorch.org/whl/cpu
venv=$root/.venv
stamp=$venv/.impala_llm_stamp

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python >= 3.11 among: ${PYTHON:-python3 python3.13 python3.12 python3.11 python}." \
    "Install one, or name it: PYTHON=/path/to/python3.11 $0"
}

has_nvidia_gpu() {
  [ -d /proc/driver/nvidia/gpus ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
}

# A quick look before pip is let loose on it: pip's own retries would wait a minute for a host that cannot be reached.
reachable() {
  "$venv/bin/python" - "$1" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
PY
}

# "2.13.0 cpu", "2.13.0 13.0" (the CUDA version) or "none", without importing it: its dependencies may not be there yet.
installed_torch() {
  "$venv/bin/python" - <<'PY'
import importlib.util, pathlib, runpy
spec = importlib.util.find_spec("torch")
found = spec and spec.origin and runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py")))
print(found["__version__"].split("+")[0] + " " + (found["cuda"] or "cpu") if found else "none")
PY
}

# --no-deps: a CUDA build must not get to ask for its gigabytes of libraries. What the CPU build needs comes below.
install_cpu_torch() {
  if reachable "$torch_cpu_index/torch/"; then
    say "torch $torch_version, CPU build, from $torch_cpu_index"
    "$pip" install -q --no-deps --index-url "$torch_cpu_index" "torch==$torch_version+cpu" && return
  fi
  say "torch $torch_version from the package index that pip is configured for"
  "$pip" install -q --no-deps "torch==$torch_version"
  [ "$(installed_torch)" = "$torch_version cpu" ] || {
    "$pip" uninstall -q -y torch
    die "this machine has no NVIDIA GPU, but pip finds only a CUDA build of torch, and $torch_cpu_index cannot be" \
      "reached. Fetch the CPU wheel of torch $torch_version and run again with PIP_FIND_LINKS=FOLDER_OF_THE_WHEEL"
  }
}

install_cuda_torch() {
  case $(installed_torch) in *" cpu") "$pip" uninstall -q -y torch ;; esac
  say "torch $torch_version, CUDA build"
  "$pip" install -q -c constraints.txt "torch==$torch_version"
  case $(installed_torch) in *" cpu") say "WARNING: pip found only a CPU build of torch: the GPU stays idle" ;; esac
}

if has_nvidia_gpu; then build=cuda; else build=cpu; fi
wanted="$build $(cat pyproject.toml constraints.txt tools/setup_venv.sh | cksum) $root"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
  exit 0
fi

python=$(find_python)
# Fails also in an environment that was moved here: its scripts name their old place.
if ! "$venv/bin/pip" --version >/dev/null 2>&1; then
  say "virtual environment in $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv" || die "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv"
fi
pip=$venv/bin/pip
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ "$build" = cuda ]; then
  install_cuda_torch
elif [ "$(installed_torch)" != "$torch_version cpu" ]; then
  install_cpu_torch
fi
say "impala_llm and its dependencies"
"$pip" install -q -c constraints.txt -e '.[dev]'
echo "$wanted" > "$stamp"
say "done"

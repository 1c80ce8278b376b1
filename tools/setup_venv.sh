#!/usr/bin/env bash
# Makes .venv with everything that training and tests need, pinned by constraints.txt. A second call does nothing.
#   tools/setup_venv.sh            uses python3; another interpreter: PYTHON=/path/to/python tools/setup_venv.sh
# torch comes first and by itself: its CPU build on a machine without an NVIDIA GPU, its CUDA build with one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
torch_version=$(sed -n 's/^torch==//p' constraints.txt)
name=setup
venv=$root/.venv
stamp=$venv/.impala_llm_stamp
. tools/lib/venv.sh

# What a link leads to is another checkout's, or the user's own: an installation here would change it for all.
if [ -L "$venv" ]; then
  say ".venv is a link, to $(readlink "$venv"): it is used as it is"
  exit 0
fi

has_nvidia_gpu() {
  [ -d /proc/driver/nvidia/gpus ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
}

install_cuda_torch() {
  case $(installed_torch) in *" cpu") "$pip" uninstall -q -y torch ;; esac
  say "torch $torch_version, CUDA build"
  counting "$pip" install -q -c constraints.txt "torch==$torch_version"
  case $(installed_torch) in *" cpu") say "WARNING: pip found only a CPU build of torch: the GPU stays idle" ;; esac
}

if has_nvidia_gpu; then build=cuda; else build=cpu; fi
wanted="$build $(cat pyproject.toml constraints.txt tools/setup_venv.sh tools/lib/venv.sh | cksum) $root"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
  exit 0
fi

make_venv
if [ "$build" = cuda ]; then
  install_cuda_torch
elif [ "$(installed_torch)" != "$torch_version cpu" ]; then
  install_cpu_torch
fi
say "impala_llm and its dependencies"
counting "$pip" install -q -c constraints.txt -e '.[dev]'
echo "$wanted" > "$stamp"
say "done"

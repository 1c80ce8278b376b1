#!/usr/bin/env bash
# Makes a virtual environment with the real SGLang for a machine without GPU. A second call does nothing.
#   tools/install_sglang_cpu.sh [VENV]       default: .venv-sglang, where the tests look for it
# Then: engine=sglang engine.python=VENV/bin/python. Another interpreter to start from: PYTHON=/path/to/python3.11
# An environment of its own, since SGLang pins versions of its own. With a GPU: pip install -e '.[sglang]'.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=sglang
venv=$(realpath -m "${1:-$root/.venv-sglang}")
cd "$root"
files=tools/sglang_cpu
torch_version=$(sed -n 's/^torch==//p' $files/constraints.txt)
stamp=$venv/.impala_llm_stamp
. tools/lib/venv.sh

wanted="$(cat $files/*.py $files/constraints.txt tools/install_sglang_cpu.sh tools/lib/venv.sh | cksum) $venv"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
  exit 0
fi
if [ -d "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
  die "$venv exists and is no virtual environment: name another folder"
fi

make_venv
[ "$(installed_torch)" = "$torch_version cpu" ] || install_cpu_torch
say "SGLang $(sed -n 's/^sglang==//p' $files/constraints.txt) and what it needs on a CPU"
counting "$pip" install -q --no-deps -r $files/constraints.txt

# Each file says at its top why it is needed.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp $files/*.py "$site/"
for module in impala_llm_torchvision_ops impala_llm_forked_parts; do
  echo "import $module" > "$site/$module.pth"
done

SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 "$venv/bin/python" -W ignore -c 'import torchvision, sglang.srt.server_args' ||
  die "SGLang was installed into $venv but cannot be imported, see above. Remove that folder and try again"
echo "$wanted" > "$stamp"
say "done: $venv/bin/python"

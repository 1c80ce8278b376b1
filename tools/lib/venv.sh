# Sourced by the scripts that make a virtual environment: finding Python, making the environment, torch's CPU build.
# A script sets before: name (stands before its messages), venv (the environment's folder), torch_version.
torch_cpu_index=https://download.pytorch.org/whl/cpu
pip=$venv/bin/pip
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "$name: $*" >&2; }
die() { say "$*"; exit 1; }

# Runs a command that is silent for a long time; on a terminal its seconds are counted meanwhile. The counter goes with
# this shell: Ctrl-C does not reach what runs in the background.
counting() {
  local counter status=0
  [ -t 2 ] || { "$@"; return; }
  (while sleep 1 && kill -0 $$ 2>/dev/null; do printf '%s: %d s\r' "$name" $((seconds = ${seconds:-0} + 1)) >&2; done) &
  counter=$!
  "$@" || status=$?
  kill "$counter" && wait "$counter" 2>/dev/null || true
  printf '\033[K' >&2
  return "$status"
}

find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python >= 3.11 among: ${candidates[*]}." \
    "Install one, or name it: PYTHON=/path/to/python3.11 $0"
}

# Keeps an environment that works. One that was moved here does not: its scripts name their old place.
make_venv() {
  local python
  "$venv/bin/pip" --version >/dev/null 2>&1 && return
  python=$(find_python)
  say "virtual environment in $venv with $("$python" --version)"
  counting "$python" -m venv --clear "$venv" || die "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv"
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

# --no-deps: a CUDA build must not get to ask for its gigabytes of libraries. What the CPU build needs comes later.
install_cpu_torch() {
  if reachable "$torch_cpu_index/torch/"; then
    say "torch $torch_version, CPU build, from $torch_cpu_index"
    counting "$pip" install -q --no-deps --index-url "$torch_cpu_index" "torch==$torch_version+cpu" && return
  fi
  say "torch $torch_version from the package index that pip is configured for"
  counting "$pip" install -q --no-deps "torch==$torch_version"
  [ "$(installed_torch)" = "$torch_version cpu" ] || {
    "$pip" uninstall -q -y torch
    die "the CPU build of torch is wanted, but pip finds only a CUDA build, and $torch_cpu_index cannot be" \
      "reached. Fetch the CPU wheel of torch $torch_version and run again with PIP_FIND_LINKS=FOLDER_OF_THE_WHEEL"
  }
}

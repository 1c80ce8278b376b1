#!/usr/bin/env bash
# Every check of the repository, in a virtual environment that it makes itself. Arguments go to both pytest runs:
#   tools/test.sh                          everything
#   tools/test.sh tests/envs -k reward     the linters, and of the tests only these
#   IMPALA_LLM_EXAMPLES=10 tools/test.sh   ten times as many random examples in the tests of decoders and tickets
# All checks run even when one fails; the exit status is 0 only if none did.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/tools/setup_venv.sh"
cd "$root"
export PATH=$root/.venv/bin:$PATH

reports=$(mktemp -d)
installing=
trap '[ -z "$installing" ] || kill "$installing" 2>/dev/null || true; rm -rf "$reports"' EXIT
failed=()
# SGLang for a CPU, about 80 s the first time, beside the linters. SKIP_SGLANG=1 leaves it out: its tests are then
# skipped, and counted.
if [ -z "${SKIP_SGLANG:-}${IMPALA_LLM_SGLANG_PYTHON:-}" ]; then
  "$root/tools/install_sglang_cpu.sh" >"$reports/sglang.log" 2>&1 &
  installing=$!
fi
collected=0

check() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

# pytest's status 5 is "no test selected": a narrow selection leaves one of the two runs empty.
run_pytest() {
  local name=$1 status=0
  shift
  pytest -rsR --junitxml "$reports/$name.xml" "$@" || status=$?
  [ "$status" -eq 5 ] && return 0
  collected=1
  return "$status"
}

check "ruff format" ruff format --check .
check "ruff" ruff check .
check "mypy" mypy
check "import-linter" lint-imports
if [ -n "$installing" ]; then
  wait "$installing" || failed+=("SGLang could not be installed")
  installing=
  cat "$reports/sglang.log"
fi
check "fast tests" run_pytest fast -m "not system" -n 3 --dist worksteal "$@"
# They start real processes, and a busy machine can be late for a deadline: one that fails is played once more. pytest's
# own summary names each RERUN; one that comes again and again is a defect of the test or the product. Three at a
# time, also on two cores, since each waits for a quarter of its time; those that share a server or a process, or look for
# what others leave in shared memory, are a group.
check "system tests" run_pytest system -m system -n 3 --dist loadgroup --reruns 1 "$@"

echo "== summary"
python - "$reports" <<'PY'
import sys
from pathlib import Path
from xml.etree import ElementTree

suites = [suite for report in Path(sys.argv[1]).glob("*.xml") for suite in ElementTree.parse(report).iter("testsuite")]
tests, skipped = (sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped"))
print(f"{tests} tests, {skipped} of them skipped")
wanting = sum("NO SGLANG HERE" in (skip.get("message") or "") for suite in suites for skip in suite.iter("skipped"))
if wanting:
    print(f"{wanting} TESTS SKIPPED FOR WANT OF SGLANG: tools/install_sglang_cpu.sh installs it")
PY
[ "$collected" -eq 1 ] || failed+=("no test was selected")
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all checks passed"

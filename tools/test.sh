#!/usr/bin/env bash
# Every check of the repository, in a virtual environment that it makes itself. Arguments go to pytest:
#   tools/test.sh                          everything
#   tools/test.sh -m "not system"          the linters, and of the tests those that need two minutes in all
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

check() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
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
# Three at a time, also on two cores, since those that start processes wait for a quarter of their time; what they share,
# such as a server, makes a group. pytest's own summary names each RERUN, see tests/conftest.py: one that comes again and
# again is a defect of the test or the product.
echo "== tests"
status=0
pytest -rsR --rerun-show-tracebacks --junitxml "$reports/tests.xml" -n 3 --dist loadgroup "$@" || status=$?
case $status in
  0) ;;
  5) failed+=("no test was selected") ;;
  *) failed+=("tests") ;;
esac

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
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all checks passed"

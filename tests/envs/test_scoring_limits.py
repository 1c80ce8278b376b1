"""Scoring processes of users who have limits of their own."""

import ctypes
import resource
import subprocess
import sys

import pytest

CODE = """
import asyncio
from impala_llm.envs.scoring_process import ScoringProcess

scoring = ScoringProcess("exact", timeout_s=60.0, memory_gib=8.0)
try:
    print("score", asyncio.run(scoring.score("b", {"answer": "b"})))
finally:
    scoring.close()
"""
PR_CAPBSET_DROP, CAP_SYS_RESOURCE = 24, 24


@pytest.mark.parametrize(("limit", "most"), [(resource.RLIMIT_CPU, 3600), (resource.RLIMIT_AS, 4 << 30)])
def test_answers_are_scored_under_a_hard_limit(limit: int, most: int) -> None:
    def limit_user() -> None:
        # Root may raise a hard limit, unless the right to do so is taken.
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0)
        resource.setrlimit(limit, (most, most))

    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, preexec_fn=limit_user, capture_output=True, text=True, timeout=300)
    assert "score 1.0" in done.stdout, done.stderr

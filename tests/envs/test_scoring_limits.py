"""Scoring processes of users who have limits of their own, and the limits of an answer."""

import asyncio
import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from impala_llm.envs.scoring_process import ScoringError, ScoringProcess

VERIFIER = """
import os

def verify(answer, task):
    if answer == "floods":  # as code of a policy may, which runs in this process
        for descriptor in range(3, 16):
            try:
                while True:
                    os.write(descriptor, b"." * 65536)
            except OSError:  # not that of the replies
                pass
    while answer == "waits" and not os.path.exists(task):
        pass
    return 0.5
"""

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


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "limits_verifier.py").write_text(VERIFIER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "limits_verifier:verify"


def test_a_reply_without_an_end_is_no_score_and_the_next_answer_has_one(verifier: str) -> None:
    scoring = ScoringProcess(verifier, timeout_s=60.0)

    async def main() -> float:
        with pytest.raises(ScoringError, match="it has no end"):
            await scoring.score("floods", "")
        return await scoring.score("fine", "")

    try:
        assert asyncio.run(main()) == 0.5
    finally:
        scoring.close()


def test_answers_that_wait_for_their_turn_leave_the_threads_of_the_loop_to_others(
    verifier: str, tmp_path: Path
) -> None:
    """The loop looks up names of hosts in them: a server would be lost meanwhile."""
    scoring = ScoringProcess(verifier, timeout_s=60.0)

    async def main() -> list[float]:
        file = tmp_path / "go on"
        answers = [asyncio.ensure_future(scoring.score("waits", str(file))) for _ in range(64)]  # more than threads
        await asyncio.sleep(0)
        await asyncio.to_thread(file.touch)
        return await asyncio.gather(*answers)

    try:
        assert asyncio.run(main()) == [0.5] * 64
    finally:
        scoring.close()

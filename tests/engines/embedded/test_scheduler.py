"""Tokens and episodes that one step of the scheduler computes."""

import pytest

from impala_llm.engines.embedded.scheduler import prompt_tokens_of_step


@pytest.mark.parametrize(
    ("num_parameters", "is_cpu", "tokens"),
    [
        (770_000, True, 2048),  # the policy of the quickstart
        (135_000_000, True, 370),  # 1e11 operations by two a parameter and token
        (8_000_000_000, True, 64),
        (8_000_000_000, False, 2048),
    ],
)
def test_a_step_on_a_cpu_computes_no_longer_than_an_actor_may_be_silent(
    num_parameters: int, is_cpu: bool, tokens: int
) -> None:
    assert prompt_tokens_of_step(2048, num_parameters, is_cpu) == tokens


def test_a_smaller_budget_stays() -> None:
    assert prompt_tokens_of_step(100, 135_000_000, is_cpu=True) == 100

"""The comparison that refuses models which would be computed wrongly."""

import math

import pytest
import torch

from impala_llm.engines.base import ModelRefused
from impala_llm.engines.embedded.model_check import check_agreement
from tests.families import build_family


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.01])
def test_one_wrong_row_is_enough_to_refuse_a_model(index: int, wrong: float) -> None:
    plain = [torch.full((5,), -2.0, dtype=torch.float64) for _ in range(2)]
    mine = [row.clone() for row in plain]
    mine[index] += wrong
    with pytest.raises(ModelRefused, match="on average"):
        check_agreement(build_family("Llama"), "packed rows", mine, plain, None)

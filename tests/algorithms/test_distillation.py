"""The distillation signal against divergences computed over a whole vocabulary, and contexts against Python lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impala_llm.algorithms.distillation import insert_context, reverse_kl_signal
from impala_llm.algorithms.losses import truncated_is


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signal(dtype: torch.dtype) -> None:
    teacher = torch.tensor([-1.0, -6.0, -0.5, -math.inf, 0.0], dtype=dtype)
    student = torch.tensor([-2.0, -1.0, -0.5, -1.0, -500.0], dtype=dtype, requires_grad=True)
    signal = reverse_kl_signal(teacher, student)
    assert signal.tolist() == [1.0, -5.0, 0.0, -20.0, 20.0]
    assert signal.dtype == dtype and not signal.requires_grad


def test_as_advantage_it_descends_the_divergence_whoever_sampled() -> None:
    # the expectation of the gradient of the loss over the vocabulary, under a behaviour policy
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    student, teacher, behaviour = logits.log_softmax(1)
    parameter = logits[0].clone().requires_grad_()
    log_probs = parameter.log_softmax(0)
    (log_probs.exp() * (log_probs - teacher)).sum().backward()
    expected, parameter.grad = parameter.grad, None
    loss = truncated_is(parameter.log_softmax(0), behaviour, reverse_kl_signal(teacher, student), cap=math.inf)
    (behaviour.exp() * loss.per_token).sum().backward()
    torch.testing.assert_close(parameter.grad, expected)


ROW = st.tuples(st.integers(0, 6), st.integers(0, 4), st.floats(0, 1))


@given(st.lists(ROW, max_size=5))
def test_contexts_stand_where_they_should(rows: list[tuple[int, int, float]]) -> None:
    tokens, contexts, expected, positions, offsets = [], [], [], [], []
    for number, (length, context_length, share) in enumerate(rows):
        row = [100 * number + i for i in range(length)]
        context = [-100 * number - i - 1 for i in range(context_length)]
        offset = round(share * length)
        laid = row[:offset] + context + row[offset:]
        positions += [len(expected) + laid.index(token) for token in row]
        expected += laid
        tokens += row
        contexts += context
        offsets.append(offset)
    out = insert_context(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor([length for length, _, _ in rows], dtype=torch.int64),
        torch.tensor(contexts, dtype=torch.int32),
        torch.tensor([length for _, length, _ in rows], dtype=torch.int64),
        torch.tensor(offsets, dtype=torch.int64),
    )
    assert out.tokens.tolist() == expected and out.tokens.dtype == torch.int32
    assert out.lengths.tolist() == [length + context_length for length, context_length, _ in rows]
    assert out.positions.tolist() == positions


GOOD = {
    "tokens": torch.arange(5), "lengths": torch.tensor([3, 2]), "context": torch.arange(4),
    "context_lengths": torch.tensor([0, 4]), "offsets": torch.tensor([3, 1]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"context": torch.arange(4, dtype=torch.int32)}, TypeError, "context has dtype"),
        ({"lengths": torch.tensor([3, 3])}, ValueError, "lengths add up to 6, but there are .5. tokens"),
        ({"lengths": torch.tensor([6, -1])}, ValueError, "lengths holds -1"),
        ({"context_lengths": torch.tensor([1, 4])}, ValueError, "context_lengths add up to 5"),
        ({"context_lengths": torch.tensor([4])}, ValueError, "context_lengths has shape"),
        ({"offsets": torch.tensor([4, 1])}, ValueError, "offsets holds 4 for row 0, which has 3"),
        ({"offsets": torch.tensor([1.0, 1.0])}, TypeError, "offsets has dtype"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], error: type[Exception], match: str) -> None:
    insert_context(**GOOD)
    with pytest.raises(error, match=match):
        insert_context(**{**GOOD, **change})


def test_signal_refuses_tensors_that_differ() -> None:
    with pytest.raises(ValueError, match="student_log_probs has shape"):
        reverse_kl_signal(torch.zeros(3), torch.zeros(2))

"""Attention on packed rows by what torch and transformers have for GPUs, as far as a CPU can run it.

Flex attention runs here uncompiled, and its gradient by torch's own mathematics of it. Flash attention is played by
functions with the interfaces of `flash_attn_varlen_func` and torch's `varlen_attn`, which attend row by row.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from impala_llm.config import load
from impala_llm.engines.base import ModelRefused
from impala_llm.learning.packing import OutOfMemory
from impala_llm.learning.policy import attention_choice
from impala_llm.learning.policy.attention import FLASH_2, FLEX, SEGMENTS
from impala_llm.learning.policy.attention_choice import FLASH_3, Options, choose_attention, compare, options
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from tests.families import VOCABULARY, build_family
from tests.learning.builders import save_lm

FLASH = "flash_attention_played"
LENGTHS = [5, 33, 1, 64, 17]
FAMILIES = (
    "Llama",
    "Qwen3",
    "Qwen3-MoE",
    "Mistral with a window",
    "Gemma 3 (text)",
    "Cohere 2",
    "Granite",
    "GPT-2",
)
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


class PlayedFlash:
    """Flash attention for rows of varying lengths, by plain products; `calls` are the arguments beside the tensors."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.forgets_rows = False
        self.backward: Callable[[Tensor], Tensor] | None = None
        """Maps the gradients of queries and keys to those that are passed on."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        assert causal and not dropout_p and not softcap
        assert q.dtype == k.dtype == v.dtype and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
        self.calls.append({"bounds": cu_seqlens_q.tolist(), "longest": max_seqlen_q, "window": window_size, "q": q})
        if self.backward is not None and q.requires_grad:
            q.register_hook(self.backward)
            k.register_hook(self.backward)
        bounds = [0, len(q)] if self.forgets_rows else cu_seqlens_q.tolist()
        rows = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            positions = torch.arange(end - begin)
            distance = positions[:, None] - positions
            seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
            heads = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
            row = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            rows.append(row.transpose(0, 1))
        return torch.cat(rows)

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *bounds: Any,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's way to it."""
        assert enable_gqa == (query.shape[1] != key.shape[1]) and window_size[1] == 0
        return self.attend(query, key, value, *bounds, softmax_scale=scale, causal=True, window_size=window_size)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> PlayedFlash:
    """transformers' own flash attention, over a played package, and torch's."""
    played = PlayedFlash()
    AttentionInterface.register(FLASH, flash_attention_forward)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    monkeypatch.setattr(
        "transformers.modeling_flash_attention_utils._lazy_imports",
        lambda *_arguments, **_options: (None, played.attend, None, None, None),
    )
    monkeypatch.setattr("transformers.modeling_flash_attention_utils._loaded_implementation", None)
    monkeypatch.setattr("impala_llm.learning.policy.attention.varlen_attn", played.varlen_attn)
    return played


@pytest.fixture
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention's backward pass on a CPU: torch has it, uncompiled, and refuses it all the same."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_tensors: None)


def packed_rows() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(n) for n in LENGTHS]), torch.tensor(LENGTHS)


def assert_same_as_plain_rows(lm: PreTrainedModel, plain: PreTrainedModel, implementation: str) -> None:
    """Log-probabilities and gradients of packed rows are those of transformers' eager attention on each row."""
    model = PolicyModel(lm)
    model.attend_by(implementation)
    plain.set_attn_implementation("eager")
    rows = packed_rows()
    weights = torch.randn(len(rows[0]), VOCABULARY, generator=torch.Generator().manual_seed(2)) / len(rows[0])
    found = model.logits(model.hidden(*rows)).log_softmax(-1)
    expected = torch.cat([plain(input_ids=row[None], use_cache=False).logits[0] for row in rows[0].split(LENGTHS)])
    expected = expected.log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, one), other in zip(lm.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.system
@pytest.mark.usefixtures("uncompiled", "on_gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_flex_attention_keeps_packed_rows_apart(family: str) -> None:
    assert_same_as_plain_rows(build_family(family), build_family(family), FLEX)


def test_torchs_flash_attention_needs_no_package(tmp_path: Path) -> None:
    """transformers looks for a package, or for a kernel to fetch, wherever an attention's name sounds like one."""
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    model.attend_by(FLASH_2)
    assert model.attention == FLASH_2
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        model.hidden(torch.tensor([1, 2, 3, 1]), torch.tensor([0, 1, 2, 0]), torch.tensor([3, 1]))


@pytest.mark.parametrize("implementation", [FLASH, FLASH_2])
@pytest.mark.parametrize("family", FAMILIES[:-1])  # of GPT-2 transformers wants it in 16 bits
def test_flash_attention_keeps_packed_rows_apart(family: str, implementation: str, flash: PlayedFlash) -> None:
    assert_same_as_plain_rows(build_family(family), build_family(family), implementation)


@pytest.mark.parametrize("implementation", [FLASH, FLASH_2])
def test_flash_attention_is_told_where_rows_begin_how_long_they_are_and_the_window(
    implementation: str, flash: PlayedFlash
) -> None:
    model = PolicyModel(build_family("Gemma 3 (text)"))  # a layer with a window of 24 tokens, and one without
    model.attend_by(implementation)
    model.compute_in("bfloat16")
    model.hidden(*packed_rows())
    # On a CPU a row of padding follows.
    assert [call["bounds"][:6] for call in flash.calls] == [[0, 5, 38, 39, 103, 120]] * 2
    assert [call["longest"] for call in flash.calls] == [64, 64]
    assert [call["window"][0] for call in flash.calls] == [23, -1]
    assert all(call["q"].dtype == torch.bfloat16 for call in flash.calls)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", ["Qwen3", "Gemma 3 (text)"])
def test_flex_attention_in_bfloat16_differs_from_segments_by_rounding(family: str) -> None:
    model = PolicyModel(build_family(family)).requires_grad_(False)
    model.compute_in("bfloat16")
    assert 0 < compare(model, FLEX, 200, CPU) < 0.1
    assert model.attention == SEGMENTS


@pytest.mark.usefixtures("uncompiled")
def test_a_kind_whose_masks_do_not_know_packed_rows_is_refused() -> None:
    """OPT does not tell transformers' masks which rows are packed: by segments it is computed right."""
    model = PolicyModel(build_family("OPT")).requires_grad_(False)
    with pytest.raises(ModelRefused, match=r"by flex attention differ by .* above 0\.001"):
        compare(model, FLEX, 200, CPU)


def test_an_attention_that_forgets_rows_is_refused_with_the_figure(tmp_path: Path, flash: PlayedFlash) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    assert compare(model, FLASH, 200, CPU) < 1e-5
    flash.forgets_rows = True
    with pytest.raises(ModelRefused, match=r"differ by .* nats on average from those by segments, above 0\.001"):
        compare(model, FLASH, 200, CPU)
    assert model.attention == SEGMENTS
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("backward", "reason"),
    [
        (
            torch.zeros_like,
            r"the gradient of .*self_attn\.[qk]_proj\.weight by .* differs from that by segments by 1 of",
        ),
        (lambda gradient: gradient * float("nan"), "gradients by .* are not finite"),
    ],
)
def test_an_attention_with_a_wrong_backward_pass_is_refused(
    tmp_path: Path, flash: PlayedFlash, backward: Callable[[Tensor], Tensor], reason: str, precision: str
) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    model.compute_in(precision)
    assert compare(model, FLASH, 200, CPU) < 0.1
    flash.backward = backward
    with pytest.raises(ModelRefused, match=reason):
        compare(model, FLASH, 200, CPU)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("wanted", "device", "precision", "has_flash_3", "expected"),
    [
        ("auto", "cpu", "bfloat16", True, [SEGMENTS]),
        ("segments", "cuda", "bfloat16", True, [SEGMENTS]),
        ("auto", "cuda", "bfloat16", True, [FLASH_3, FLASH_2, SEGMENTS]),
        ("auto", "cuda", "bfloat16", False, [FLASH_2, SEGMENTS]),
        ("auto", "cuda", "float32", True, [SEGMENTS]),
        ("flash", "cuda", "bfloat16", False, [FLASH_2]),
        ("flash", "cpu", "bfloat16", False, []),
        ("flex", "cuda", "bfloat16", True, [FLEX]),
        ("flex", "cpu", "float32", True, []),
    ],
)
def test_what_is_tried_follows_device_precision_and_what_is_installed(
    wanted: str, device: str, precision: str, has_flash_3: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "is_flash_attn_3_available", lambda: has_flash_3)
    found = options(wanted, device, precision)
    assert list(found.implementations) == expected
    can_be_faster = device == "cuda" and precision == "float32" and wanted == "auto"
    assert bool(found.against) == (can_be_faster or not expected)


@pytest.mark.usefixtures("uncompiled")
def test_what_fails_here_is_passed_over_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU that is too old: flash attention finds no GPU, flex attention has no backward pass."""
    monkeypatch.setattr(attention_choice, "options", lambda *_: Options([FLASH_2, FLEX, SEGMENTS], ["it is Sunday"]))
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    config = load(["learner.precision=bfloat16"])
    choose_attention(model, config.learner, 200, Ranks("cpu"))
    assert model.attention == SEGMENTS
    line = capsys.readouterr().out
    assert line.startswith("learner: packed rows are computed by segments: it is Sunday; ")
    assert "cannot be computed by flash attention 2 (" in line
    assert "cannot be computed by flex attention (NotImplementedError: FlexAttention does not support backward" in line


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")],
    ids=["torch", "cublas"],
)
def test_an_attention_for_which_memory_does_not_suffice_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setattr(attention_choice, "options", lambda *_: Options([FLASH_2, SEGMENTS], []))
    model = without_memory(tmp_path, error)
    choose_attention(model, load(["learner.precision=bfloat16"]).learner, 200, Ranks("cpu"))
    assert model.attention == SEGMENTS
    said = "memory does not suffice for its comparison with segments"
    assert capsys.readouterr().out == (
        f"learner: packed rows are computed by segments: flash attention 2 is left out, since {said}\n"
    )
    assert all(p.grad is None for p in model.parameters())


def test_ranks_that_share_the_policy_end_where_memory_does_not_suffice_for_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait amid the same pass: no rank can try the next attention alone."""
    monkeypatch.setattr(attention_choice, "options", lambda *_: Options([FLASH_2, SEGMENTS], []))
    model, ranks = without_memory(tmp_path, torch.OutOfMemoryError("CUDA out of memory.")), Ranks("cpu")
    ranks.is_sharded = True
    with pytest.raises(OutOfMemory, match=r"flash attention 2 .*set learner\.attention=segments"):
        choose_attention(model, load(["learner.precision=bfloat16"]).learner, 200, ranks)


def without_memory(directory: Path, error: Exception) -> PolicyModel:
    """A policy that has no memory for any attention but segments."""

    class Small(PolicyModel):
        def attend_by(self, implementation: str) -> None:
            if implementation != SEGMENTS:
                raise error
            super().attend_by(implementation)

    return Small.from_pretrained(save_lm(directory))


def test_the_first_that_agrees_with_segments_is_taken(
    tmp_path: Path, flash: PlayedFlash, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_choice, "options", lambda *_: Options([FLASH, SEGMENTS], []))
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    choose_attention(model, load(["learner.precision=bfloat16"]).learner, 200, Ranks("cpu"))
    assert model.attention == FLASH
    assert capsys.readouterr().out == f"learner: packed rows are computed by {FLASH}\n"


def test_a_named_attention_that_this_host_lacks_is_refused(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    learner = load(["learner.attention=flex"]).learner
    with pytest.raises(ModelRefused, match=r"learner\.attention=flex cannot be used on cpu: .*learner\.attention=auto"):
        choose_attention(model, learner, 200, Ranks("cpu"))

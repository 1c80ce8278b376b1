"""Log-probabilities of the sampled tokens under other models: a reference to stay near, a teacher to learn from.

Invariant: nothing here has a gradient, and a score belongs to the action token of the same index in the micro-batch.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from impala_llm.algorithms.distillation import insert_context
from impala_llm.algorithms.interface import PackedBatch
from impala_llm.checks.known_models import num_positions, other_vocabulary
from impala_llm.config import ConfigError
from impala_llm.learning.packing import memory_for, without_tensor_parallel
from impala_llm.learning.policy.attention import SEGMENTS
from impala_llm.learning.policy.attention_choice import reason_against
from impala_llm.learning.policy.lora import is_adapted, without_adapters
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.model_files import float32_bytes
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.policy.products import give_back_memory
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.processes.supervised import say
from impala_llm.settings import Config, model_directory, other_models


@dataclass(frozen=True)
class TokenScores:
    """float32[N] each, log-probabilities of the action tokens; None where nothing asks for them."""

    reference: Tensor | None = None
    teacher: Tensor | None = None


@torch.no_grad()
def action_log_probs(model: PolicyModel, batch: PackedBatch, temperature: float) -> Tensor:
    """float32[N]: log-probabilities of the micro-batch's action tokens at this temperature."""
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.context_lengths)
    actions = batch.action_positions
    return model.action_log_probs(hidden[actions - 1], batch.tokens[actions], temperature)[0]


class Scorers:
    """The other models of a run, as its settings name them.

    Args:
        policy: the learner's model, which is its own teacher in context distillation.
        ranks: all of them make their scorers together, and read the models in turns.

    Raises:
        ConfigError: another model has another vocabulary than the policy.
        ModelRefused: packed rows of another model would be computed wrongly, or its files lack weights.
        OutOfMemory: the device does not hold another model.
    """

    def __init__(self, config: Config, policy: PolicyModel, ranks: Ranks) -> None:
        algorithm = config.algorithm
        credit: Any = algorithm.credit
        self._temperature = config.engine.temperature
        self._is_near_reference = algorithm.kl_coef > 0
        self._context: Tensor | None = None
        self._reference = self._teacher = None
        if algorithm.uses_reference:
            # With LoRA the policy that training started from is the one without its adapters.
            is_own = algorithm.reference is None and is_adapted(policy.lm)
            self._reference = policy if is_own else _frozen(config, "algorithm.reference", policy, ranks)
        if credit.needs_teacher:
            self._teacher = policy
            if credit.teacher is not None:
                self._teacher = _frozen(config, "algorithm.credit.teacher", policy, ranks)
            if credit.teacher_context:
                tokenizer = AutoTokenizer.from_pretrained(resolve_policy(config))
                ids = tokenizer.encode(credit.teacher_context, add_special_tokens=False)
                self._context = torch.tensor(ids, dtype=torch.int64, device=ranks.device)
                _check_context(config, len(ids), self._teacher)

    def scores(self, batch: PackedBatch) -> TokenScores:
        """Return the log-probabilities that credit and loss ask for."""
        return TokenScores(self.reference(batch) if self._is_near_reference else None, self.teacher(batch))

    def reference(self, batch: PackedBatch) -> Tensor | None:
        if self._reference is None:
            return None
        with without_adapters(self._reference.lm):
            return action_log_probs(self._reference, batch, self._temperature)

    def teacher(self, batch: PackedBatch) -> Tensor | None:
        """Return the teacher's log-probabilities, with its context before each of the rows' where it has one."""
        if self._teacher is None:
            return None
        if self._context is None:
            return action_log_probs(self._teacher, batch, self._temperature)
        lengths, size = batch.context_lengths, len(self._context)
        rows = insert_context(
            batch.tokens,
            lengths,
            self._context.repeat(len(lengths)),
            torch.full_like(lengths, size),
            torch.zeros_like(lengths),
        )
        starts = rows.lengths.cumsum(0) - rows.lengths
        position_ids = torch.arange(len(rows.tokens), device=rows.tokens.device) - starts.repeat_interleave(
            rows.lengths
        )
        with torch.no_grad():
            hidden = self._teacher.hidden(rows.tokens, position_ids, rows.lengths)
            actions = rows.positions[batch.action_positions]
            return self._teacher.action_log_probs(hidden[actions - 1], rows.tokens[actions], self._temperature)[0]


def _check_context(config: Config, num_tokens: int, teacher: PolicyModel) -> None:
    """Raise ConfigError where a row of the longest episode has no room for the context before it."""
    longest, positions = config.engine.max_length, num_positions(teacher.lm.config.to_dict())
    if positions is not None and longest + num_tokens > positions:
        raise ConfigError(
            f"algorithm.credit.teacher_context has {num_tokens} tokens, which with engine.max_length={longest} are "
            f"more than the {positions} positions of the teacher: shorten it, or lower engine.max_length to at most "
            f"{positions - num_tokens}"
        )


def _frozen(config: Config, key: str, policy: PolicyModel, ranks: Ranks) -> PolicyModel:
    """The model that a setting names, or the one that training started from where it names none."""
    path = other_models(config).get(key)
    directory = resolve_policy(config) if path is None else model_directory(path)
    assert directory is not None  # checked by config.problems
    named_by, what, fix = key, f"{key}={path}", f"set {key} to a smaller model"
    if path is None:
        named_by, what = "model.path", f"{key}=null, the policy that training began with,"
        also = without_tensor_parallel(config.learner.tensor_parallel)
        fix = f"set model.lora.rank=16{also}, whose policy without adapters serves as it, or {key} to a smaller model"
    whole = f"{what} on {ranks.device}, whole in each process of the learner"
    on_device = partial(memory_for, whole, f"{fix}, or take a device with more free memory")
    with ranks.in_turns(float32_bytes(path or config.model.path)):
        model = PolicyModel.from_pretrained(directory, key=named_by).requires_grad_(False)
        with on_device():
            model.to(ranks.device)
        give_back_memory()
    with on_device():
        model.check(config.engine.max_length)
    model.compute_in(config.learner.precision)
    if policy.attention != SEGMENTS:
        if reason := reason_against(model, policy.attention, config.engine.max_length, ranks.device):
            say(f"learner: packed rows of {directory} are computed by segments: {reason}")
        else:
            model.attend_by(policy.attention)
    if model.vocab_size != policy.vocab_size:
        raise ConfigError(other_vocabulary(key, path or directory, model.vocab_size, policy.vocab_size))
    return model

"""The policy as the learner holds it: a Hugging Face causal LM on packed rows, and a value head on its hidden state.

Rows lie end to end in one flat sequence without padding; attention is causal inside each row and blind to the others.
Invariant: `hidden` of packed rows equals the plain forward of each row alone, so what the learner scores is what any
Hugging Face user would compute.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from impala_llm.engines.embedded.loading import load_whole
from impala_llm.engines.embedded.model_check import (
    check_agreement,
    describe,
    plain_log_probs,
    random_rows,
    refusing,
    row_pairs,
)
from impala_llm.engines.embedded.model_weights import checkpoint_tensors
from impala_llm.engines.embedded.scheduler import pad_rows
from impala_llm.learning.policy.attention import SEGMENTS, attention_arguments
from impala_llm.learning.policy.log_probs import token_log_probs
from impala_llm.learning.policy.lora import without_prefix
from impala_llm.learning.policy.model_files import VALUE_HEAD_FILE as VALUE_HEAD_FILE
from impala_llm.learning.policy.model_files import policy_files as policy_files
from impala_llm.learning.policy.model_files import stored_types
from impala_llm.learning.policy.products import give_back_memory, uses_onednn
from impala_llm.pipeline.weights.slots import WEIGHTS_FILE

_LAYERS_BETWEEN = 4
"""Checkpointed layers for which a CPU keeps what others have freed. With a 135 M model and 8,192 tokens, 2 to 5 differ
by 2 % in memory and time; before each layer the pages that are taken anew cost 10 % more of the time."""


class PolicyModel(nn.Module):
    """Causal LM and value head.

    Args:
        lm: a Hugging Face causal LM whose attention goes through the attention interface (Qwen2, Qwen3, Llama, ...).
        value_hidden_size: width of a hidden layer of the value head; None: that of the LM; 0: linear.
        value_trunk_gradient: whether the value loss reaches the LM.
    """

    bases: Mapping[str, int] = {}
    """Checksums of other weights that its training rests on, see `base_checksums`."""
    start: int | None = None
    """Checksum of the model that training began with, see `model_checksum`; None: a random one, or not known."""
    other_hidden_size: int | None = None
    """`value_hidden_size` of a value head beside the weights that is not taken over, since this one has another."""

    def __init__(
        self, lm: PreTrainedModel, value_hidden_size: int | None = 0, value_trunk_gradient: bool = False
    ) -> None:
        super().__init__()
        self.lm = lm
        self._config = config = lm.config.get_text_config()
        # Granite divides its logits, Cohere multiplies them.
        self._logit_scale = getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1)
        self.value_trunk_gradient = value_trunk_gradient
        self._dtype: torch.dtype | None = None
        width = config.hidden_size
        value_hidden_size = width if value_hidden_size is None else value_hidden_size
        last = nn.Linear(value_hidden_size or width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.value_head = (
            nn.Sequential(nn.Linear(width, value_hidden_size), nn.GELU(), last)
            if value_hidden_size
            else nn.Sequential(last)
        )

    @classmethod
    def from_pretrained(
        cls,
        directory: Path,
        value_hidden_size: int | None = 0,
        value_trunk_gradient: bool = False,
        key: str = "model.path",
    ) -> "PolicyModel":
        """Load from a Hugging Face directory, weights in float32; its value head too, if it has one of the same shape.

        Args:
            value_hidden_size, value_trunk_gradient: see the class.
            key: the setting that names the directory, for messages.

        Raises:
            ModelRefused: files are damaged or lack weights, or the model is not written for packed rows.
        """
        lm = load_whole(directory, key, dtype=torch.float32, attn_implementation=SEGMENTS)
        # What is float32 in the files is mapped from them, and would change with them, trained weights too.
        for tensor in [*lm.parameters(), *lm.buffers()] if "F32" in stored_types(directory) else ():
            tensor.data = tensor.data.clone()
        model = cls(lm, value_hidden_size, value_trunk_gradient)
        saved = directory / VALUE_HEAD_FILE
        if saved.is_file() and not model.load_value_head(content := saved.read_bytes()):
            state, _ = without_prefix(content)
            model.other_hidden_size = len(state["0.weight"]) if {"0.weight", "2.weight"} <= set(state) else 0
        return model

    def compute_in(self, precision: str, checkpoint_every: int = 0, compiled: bool = False) -> None:
        """Set how products and attention are computed. Weights and gradients, the log-probabilities, and all that
        follows from them stay float32.

        Args:
            precision: float32 | bfloat16.
            checkpoint_every: every so many layers one keeps only its input for the backward pass, which computes the
                layer again; 0: none. Called once with more.
            compiled: layers are compiled by torch.compile, for any number of tokens. Called once with it.
        """
        self._dtype = torch.bfloat16 if precision == "bfloat16" else None
        layers = [module for module in self._trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
        # Each by itself, and inside of its checkpoint: all layers then share what is compiled for the first.
        if compiled:  # with LoRA, and where gradients are off, a layer has other kinds of input
            torch._dynamo.config.recompile_limit = 32
        for layer in layers if compiled else ():
            layer.forward = torch.compile(layer.forward, dynamic=True)
        for number, layer in enumerate(layers[::checkpoint_every] if checkpoint_every else ()):
            layer.forward = partial(_checkpointed, layer.forward, number % _LAYERS_BETWEEN == 0)

    @property
    def is_exact(self) -> bool:
        """Whether products of matrices are computed in float32."""
        return self._dtype is None and torch.backends.cuda.matmul.fp32_precision != "tf32"

    @property
    def attention(self) -> str:
        """Name that transformers has for the attention in use: see `learning.attention`."""
        return str(self.lm.config._attn_implementation)

    def attend_by(self, implementation: str) -> None:
        """Set the attention; what this kind of model or this host does not have raises transformers' errors."""
        self.lm.set_attn_implementation(implementation)

    def value_head_bytes(self) -> bytes:
        """The value head as a safetensors file."""
        return save(self.value_head.state_dict())

    def load_value_head(self, content: bytes) -> bool:
        """Take over what `value_head_bytes` gave. False, and nothing is taken, where its shape is another."""
        state, _ = without_prefix(content)
        shapes = {name: tensor.shape for name, tensor in self.value_head.state_dict().items()}
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            return False
        self.value_head.load_state_dict(state)
        return True

    @property
    def _trunk(self) -> nn.Module:
        """The LM without its head, by the name that its kind has for it."""
        return self.lm.model if self.lm.base_model is self.lm else self.lm.base_model

    @property
    def vocab_size(self) -> int:
        return int(self._config.vocab_size)

    def hidden(self, tokens: Tensor, position_ids: Tensor, lengths: Tensor) -> Tensor:
        """Last hidden states [M, H] of packed rows.

        Args:
            tokens: int64[M]. position_ids: int64[M], from 0 in each context. lengths: int64[C] of these, sum M.
        """
        num_tokens = len(tokens)
        if tokens.device.type == "cpu" and uses_onednn(self._dtype):
            num_more = pad_rows(max(2, num_tokens)) - num_tokens  # compiled layers of one token are others
            if num_more:  # as a row of its own, at the end
                more = torch.arange(num_more)
                tokens, position_ids = torch.cat([tokens, torch.zeros_like(more)]), torch.cat([position_ids, more])
                lengths = torch.cat([lengths, lengths.new_tensor([num_more])])
        hidden: Tensor = self(tokens, position_ids, lengths)[0, :num_tokens]
        return hidden

    def forward(self, tokens: Tensor, position_ids: Tensor, lengths: Tensor) -> Tensor:
        """`hidden` as [1, M, H], and not as a view: the hooks that gather a sharded policy are on it."""
        packed = attention_arguments(self.attention, lengths, tokens.device)
        # Without a cache: each weight is converted once in a forward, and would be kept until its end.
        with torch.autocast(tokens.device.type, self._dtype, enabled=self._dtype is not None, cache_enabled=False):
            output = self._trunk(input_ids=tokens[None], position_ids=position_ids[None], use_cache=False, **packed)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, vocabulary]."""
        logits: Tensor = self.lm.get_output_embeddings()(hidden) * self._logit_scale
        return logits

    def action_log_probs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See `log_probs.token_log_probs`."""
        head = self.lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return token_log_probs(hidden, head.weight, bias, targets, temperature / self._logit_scale, self._dtype)

    def values(self, hidden: Tensor) -> Tensor:
        """[N, H] → float32[N]. The LM gets a gradient through it only with `value_trunk_gradient`."""
        if not self.value_trunk_gradient:
            hidden = hidden.detach()
        values: Tensor = self.value_head(hidden.float()).squeeze(-1)
        return values

    @torch.no_grad()
    def check(self, max_length: int) -> float:
        """Compare two packed rows of uneven length with a plain forward of each: see `engines.model_check`.

        Args:
            max_length: tokens of a row at most.

        Returns:
            The largest mean difference of a row's log-probabilities, in nats.

        Raises:
            ModelRefused: packed rows of this model would be computed wrongly.
        """
        path, worst = "packed rows", 0.0
        device = self.lm.device
        for long, short, point in row_pairs(self._config, max_length):
            lengths = [long, short]
            rows = random_rows(self.vocab_size, lengths, device)
            with refusing(f"{describe(self.lm)} cannot be computed by {path}"):
                # First of all, and the short row first: dynamic frequencies keep what a longer row made of them.
                plain = plain_log_probs(self.lm, rows[::-1])[::-1]
                tokens = torch.cat(rows)
                positions = torch.cat([torch.arange(n, device=device) for n in lengths])
                hidden = self.hidden(tokens, positions, torch.tensor(lengths)).split(lengths)
                mine = [self.action_log_probs(h[:-1], r[1:], 1.0)[0] for h, r in zip(hidden, rows, strict=True)]
            worst = max(worst, check_agreement(self.lm, path, mine, plain, point))
        return worst

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy as (name, tensor), not copied, without the value head.

        Names and pieces are those that save_pretrained writes; tied weights come once.
        """
        state: dict[str, Tensor] = {}
        seen = set()
        for name, tensor in self.lm.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                state[name] = tensor.detach()
        yield from checkpoint_tensors(self.lm, state).items()

    def config_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Files of a Hugging Face directory beside the weights, by name.

        Settings of sampling stay as they were loaded: `save_pretrained` refuses some that `from_pretrained` takes.

        Args:
            files: those of the directory that the policy comes from, such as the tokenizer's.
        """
        config, generation = self.lm.config, self.lm.generation_config
        config.architectures = [type(self.lm).__name__.removeprefix("FSDP")]
        vars(config).pop("transformers_weights", None)  # the name of the file that it was loaded from
        own = {"config.json": config.to_json_string(use_diff=True).encode()}
        if generation is not None:
            text = generation.to_json_string(use_diff=True, keys_to_pop=["compile_config"])
            own["generation_config.json"] = text.encode()
        return {**files, **own, VALUE_HEAD_FILE: self.value_head_bytes()}

    def save(self, directory: Path, files: Mapping[str, bytes] | None = None) -> None:
        """Write a Hugging Face directory with the value head beside it.

        Args:
            files: further files by name, such as those of the tokenizer.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.config_files(files or {}).items():
            (directory / name).write_bytes(content)
        tensors = {name: tensor.contiguous() for name, tensor in self.policy_weights()}
        save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})


def _checkpointed(forward: Callable[..., Any], gives_back: bool, *arguments: Any, **options: Any) -> Any:
    """The forward of a layer, computed again in the backward pass.

    Args:
        gives_back: whether a CPU's free memory goes back to the system before the layer is computed.
    """
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(_computed, forward, gives_back, *arguments, use_reentrant=False, **options)


def _computed(forward: Callable[..., Any], gives_back: bool, hidden: Tensor, *arguments: Any, **options: Any) -> Any:
    # Before the layer, not after it: the backward pass leaves a layer as soon as it has what it needs.
    if gives_back and hidden.device.type == "cpu":
        give_back_memory()
    return forward(hidden, *arguments, **options)

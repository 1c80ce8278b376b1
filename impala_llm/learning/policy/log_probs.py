"""Log-probabilities of the taken tokens and the entropy, from hidden states, without ever holding the full logits.

Only positions that predict an action token enter, in chunks; the backward pass computes each chunk's logits again, so
memory is one chunk of logits whatever the batch.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 23
"""Logits held at once on a CPU, 32 MB in float32 with any vocabulary: they stay in its caches."""
GPU_CHUNK = 1024
"""Least number of tokens in a chunk on a GPU: fewer do not keep it busy. At a vocabulary of 150,000: 0.6 GB."""


def token_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) of the targets, and the entropy of that distribution.

    Args:
        hidden: float[N, H], at the positions before the targets.
        head_weight: float[V, H]. head_bias: float[V].
        targets: int64[N].
        temperature: the one that the engine sampled with, > 0.
        dtype: of the product of `hidden` and `head_weight` on a GPU; None, and on a CPU: theirs. Half-precision logits
            have an error of their own, see `Float32Head` of the embedded engine, which computes them likewise.

    Returns:
        float32[N] log-probabilities and float32[N] entropies, both in nats and differentiable.
    """
    log_probs, entropies = [], []
    chunk = chunk_tokens(len(head_weight), hidden.device.type)
    for start in range(0, max(1, len(targets)), chunk):
        part = slice(start, start + chunk)
        arguments = (hidden[part], head_weight, head_bias, targets[part], temperature, dtype)
        # a single chunk is held anyway: computing it again would only cost time
        if torch.is_grad_enabled() and len(targets) > chunk:
            log_prob, entropy = checkpoint(_chunk, *arguments, use_reentrant=False)
        else:
            log_prob, entropy = _chunk(*arguments)
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.cat(log_probs), torch.cat(entropies)


def chunk_tokens(vocabulary: int, device_type: str) -> int:
    """Tokens whose logits exist at once."""
    return max(1 if device_type == "cpu" else GPU_CHUNK, CHUNK_LOGITS // vocabulary)


def _chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    # Converted chunk by chunk, so that the chunks' gradients of the weight are added up in the weight's own type.
    if dtype is not None and hidden.device.type != "cpu":
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)
    # float32 whatever the compute type: bfloat16 would leave two digits of a log-probability. float64 stays.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy

"""A completion under way: the pieces that its server has streamed so far, each checked.

Invariant: tokens, log-probabilities and versions always have one length and only grow, so that a completion whose
server dies is continued from its tokens, on any server.

Versions: a server tells the version of each token (spans) when a request ends. Until then its pieces carry one label
each, that of the weights in use when the piece left the server. A piece that left after a change of weights may hold
tokens from before it; its tokens get the label of the piece before. So only where a server dies after a change of
weights in the middle of a completion, up to one piece of tokens counts as one version older than it is.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from impala_llm.engines.base import EngineError, FinishReason, Generation, SamplingParams
from impala_llm.engines.sglang.client import ServerLost

_ROUNDING = 1e-4
"""Largest value above zero to which a server's float32 log-softmax may round."""
_LOWEST = float(np.finfo(np.float32).min)


class BrokenAnswer(EngineError):
    """Answer of a server that contradicts itself or the request."""


class Continuation:
    """Tokens that continue a prompt. One request at a time is under way for it."""

    def __init__(
        self, session_id: str, prompt: np.ndarray, params: SamplingParams, limit: int, vocab_size: int
    ) -> None:
        """
        Args:
            prompt: int32[T], checked.
            limit: tokens of the completion at most.
        """
        self.session_id = session_id
        self.params = params
        self.limit = limit
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.aborted = False
        self.timer: asyncio.Timeout | None = None
        self.rid = ""
        self.prompt_tokens = self.cached_tokens = 0
        """Counts of the request under way, as far as its server has sent them."""
        self.prompt: list[int] = prompt.tolist()
        self._stops = frozenset(params.stop_token_ids)
        self._vocab_size = vocab_size
        self._base = 0
        self._lowest_version = 0
        self._label: int | None = None
        self._ended = False

    @property
    def request_ended(self) -> bool:
        """Whether the last piece of the request under way has arrived."""
        return self._ended

    def request(self, rid: str, version: int, stream_interval: int) -> dict[str, Any]:
        """Begin a request for the missing tokens. Returns its body.

        Args:
            version: of the server's weights.
            stream_interval: tokens in a piece.
        """
        self.rid = rid
        self._base = len(self.tokens)
        self._lowest_version = version
        self._label = None
        self._ended = False
        self.prompt_tokens = self.cached_tokens = 0
        params = self.params
        return {
            "rid": rid,
            "input_ids": self.prompt + self.tokens,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            # Every setting that a server's own defaults could change is explicit: see SamplingParams.
            "sampling_params": {
                "temperature": 0.0 if params.greedy else params.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "max_new_tokens": self.limit - len(self.tokens),
                "min_new_tokens": 0,
                "stop_token_ids": list(params.stop_token_ids),
                # Only without stop tokens of ours: it disables them, too.
                "ignore_eos": not params.stop_token_ids,
                "skip_special_tokens": False,
                "stream_interval": stream_interval,
            },
        }

    def receive(self, piece: Mapping[str, Any]) -> None:
        """Add a piece of the stream.

        Raises:
            BrokenAnswer: it is malformed, or contradicts itself or earlier pieces; nothing of it is kept.
            ServerLost: the server ended the request by itself, or has lost the weights it was given.
        """
        try:
            meta = piece["meta_info"]
            ids, pairs, total = piece["output_ids"], meta["output_token_logprobs"], meta["completion_tokens"]
            reason, version = meta["finish_reason"], meta["weight_version"]
            spans = meta.get("weight_versions")
            counts = meta.get("prompt_tokens", 0), meta.get("cached_tokens", 0)
        except (AttributeError, KeyError, TypeError) as error:
            raise self._broken(f"it lacks {error}") from error
        for name, value in (("output_ids", ids), ("output_token_logprobs", pairs)):
            if not isinstance(value, list):
                raise self._broken(f"{name} is {value!r:.80}: a list is expected")
        for name, value in zip(("completion_tokens", "prompt_tokens", "cached_tokens"), (total, *counts), strict=True):
            if type(value) is not int:
                raise self._broken(f"{name} is {value!r:.80}: an integer is expected")
        if reason is not None and not isinstance(reason, dict):
            raise self._broken(f"finish_reason is {reason!r:.80}: an object is expected")
        had = len(self.tokens) - self._base
        kind = None if reason is None else reason.get("type")
        if kind == "abort":
            # A request that waits when it is aborted repeats its last tokens.
            ids, pairs = ids[: max(total - had, 0)], pairs[: max(total - had, 0)]
        if len(ids) != len(pairs):
            raise self._broken(f"{len(ids)} tokens have {len(pairs)} log-probabilities")
        if had + len(ids) != total:
            raise self._broken(f"{had} + {len(ids)} tokens have arrived, but it counts {total}")
        log_probs = [self._check_pair(token, pair) for token, pair in zip(ids, pairs, strict=True)]
        if len(self.tokens) + len(ids) > self.limit:
            raise self._broken(f"it has {len(self.tokens) + len(ids)} tokens, at most {self.limit} were asked for")
        label = self._check_label(version)
        # Only the last piece has them, and none where a request was aborted before it was begun.
        versions = None if reason is None or (kind == "abort" and spans is None) else self._spans(spans, total)
        if versions:
            self._check_label(str(min(versions)))
        self.tokens += ids
        self.log_probs += log_probs
        if versions is None:
            self.versions += [label if self._label is None else self._label] * len(ids)
            self._label = label
        else:
            self.versions[self._base :] = versions
        self.prompt_tokens, self.cached_tokens = counts
        if reason is not None:
            self._end(kind, reason)

    def settle(self) -> bool:
        """Return whether it is complete, however its requests ended."""
        if self.finish_reason is None:
            if self.tokens and self.tokens[-1] in self._stops:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.finish_reason = "length"
            elif self.aborted:
                self.finish_reason = "abort"
        return self.finish_reason is not None

    def result(self) -> Generation:
        """The completion as arrays."""
        assert self.finish_reason is not None
        return Generation(
            tokens=np.array(self.tokens, np.int32),
            log_probs=np.array(self.log_probs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish_reason=self.finish_reason,
        )

    def _end(self, kind: str | None, reason: Mapping[str, Any]) -> None:
        self._ended = True
        if self.settle():
            return
        if kind == "abort":
            message = str(reason.get("message", ""))
            if reason.get("status_code") == 400:
                raise BrokenAnswer(f"session {self.session_id!r}: the server refused the request: {message}")
            raise ServerLost(f"it aborted a request on its own: {message}")
        if len(self.tokens) == self._base:
            raise self._broken(f"it ended with {kind!r} before any token")
        # Otherwise a stop token of the model that is not one of the request, or a limit of the server: continue.

    def _check_pair(self, token: object, pair: object) -> float:
        if type(token) is not int or not 0 <= token < self._vocab_size:
            raise self._broken(f"token {token!r:.80} is not in 0 .. {self._vocab_size - 1}")
        if not isinstance(pair, list) or len(pair) < 2 or pair[1] != token:
            raise self._broken(f"token {token} comes with the log-probability of another: {pair!r:.80}")
        logprob = pair[0]
        if type(logprob) not in (int, float) or not _LOWEST <= logprob <= _ROUNDING:
            raise self._broken(f"token {token} has log-probability {logprob!r:.80}: a finite number <= 0 is expected")
        return min(float(logprob), 0.0)

    def _check_label(self, label: object) -> int:
        version = _version(label)
        if version is None or version < self._lowest_version:
            raise ServerLost(
                f"it serves weights of version {label!r:.80} after it was given {self._lowest_version}:"
                " it was restarted, or another client changes its weights"
            )
        return version

    def _spans(self, spans: object, total: int) -> list[int]:
        if not isinstance(spans, list):
            raise self._broken("it does not tell the versions of its tokens: SGLang >= 0.5.19 is needed")
        versions: list[int] = []
        for span in spans:
            fields, had = span if isinstance(span, dict) else {}, len(versions)
            version, end = _version(fields.get("version")), fields.get("end")
            if version is None or fields.get("start") != had or type(end) is not int or not had <= end <= total:
                raise self._uncovered(spans, total)
            versions += [version] * (end - had)
        if len(versions) != total:
            raise self._uncovered(spans, total)
        return versions

    def _uncovered(self, spans: list[Any], total: int) -> BrokenAnswer:
        return self._broken(f"its weight_versions {spans!r:.200} do not cover {total} tokens")

    def _broken(self, what: str) -> BrokenAnswer:
        return BrokenAnswer(f"session {self.session_id!r}: the server's answer is broken: {what}")


def _version(label: object) -> int | None:
    """Parse a server's label as a version; None for a label that no engine gave."""
    return int(label) if isinstance(label, str) and re.fullmatch("-?[0-9]{1,9}", label) else None

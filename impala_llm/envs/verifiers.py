"""Environment modules of the library verifiers (extra `verifiers`) as they are, those with `load_environment`, played
as text.

The module's own rollout runs as a task of the event loop. Where it asks its client for an answer, the new messages are
the observation, and the next action is the answer. Environments with tools, or that rewrite their conversation, are for
an agent behind the gateway and are refused here.
"""

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from impala_llm.envs.base import SPLITS, Split
from impala_llm.envs.extras import needed
from impala_llm.envs.shared_options import ScoreRange
from impala_llm.envs.single_turn import Result
from impala_llm.settings import bounded

_HELD_OUT = 0.05


class VerifiersSuite:
    """The examples of one environment module.

    Its evaluation examples are validation and test, every other one each; where it has none, the last tenth of its
    training examples.
    """

    @dataclass
    class Options(ScoreRange):
        """Settings env.args.*"""

        id: str
        """Name of the environment module, as for verifiers.load_environment."""
        args: dict[str, Any] = field(default_factory=dict)
        """Arguments of its load_environment."""
        max_examples: int | None = bounded(None, least=3)
        """Use only so many examples of each of its data sets; null: all."""

    def __init__(self, options: Options) -> None:
        """Raises ValueError for a module that cannot be loaded, or that has tools."""
        options.check_range()
        needed("verifiers", "verifiers")
        library = needed("verifiers.legacy", "verifiers")
        self.env: Any = library.load_environment(options.id, **options.args)
        if self.env.tool_defs:
            raise ValueError(f"env.args.id={options.id} has tools: let an agent play it")
        self.name, self.options = f"verifiers-{options.id}", options
        self.system_prompt = self.env.system_prompt or ""
        limit = -1 if options.max_examples is None else options.max_examples
        examples = self.env.get_dataset(n=limit).to_list()
        self.env.build_eval_dataset()
        held_out = [] if self.env.eval_dataset is None else self.env.get_eval_dataset(n=limit).to_list()
        self._examples = [*examples, *held_out]
        self._splits = _splits(len(examples), len(held_out))

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> "VerifiersSession":
        return VerifiersSession(self)

    def signature(self, task_id: int) -> str:
        """The example's own `task`."""
        return str(self.example(task_id).get("task") or self.options.id)

    def example(self, task_id: int) -> dict[str, Any]:
        """The row of an example."""
        if not 0 <= task_id < len(self._examples):
            raise ValueError(f"task_id is {task_id}: {self.options.id} has the tasks 0 to {len(self._examples) - 1}")
        row: dict[str, Any] = self._examples[task_id]
        return row


class VerifiersSession:
    """An episode of `VerifiersSuite`. `info["stats"]` holds the module's metrics."""

    def __init__(self, suite: VerifiersSuite) -> None:
        self._suite = suite
        self._rollout: asyncio.Task[Any] | None = None
        self._asked: asyncio.Queue[Sequence[Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._num_seen = 0

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        self.close()
        self._asked, self._answers, self._num_seen = asyncio.Queue(), asyncio.Queue(), 0
        client = _client_class()(self._ask)
        play = self._suite.env.run_rollout(self._suite.example(task_id), client, "policy", {})
        self._rollout = asyncio.create_task(play)
        observation = await self._next()
        if observation is None:
            raise RuntimeError(f"the rollout ends before it asks for an answer: {self._result().get('error')}")
        return observation, {}

    async def step(self, action: str) -> Result:
        self._answers.put_nowait(action)
        observation = await self._next()
        if observation is not None:
            return observation, 0.0, False, False, {}
        result = self._result()
        if result.get("error"):
            raise RuntimeError(f"the rollout has failed: {result['error']}")
        reward = float(result.get("reward") or 0.0)
        metrics = {name: float(value) for name, value in (result.get("metrics") or {}).items()}
        info = {**self._suite.options.scored(reward), "stats": metrics}
        return "", reward, True, False, info

    def close(self) -> None:
        """End the rollout."""
        if self._rollout is not None:
            self._rollout.cancel()
            self._rollout = None

    async def _ask(self, messages: Sequence[Any]) -> str:
        """Called by the rollout: the answer to a conversation."""
        self._asked.put_nowait(messages)
        return await self._answers.get()

    async def _next(self) -> str | None:
        """The observation before the next answer; None where the rollout is over."""
        assert self._rollout is not None
        asked = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait([asked, self._rollout], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return None
            messages = asked.result()
        finally:
            asked.cancel()
        if self._num_seen and [each.role for each in messages[self._num_seen : self._num_seen + 1]] != ["assistant"]:
            raise ValueError(f"{self._suite.options.id} rewrites its conversation: let an agent play it")
        new = messages[self._num_seen + 1 :] if self._num_seen else [m for m in messages if not self._is_known(m)]
        self._num_seen = len(messages)
        return "\n\n".join(_text(message) for message in new)

    def _is_known(self, message: Any) -> bool:
        """Whether it is the system prompt, which every episode of the suite begins with."""
        return message.role == "system" and _text(message) == self._suite.system_prompt

    def _result(self) -> dict[str, Any]:
        assert self._rollout is not None
        found: dict[str, Any] = self._rollout.result()
        return found


def _splits(num_examples: int, num_held_out: int) -> dict[Split, range]:
    total = num_examples + num_held_out
    if num_held_out >= 2:
        return dict(
            zip(
                SPLITS,
                (range(num_examples), range(num_examples, total, 2), range(num_examples + 1, total, 2)),
                strict=True,
            )
        )
    if num_examples < 3:
        raise ValueError(f"the environment has {num_examples} examples: at least 3 are needed, one for each split")
    share = max(1, int(num_examples * _HELD_OUT))
    first, second = num_examples - 2 * share, num_examples - share
    return {"train": range(first), "validation": range(first, second), "test": range(second, num_examples)}


def _text(message: Any) -> str:
    """The text of a message."""
    content = message.content
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or () if getattr(part, "type", "") == "text")


@functools.cache
def _client_class() -> Any:
    """A client of the library whose answers come from a coroutine function of the conversation."""
    base: Any = needed("verifiers.legacy.clients", "verifiers").Client
    types = needed("verifiers.legacy.types", "verifiers")

    class SteppedClient(base):  # type: ignore[misc]  # of a library without types
        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("it is made with a function, and not with the settings of a server")

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def get_native_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Any:
            text = await self.client(prompt)
            said = types.ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
            return types.Response(id="", created=int(time.time()), model=model, message=said)

        async def raise_from_native_response(self, response: Any) -> None:
            pass

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            pass

    return SteppedClient

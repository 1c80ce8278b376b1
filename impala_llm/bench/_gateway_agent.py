"""The agent of the gateway benchmark: the toy corridor, played by a loop around the `openai` client."""

from typing import Any

from impala_llm.envs.toy import CorridorSuite

TURNS = 3
_SUITE = CorridorSuite(CorridorSuite.Options(num_turns=TURNS))


async def agent(task: Any, client: Any) -> dict[str, Any]:
    """Play the episode that `play_episode` plays of the same task."""
    session = _SUITE.session(task.training)
    observation, _ = session.reset(task.id)
    messages: list[Any] = []
    while True:
        messages.append({"role": "user", "content": observation})
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(reply.choices[0].message)
        observation, reward, ended, _, info = session.step(messages[-1].content)
        if ended:
            return {"reward": reward, **info}

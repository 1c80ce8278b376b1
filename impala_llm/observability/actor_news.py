"""Messages about the actors of a run, for its terminal and log: actors that have joined, left, or were refused."""

from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.processes.supervised import say


class ActorNews:
    """Reports the actors that have joined or left since the last call.

    Args:
        receiver: that they are connected to.
        bind: `pipeline.bind`, where connections may be refused.
    """

    def __init__(self, receiver: Receiver, bind: str | None) -> None:
        self._receiver, self._bind = receiver, bind
        self._connected: set[str] = set()
        self._is_refusal_said = False

    def tell(self) -> None:
        """Report the actors that have joined or left, and the first connection that was refused."""
        now = set(self._receiver.actor_stats())
        for what, names in (("joined", now - self._connected), ("left", self._connected - now)):
            if names:
                who = ", ".join(sorted(names)) if len(names) <= 4 else f"{len(names)} actors"
                say(f"learner: {who} {what}, {len(now)} connected")
        self._connected = now
        if self._bind is not None and not self._is_refusal_said and self._receiver.counters()["peers_refused"]:
            self._is_refusal_said = True
            say(
                f"learner: a connection to pipeline.bind={self._bind} was refused, the log says why: the key of an "
                "actor must be authorised in pipeline.keys here"
            )

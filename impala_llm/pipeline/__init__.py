"""Communication between processes: the only package with ZeroMQ and shared memory. numpy only, no torch.

Processes that communicate make a `LearnerEndpoint` or an `ActorEndpoint`. Of the modules behind these, other packages
import the types of what they give and take, such as `Receiver`, `Ticket` and `RunDirectory`; what a run needs before
and after its processes: its folder, keys and addresses; and how bytes of weights are written. From the top down:

- transport: messages, sessions and acknowledgements between actors and a learner rank
- tickets: permits to play an episode, and the bound on staleness
- weights: versions of the policy in shared memory, and the relay to other hosts
- network: sockets, keys, authentication
- shared_settings: what an actor and its learner must have in common
- shm: shared memory of one host: rings of records, the trajectory store, the journal, the folder of a run
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from impala_llm.pipeline.actor_endpoint import ActorEndpoint
    from impala_llm.pipeline.learner_endpoint import LearnerEndpoint

__all__ = ["ActorEndpoint", "LearnerEndpoint"]


def __getattr__(name: str) -> Any:
    # On first use: the command line needs a few small modules of this package, and should not wait for all of them.
    if name == "ActorEndpoint":
        from impala_llm.pipeline.actor_endpoint import ActorEndpoint

        return ActorEndpoint
    if name == "LearnerEndpoint":
        from impala_llm.pipeline.learner_endpoint import LearnerEndpoint

        return LearnerEndpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

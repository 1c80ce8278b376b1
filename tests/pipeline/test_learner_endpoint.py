"""The life of a learner's end of the pipeline: how it starts, and what is left when it does not."""

import socket
import uuid

import pytest
import zmq

from impala_llm.config import load
from impala_llm.pipeline import LearnerEndpoint
from impala_llm.pipeline.learner_endpoint import PastTickets, ticket_timeout_s
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.settings import Config
from tests.pipeline.support import VOCAB_SIZE, make_trajectory


def test_a_port_that_was_taken_meanwhile_is_the_error_that_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = Config()
        config.run.name = f"t-{uuid.uuid4().hex[:8]}"
        config.pipeline.bind = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(zmq.ZMQError), LearnerEndpoint(config, 0, 1, lambda: None, {}) as endpoint:
            endpoint.listen(0, range(4), vocab_size=10, batch_size=config.learner.batch_size)


def test_a_checkpoint_is_put_back_twice_where_the_first_learner_died_before_it_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = Config()
    config.run.name = f"t-{uuid.uuid4().hex[:8]}"
    size = config.algorithm.group_size
    order = TaskOrder(range(4), size, config.run.seed)
    ledger = TicketLedger(order, config.learner.batch_size, config.algorithm.max_staleness)
    ledger.request("actor-0", size)
    arrived = [make_trajectory(ticket) for _, tickets in ledger.grantable() for ticket in tickets]
    past = PastTickets(ledger.rows(0), arrived)
    with LearnerEndpoint(config, 0, 1, lambda: None, {}) as endpoint:
        endpoint.restore(past)
        endpoint.restore(past)
        endpoint.listen(0, range(4), VOCAB_SIZE, config.learner.batch_size)
        received = endpoint.receiver.drain(0.0)
    assert sorted(t.episode_id for t in received) == sorted(t.episode_id for t in arrived)
    assert not [message for message in caplog.messages if "damaged" in message]


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], 600.0),
        (["actor.episode_timeout_s=900"], 930.0),
        (["actor.episode_timeout_s=900", "pipeline.ticket_timeout_s=1800"], 1800.0),
        (["actor.episode_timeout_s=900", "actor.unroll_turns=1"], 600.0),
    ],
)
def test_a_ticket_has_the_time_of_its_episode_where_that_is_whole(words: list[str], seconds: float) -> None:
    assert ticket_timeout_s(load(["experiment=corridor", "algorithm=vtrace", *words])) == seconds

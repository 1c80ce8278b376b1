"""The life of a learner's end of the pipeline: how it starts, and what is left when it does not."""

import socket
import uuid

import pytest
import zmq

from impala_llm.pipeline import LearnerEndpoint
from impala_llm.settings import Config


def test_a_port_that_was_taken_meanwhile_is_the_error_that_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = Config()
        config.run.name = f"t-{uuid.uuid4().hex[:8]}"
        config.pipeline.bind = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(zmq.ZMQError), LearnerEndpoint(config, 0, 1, lambda: None, {}) as endpoint:
            endpoint.listen(0, range(4), vocab_size=10, batch_size=config.learner.batch_size)

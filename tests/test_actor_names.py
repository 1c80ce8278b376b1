"""Names of actors: no two of a run have the same."""

import platform

import pytest

from impala_llm.config import load
from impala_llm.pipeline.actor_endpoint import actor_name
from impala_llm.pipeline.shm.run_directory import check_name

POD = "a-trainer-with-quite-a-long-name-in-a-cluster"


def name_on(host: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "node", lambda: host)
    config = load(["experiment=toy"])
    config.pipeline.connect = "tcp://learner:7400"
    return actor_name(config, 3)


def test_hosts_whose_names_begin_alike_or_differ_in_a_sign_have_actors_of_different_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = ["node-1", "node.1", "node_1", f"{POD}-7f9c-abcde", f"{POD}-7f9c-fghij", "é", "ü", "", "x" * 300]
    names = [name_on(host, monkeypatch) for host in hosts]
    assert names[0] == "node-1-actor-3"
    assert len(set(names)) == len(hosts)
    for name in names:
        check_name("actor_id", f"{name}.rank-127")

"""The SGLang engine against a server that misbehaves on demand. The real one: tests/system/test_sglang_engine.py."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import save_file

from impala_llm.config import load
from impala_llm.engines import make_engine
from impala_llm.engines.base import EngineError, ModelRefused, SamplingParams, ServerUnfit
from impala_llm.engines.sglang import external_server
from impala_llm.engines.sglang.engine import SGLangEngine
from impala_llm.engines.sglang.external_server import RemoteServer, absent_servers, find_servers
from impala_llm.engines.sglang.response import BrokenAnswer
from impala_llm.processes.supervised import PROGRESS
from tests.engines.sglang.fake_server import VOCAB, Change, FakeServer, check_tokens, run, running


def weights(directory: Path, rows: int = 3) -> Path:
    directory.mkdir()
    save_file({"layer.weight": np.zeros((rows, 2), np.float32)}, directory / "model.safetensors")
    return directory


def edit(**changes: object) -> Change:
    """Changes the second piece; a function gets the old value."""

    def change(piece: dict, number: int) -> None:
        if number == 1:
            for name, value in changes.items():
                holder = piece if name in piece else piece["meta_info"]
                holder[name] = value(holder[name]) if callable(value) else value

    return change


def nothing_said(piece: dict, number: int) -> bytes | None:
    return b"{}" if number == 1 else None


def no_facts(piece: dict, number: int) -> bytes | None:
    return b'{"output_ids": [7], "meta_info": null}' if number == 1 else None


def no_json(piece: dict, number: int) -> bytes | None:
    return b"<html>" if number == 1 else None


def no_end_of_lists(piece: dict, number: int) -> bytes | None:
    return b"[" * 100_000 if number == 1 else None


def raw_spans(value: object) -> Change:
    def change(piece: dict, number: int) -> None:
        if piece["meta_info"]["finish_reason"] is not None:
            piece["meta_info"]["weight_versions"] = value

    return change


def spans(*values: tuple[str, int, int]) -> Change:
    return raw_spans([{"version": version, "start": start, "end": end} for version, start, end in values])


def drop_spans(piece: dict, number: int) -> None:
    piece["meta_info"].pop("weight_versions", None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit(output_token_logprobs=lambda pairs: pairs[1:]), "4 tokens have 3 log-probabilities"),
        (edit(completion_tokens=9), "4 \\+ 4 tokens have arrived, but it counts 9"),
        (edit(output_ids=[7, VOCAB, 9, 10]), f"token {VOCAB} is not in 0 .. {VOCAB - 1}"),
        (edit(output_ids=[7, "8", 9, 10]), "token '8'"),
        (edit(output_ids=[True, 8, 9, 10]), "token True is not in"),
        (edit(output_ids=None), "output_ids is None: a list is expected"),
        (edit(output_token_logprobs={}), "output_token_logprobs is {}: a list is expected"),
        (edit(output_token_logprobs=lambda pairs: [[-1e60, *pairs[0][1:]], *pairs[1:]]), "log-probability -1e\\+60"),
        (edit(completion_tokens="8"), "completion_tokens is '8': an integer is expected"),
        (edit(prompt_tokens=None), "prompt_tokens is None: an integer is expected"),
        (edit(cached_tokens=[]), "cached_tokens is \\[\\]: an integer is expected"),
        (edit(finish_reason="length"), "finish_reason is 'length': an object is expected"),
        (edit(output_token_logprobs=lambda pairs: [[None, *pairs[0][1:]], *pairs[1:]]), "log-probability None"),
        (edit(output_token_logprobs=lambda pairs: [[float("nan"), *pairs[0][1:]], *pairs[1:]]), "log-probability nan"),
        (edit(output_token_logprobs=lambda pairs: [[0.5, *pairs[0][1:]], *pairs[1:]]), "log-probability 0.5"),
        (edit(output_token_logprobs=lambda pairs: pairs[::-1]), "log-probability of another"),
        (edit(finish_reason={"type": "abort", "message": "too long", "status_code": 400}), "too long"),
        (spans(("0", 0, 9)), "do not cover 10 tokens"),
        (spans(("0", 0, 4), ("0", 5, 10)), "do not cover 10 tokens"),
        (spans(("default", 0, 10)), "do not cover 10 tokens"),
        (raw_spans([None]), "do not cover 10 tokens"),
        (raw_spans([{"version": "0", "end": 10}]), "do not cover 10 tokens"),
        (raw_spans([{"version": "0", "start": 0, "end": "10"}]), "do not cover 10 tokens"),
        (raw_spans([{"version": "0", "start": 0, "end": 1 << 50}]), "do not cover 10 tokens"),
        (drop_spans, "SGLang >= 0.5.19"),
        (nothing_said, "lacks"),
        (no_facts, "lacks"),
        (no_json, "not JSON"),
        (no_end_of_lists, "not JSON"),
    ],
)
def test_a_broken_answer_is_named_and_the_engine_lives(change, said):
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:
            fake.change = change
            with pytest.raises(EngineError, match=said) as caught:
                await engine.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=10))
            assert isinstance(caught.value, BrokenAnswer) or fake.url in str(caught.value)
            fake.change = lambda piece, number: None
            check_tokens([1, 2, 3], await engine.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=10)))
            assert engine.restarts == 0

    run(test)


def test_greedy_and_sampled_completions_are_asked_for_side_by_side():
    """As of evaluation tasks beside training episodes."""

    async def test():
        fake = FakeServer()
        async with running(fake) as engine:
            greedy = SamplingParams(max_new_tokens=5, greedy=True, temperature=0.7)
            sampled = SamplingParams(max_new_tokens=5, temperature=0.7)
            completions = engine.generate("a", [1, 2], greedy), engine.generate("b", [1, 2, 3], sampled)
            await asyncio.gather(*completions)
            asked = {len(r["input_ids"]): r["sampling_params"]["temperature"] for r in fake.requests}
            assert asked == {2: 0.0, 3: 0.7}

    run(test)


def test_what_arrived_before_a_reset_is_kept_and_continued():
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:
            fake.die_after = [2, 0, 1]
            completion = await engine.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=15, stop_token_ids=(44,)))
            check_tokens([1, 2, 3], completion)
            assert len(completion.tokens) == 15 and completion.finish_reason == "length"
            prompts = [request["input_ids"] for request in fake.requests]
            limits = [request["sampling_params"]["max_new_tokens"] for request in fake.requests]
            assert [len(prompt) for prompt in prompts] == [3, 11, 11, 15] and limits == [15, 7, 7, 3]
            assert prompts[3] == [1, 2, 3, *completion.tokens[:12].tolist()]
            assert engine.stats().decode_tokens == 15 and engine.restarts == 0

    run(test)


@pytest.mark.parametrize(("stops", "limit", "reason"), [((6,), 20, "stop"), ((), 4, "length")])
def test_a_reset_after_the_last_token_needs_no_further_request(stops, limit, reason):
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:

            def hide_end(piece: dict, number: int) -> None:
                piece["meta_info"]["finish_reason"] = None

            fake.change, fake.die_after = hide_end, [1]
            completion = await engine.generate(
                "a", [1, 2, 3], SamplingParams(max_new_tokens=limit, stop_token_ids=stops)
            )
            check_tokens([1, 2, 3], completion)
            assert completion.finish_reason == reason and len(fake.requests) == 1

    run(test)


def test_a_completion_goes_on_after_a_stop_token_that_is_not_its_own():
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:

            def change(piece: dict, number: int) -> None:
                if number == 1 and len(fake.requests) == 1:
                    versions = [{"version": "0", "start": 0, "end": 8}]
                    piece["meta_info"] |= {"finish_reason": {"type": "stop"}, "weight_versions": versions}

            fake.change = change
            completion = await engine.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=14, stop_token_ids=(40,)))
            check_tokens([1, 2, 3], completion)
            assert completion.finish_reason == "length" and len(completion.tokens) == 14 and len(fake.requests) == 2

    run(test)


def test_a_server_that_always_resets_fails_the_completion_only():
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:
            fake.die_after = [0] * 4
            with pytest.raises(EngineError, match="lost its server 4 times"):
                await engine.generate("a", [1], SamplingParams(max_new_tokens=5))
            check_tokens([1], await engine.generate("a", [1], SamplingParams(max_new_tokens=5)))

    run(test)


def test_sessions_stay_at_their_server_and_new_ones_go_to_the_least_loaded():
    async def test():
        fakes = FakeServer(), FakeServer()
        async with running(*fakes) as engine:
            for turn in range(3):
                await asyncio.gather(
                    *(
                        engine.generate(f"s{index}", [index, turn], SamplingParams(max_new_tokens=5))
                        for index in range(6)
                    )
                )
            seen = [{request["input_ids"][0] for request in fake.requests} for fake in fakes]
            assert len(seen[0]) == len(seen[1]) == 3 and not seen[0] & seen[1]
            for index in seen[0]:
                engine.release(f"s{index}")
            for index in range(10, 13):
                await engine.generate(f"s{index}", [index], SamplingParams(max_new_tokens=5))
            assert {10, 11, 12} <= {request["input_ids"][0] for request in fakes[0].requests}

    run(test)


def test_the_completions_of_a_server_that_is_gone_go_on_at_another():
    async def test():
        fakes = FakeServer(), FakeServer()
        async with running(*fakes) as engine:
            for fake in fakes:
                fake.gate.clear()
            completions = [
                asyncio.create_task(engine.generate(f"s{index}", [index], SamplingParams(max_new_tokens=30)))
                for index in range(8)
            ]
            while engine.stats().running < 8:
                await asyncio.sleep(0.001)
            await fakes[0].die()
            fakes[1].gate.set()
            for index, task in enumerate(completions):
                check_tokens([index], await task)
            assert engine.failure is None and engine.version == 0

    run(test)


def test_a_server_that_forgot_its_weights_gets_them_before_its_next_traffic(tmp_path):
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:
            directory = weights(tmp_path / "w")
            await engine.load_weights(directory, 7)
            fake.label = "0"  # restarted by its owner
            completion = await engine.generate("a", [1, 2], SamplingParams(max_new_tokens=9))
            check_tokens([1, 2], completion)
            assert set(completion.versions.tolist()) == {7} and fake.loaded == [directory] * 2 and engine.restarts == 1

    run(test)


def test_a_server_of_which_only_the_spans_tell_older_weights_counts_as_lost(tmp_path):
    async def test():
        fake = FakeServer()

        def change(piece: dict, number: int) -> None:
            if number == 2 and len(fake.loaded) == 1:  # another client has loaded 3, then 9
                fake.label = piece["meta_info"]["weight_version"] = "9"
                spans(("7", 0, 2), ("3", 2, 4), ("9", 4, 9))(piece, number)

        async with running(fake) as engine:
            directory = weights(tmp_path / "w")
            await engine.load_weights(directory, 7)
            fake.change = change
            completion = await engine.generate("a", [1, 2], SamplingParams(max_new_tokens=9))
            check_tokens([1, 2], completion)
            assert set(completion.versions.tolist()) == {7} and fake.loaded == [directory] * 2 and engine.restarts == 1

    run(test)


def test_a_handshake_takes_the_newest_weights_of_the_source(tmp_path):
    async def test():
        fake = FakeServer()
        newest = [(weights(tmp_path / "three"), 3)]
        async with running(fake, weights=lambda: contextlib.nullcontext(newest[-1])) as engine:
            assert engine.version == 3 and fake.loaded == [newest[0][0]]
            newest.append((weights(tmp_path / "nine"), 9))
            fake.label = "0"
            completion = await engine.generate("a", [1, 2], SamplingParams(max_new_tokens=9))
            assert set(completion.versions.tolist()) == {9} and engine.version == 9

    run(test)


@pytest.mark.parametrize(
    ("is_fed", "refusal", "label"), [(True, "the disk is on fire", "0"), (False, "Rolling back", "default")]
)
def test_a_server_that_missed_a_version_comes_back_with_it(tmp_path, is_fed, refusal, label):
    """The server answers; only its version tells that it is not well."""

    async def test():
        fake = FakeServer()
        async with running(fake, is_fed=is_fed) as engine:
            fake.label, fake.refuse_weights = label, refusal
            directory = weights(tmp_path / "w")
            loading = asyncio.create_task(engine.load_weights(directory, 1))
            while "update_weights_from_disk" not in fake.calls:
                await asyncio.sleep(0.001)
            fake.refuse_weights = ""
            await loading
            completion = await engine.generate("a", [1, 2], SamplingParams(max_new_tokens=9))
            assert set(completion.versions.tolist()) == {1} and engine.version == 1
            assert fake.loaded == [directory] and engine.restarts == 1 and engine.failure is None

    run(test)


SETTINGS = ["experiment=toy", "engine=sglang", "actor.num_actors=1"]


def test_servers_of_others_begin_with_the_policy_that_the_engine_is_made_for(tiny_model):
    """Without a source of weights; after a loss they get those that were loaded last."""

    async def test():
        fake = FakeServer()
        await fake.server.start_server(shutdown_timeout=0.1)
        engine = make_engine(load([*SETTINGS, f"engine.urls=[{fake.url}]"]), tiny_model, version=0)
        try:
            await engine.start()
            assert fake.loaded == [tiny_model] and engine.version == 0
            await engine.load_weights(tiny_model, 7)
            fake.label = "0"  # restarted by its owner
            completion = await engine.generate("a", [1, 2], SamplingParams(max_new_tokens=9))
            assert set(completion.versions.tolist()) == {7} and fake.loaded == [tiny_model] * 3
        finally:
            await engine.close()
            await fake.server.close()

    run(test)


def test_actors_share_servers_out_and_who_is_alone_has_all_of_them(tiny_model):
    """As `evaluate` is, whatever actor.num_actors the run had."""

    async def test():
        fakes = [FakeServer() for _ in range(3)]
        for fake in fakes:
            await fake.server.start_server(shutdown_timeout=0.1)
        urls = ",".join(fake.url for fake in fakes)
        config = load(["experiment=toy", "engine=sglang", "actor.num_actors=2", f"engine.urls=[{urls}]"])
        for index, servers in ((0, [0, 2]), (1, [1]), (None, [0, 1, 2])):
            engine = make_engine(config, tiny_model, version=0, index=index)
            try:
                await engine.start()
                assert [replica.server.url for replica in engine.replicas] == [fakes[number].url for number in servers]
            finally:
                await engine.close()
        for fake in fakes:
            await fake.server.close()

    run(test)


def test_the_vocabulary_of_a_model_is_that_of_its_text_part(tmp_path):
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 211}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    config = load([*SETTINGS, "engine.urls=['http://127.0.0.1:9']"])
    assert make_engine(config, tmp_path, version=0).vocab_size == 211


@pytest.mark.parametrize(
    ("in_flight", "calls"),
    [
        ("keep_kv", ["pause_generation", "update_weights_from_disk", "continue_generation"]),
        ("recompute_kv", ["pause_generation", "update_weights_from_disk", "continue_generation"]),
        ("drain", ["update_weights_from_disk"]),
    ],
)
def test_a_refused_version_names_all_and_changes_nothing(tmp_path, in_flight, calls):
    async def test():
        fake = FakeServer()
        async with running(fake, in_flight=in_flight, version=4) as engine:
            fake.calls.clear()
            fake.refuse_weights = "the disk is on fire"
            directory = weights(tmp_path / "w")
            with pytest.raises(EngineError) as caught:
                await engine.load_weights(directory, 5)
            for word in (fake.url, str(directory), "version 5", "the disk is on fire"):
                assert word in str(caught.value)
            assert fake.calls == calls and engine.version == 4 and engine.last_update is None
            completion = await engine.generate("a", [1], SamplingParams(max_new_tokens=5))
            assert set(completion.versions.tolist()) == {4}

    run(test)


def test_a_directory_of_another_model_is_never_sent(tmp_path):
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:
            await engine.load_weights(weights(tmp_path / "w"), 1)
            with pytest.raises(ModelRefused, match="1 of another shape"):
                await engine.load_weights(weights(tmp_path / "other", rows=4), 2)
            (tmp_path / "none").mkdir()
            with pytest.raises(EngineError, match="no \\*.safetensors"):
                await engine.load_weights(tmp_path / "none", 2)
            assert fake.loaded == [tmp_path / "w"] and engine.version == 1

    run(test)


def test_a_server_that_is_set_up_wrongly_is_refused():
    async def test():
        for info, options, flag in (
            ({"disable_radix_cache": False}, {"in_flight": "keep_kv"}, "--disable-radix-cache"),
            ({"incremental_streaming_output": False}, {}, "--incremental-streaming-output"),
            ({"max_req_input_len": 100}, {}, "--context-length"),
        ):
            with pytest.raises(ServerUnfit, match=flag):
                async with running(FakeServer(**info), **options):
                    raise AssertionError("it was accepted")

    run(test)


def test_a_url_without_a_server_is_an_error_after_the_timeout():
    async def test():
        engine = SGLangEngine([RemoteServer("http://127.0.0.1:9", timeout_s=0.2)], vocab_size=VOCAB, max_length=20)
        with pytest.raises(EngineError, match="127.0.0.1:9 did not answer for 0.2 s") as caught:
            await engine.start()
        assert not isinstance(caught.value, ServerUnfit), "it may answer later"
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("a", [1], SamplingParams())

    run(test)


def test_a_server_that_does_not_come_back_fails_all_who_wait():
    async def test():
        fake = FakeServer()
        async with running(fake, timeout_s=1) as engine:
            fake.gate.clear()
            waiting = asyncio.create_task(engine.generate("a", [1], SamplingParams(max_new_tokens=30)))
            while not fake.requests:
                await asyncio.sleep(0.001)
            await fake.die()
            with pytest.raises(EngineError, match="given up"):
                await waiting
            with pytest.raises(EngineError, match="given up"):
                await engine.generate("b", [1], SamplingParams(max_new_tokens=30))
            assert engine.failure is not None

    run(test)


def test_a_deadline_names_itself_and_frees_the_server():
    async def test():
        fake = FakeServer()
        async with running(fake, request_timeout_s=0.5) as engine:
            fake.gate.clear()
            with pytest.raises(EngineError, match="0.5 s \\(4 of 9 tokens\\)"):
                await engine.generate("a", [1], SamplingParams(max_new_tokens=9))
            while not fake.aborted:
                await asyncio.sleep(0.001)
            assert fake.aborted == [fake.requests[0]["rid"]]

    run(test)


def test_an_abort_that_the_server_ignores_returns_what_there_is(monkeypatch):
    async def test():
        monkeypatch.setattr("impala_llm.engines.sglang.engine.ABORT_GRACE_S", 0.1)
        fake = FakeServer()
        async with running(fake) as engine:
            fake.gate.clear()
            task = asyncio.create_task(engine.generate("a", [1], SamplingParams(max_new_tokens=9)))
            while not fake.requests:
                await asyncio.sleep(0.001)
            engine.abort("a")
            completion = await task
            assert completion.finish_reason == "abort"
            check_tokens([1], completion)

    run(test)


def test_a_second_request_of_a_session_and_a_closed_engine_are_refused():
    async def test():
        fake = FakeServer()
        async with running(fake) as engine:
            fake.gate.clear()
            task = asyncio.create_task(engine.generate("a", [1], SamplingParams(max_new_tokens=9)))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="running request"):
                await engine.generate("a", [1], SamplingParams())
            fake.gate.set()
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("a", [1], SamplingParams())

    run(test)


def test_a_server_with_a_key_is_shown_it():
    @web.middleware
    async def check_key(request: web.Request, handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def test():
        fake = FakeServer()
        fake.server.app.middlewares.append(check_key)
        await fake.server.start_server(shutdown_timeout=0.1)
        servers = [RemoteServer(fake.url, 5, "secret")]
        engine = SGLangEngine(servers, vocab_size=VOCAB, max_length=100)
        await engine.start()
        completion = await engine.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=6))
        check_tokens([1, 2, 3], completion)
        await engine.close()
        with pytest.raises(EngineError, match="answered 401, it asks for a key: Unauthorized"):
            await RemoteServer(fake.url, timeout_s=0.1).start()
        await fake.server.close()

    run(test)


def test_a_router_is_asked_for_its_workers():
    async def test():
        async def tell_workers(_request: web.Request) -> web.Response:
            return web.json_response({"workers": [{"url": fakes[0].url}, {"url": fakes[1].url + "/"}]})

        fakes = FakeServer(), FakeServer()
        fakes[0].server.app.router.add_get("/workers", tell_workers)
        for fake in fakes:
            await fake.server.start_server(shutdown_timeout=0.1)
        urls = [fake.url for fake in fakes]
        # The first plays the router and a worker.
        assert [server.url for server in await find_servers([urls[0]], timeout_s=5)] == urls
        assert [server.url for server in await find_servers([urls[1] + "/"], timeout_s=5)] == [urls[1]]
        with pytest.raises(EngineError, match="127.0.0.1:9 did not answer"):
            await find_servers(["http://127.0.0.1:9"], timeout_s=0.1)
        with pytest.raises(EngineError, match="HOST:PORT"):
            RemoteServer("localhost:30000")
        for fake in fakes:
            await fake.server.close()

    run(test)


def test_of_several_servers_those_that_do_not_answer_are_named():
    async def test():
        fake = FakeServer()
        await fake.server.start_server(shutdown_timeout=0.1)
        found = await absent_servers([fake.url, "http://127.0.0.1:9", "http://127.0.0.1:10"], timeout_s=1)
        assert [problem.partition(" did not answer for 1 s")[0] for problem in found] == [
            "engine.urls: http://127.0.0.1:9",
            "engine.urls: http://127.0.0.1:10",
        ]
        await fake.server.close()

    run(test)


def test_what_answers_at_a_url_and_is_no_sglang_server_is_told_apart_from_silence():
    async def test():
        async def greet(_request: web.Request) -> web.Response:
            return web.Response(text="<html>", content_type="text/html")

        page = web.Application()
        page.router.add_get("/{path:.*}", greet)
        async with TestServer(page) as pages:
            [problem] = await absent_servers([str(pages.make_url("")).rstrip("/")], timeout_s=0.5)
            assert "answers, but was no SGLang server" in problem and "model" in problem
        other = TestServer(web.Application())  # answers everything with 404
        await other.start_server()
        url = str(other.make_url("")).rstrip("/")
        [problem] = await absent_servers([url], timeout_s=0.5)
        assert (
            problem.startswith(f"engine.urls: {url} answers, but was no SGLang server that is ready")
            and "404" in problem
        )
        with pytest.raises(EngineError, match="answers, but was no SGLang server"):
            await RemoteServer(url, timeout_s=0.5).start()
        await other.close()

        async def refuse(_request: web.Request) -> web.Response:
            return web.json_response({"error": "Unauthorized"}, status=401)

        locked = web.Application()
        locked.router.add_get("/{path:.*}", refuse)
        async with TestServer(locked) as server:
            [problem] = await absent_servers([str(server.make_url("")).rstrip("/")], timeout_s=0.5)
            assert "401, it asks for a key: Unauthorized" in problem and "start it without --api-key" in problem

    run(test)


def test_a_long_wait_for_a_server_is_said_in_log_and_terminal(monkeypatch, caplog):
    reading, writing = os.pipe()
    monkeypatch.setenv(PROGRESS, str(writing))
    monkeypatch.setattr(external_server, "SAID_AFTER_S", 0.25)

    async def test():
        with pytest.raises(EngineError, match="127.0.0.1:9 did not answer"):
            await find_servers(["http://127.0.0.1:9"], timeout_s=0.5)
        with pytest.raises(EngineError, match="127.0.0.1:10 did not answer"):
            await RemoteServer("http://127.0.0.1:10", timeout_s=0.5).start()
        with pytest.raises(EngineError, match="127.0.0.1:11 did not answer"):
            await find_servers(["http://127.0.0.1:11"], timeout_s=0.1)  # no long wait

    run(test)
    said = [f"engine.urls: http://127.0.0.1:{port} does not answer yet and is waited for, 0.25 s" for port in (9, 10)]
    assert [record.getMessage().partition(" more at most")[0] for record in caplog.records] == said
    told = [json.loads(line) for line in os.read(reading, 1 << 16).splitlines()]
    assert [message["say"] for message in told] == [record.getMessage() for record in caplog.records]
    os.close(reading)
    os.close(writing)

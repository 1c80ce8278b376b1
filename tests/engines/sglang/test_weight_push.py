"""A sender against servers that do with PyTorch's own helper what SGLang does: what arrives, in which order they are
called, and in which state those are left that fail. Real servers: tests/system/test_sglang_transfer.py."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from impala_llm.engines.sglang import process_group
from impala_llm.engines.sglang.weight_push import MAX_FAILURES, Sent, TransferError, WeightSender

PAUSE, BEGIN, RECEIVE, END, GO_ON = "pause", "begin", "receive", "end", "continue"
PATHS = {
    "/pause_generation": PAUSE,
    "/begin_weight_update": BEGIN,
    "/update_weights_from_distributed": RECEIVE,
    "/end_weight_update": END,
    "/continue_generation": GO_ON,
    "/init_weights_update_group": "join",
    "/destroy_weights_update_group": "leave",
}


class FakeServer:
    """Joins groups and receives. refuse, hang: what is asked -> at which time of asking it refuses or does nothing."""

    def __init__(
        self, refuse: dict[str, int] | None = None, hang: dict[str, int] | None = None, key: str | None = None
    ) -> None:
        self.refuse, self.hang = refuse or {}, hang or {}
        self.key = key
        self.workers: list[str] = []
        self.calls: list[str] = []
        self.bodies: list[dict] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.freed = threading.Event()
        """Set where a broadcast ended because the other side had closed it."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/workers":
            return web.json_response({"workers": [{"url": url} for url in self.workers]})
        if request.method == "GET":
            return web.json_response(
                {
                    "version": "0.5.21",
                    "disable_radix_cache": True,
                    "max_req_input_len": 100,
                    "tp_size": 1,
                    "model_path": "/model",
                    "weight_version": "0",
                }
            )
        what, body = PATHS[request.path], await request.json()
        self.calls.append(what)
        self.bodies.append(body)
        if self.calls.count(what) == self.refuse.get(what):
            return web.json_response({"success": False, "message": "no"}, status=400)
        if self.calls.count(what) == self.hang.get(what):
            await asyncio.sleep(3600)
        if what == "join":
            await asyncio.to_thread(self.join, body)
        if what == "leave" and body["group_name"] in self.groups:
            # In a thread: it may wait for the other side, and another server answers on this loop.
            await asyncio.to_thread(dist.destroy_process_group, self.groups.pop(body["group_name"]))
        if what == RECEIVE:
            await asyncio.to_thread(self.receive, body)
        return web.json_response({"success": True})

    def join(self, body: dict) -> None:
        store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], is_master=False)
        name = body["group_name"]
        size = body["world_size"]
        group, _ = _new_process_group_helper(
            *(size, body["rank_offset"], [], Backend(body["backend"]), dist.PrefixStore(name, store)),
            group_name=name,
            backend_options=None,
            timeout=timedelta(seconds=30),
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self.groups[name] = group

    def receive(self, body: dict) -> None:
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            try:
                self.groups[body["group_name"]].broadcast(tensor, 0).wait()
            except RuntimeError:
                self.freed.set()
                raise
            self.tensors[name] = tensor


@contextmanager
def running(*servers: FakeServer) -> Iterator[list[FakeServer]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> list[web.AppRunner]:
        runners = []
        for server in servers:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", server.answer)
            runners.append(web.AppRunner(app, shutdown_timeout=0.1))
            await runners[-1].setup()
            site = web.TCPSite(runners[-1], "127.0.0.1", 0)
            await site.start()
            server.url = f"http://127.0.0.1:{runners[-1].addresses[0][1]}"
        return runners

    async def stop(runners: list[web.AppRunner]) -> None:
        for runner in runners:
            await runner.cleanup()

    runners = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield list(servers)
    finally:
        asyncio.run_coroutine_threadsafe(stop(runners), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Tensors of 160, 64, 0 and 12 bytes."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(8, 5, generator=generator)
    return {
        "wide.weight": wide,
        "turned.weight": wide[:4, :4].T,  # not contiguous
        "empty": torch.empty(0),
        "half.weight": torch.randn(6, generator=generator).bfloat16(),
    }


@pytest.mark.parametrize(("in_flight", "mode"), [("recompute_kv", "retract"), ("keep_kv", "in_place")])
def test_all_servers_get_every_tensor_and_the_label_with_the_last(tensors, in_flight, mode) -> None:
    with running(FakeServer(), FakeServer()) as servers, WeightSender(in_flight, bucket_bytes=100) as sender:
        urls = {index: server.url for index, server in enumerate(servers)}
        for version in (3, 4):
            sent = sender.send(urls, {name: version * tensor for name, tensor in tensors.items()}, version)
            assert (sent.num_received, sent.num_dropped) == (2, 0) and 0 < sent.transfer_s < sent.pause_s
            for server in servers:
                assert list(server.tensors) == list(tensors)
                for name, tensor in tensors.items():
                    assert server.tensors[name].dtype == tensor.dtype
                    assert torch.equal(server.tensors[name], version * tensor)
    for server in servers:
        once = [PAUSE, BEGIN, RECEIVE, RECEIVE, RECEIVE, END, GO_ON]
        assert server.calls == ["join", *once, *once, "leave"]
        assert server.bodies[1]["mode"] == mode
        received = [body for call, body in zip(server.calls, server.bodies, strict=True) if call == RECEIVE]
        assert [body["weight_version"] for body in received] == [None, None, "3", None, None, "4"]
        assert [body["flush_cache"] for body in received] == [False, False, mode == "retract"] * 2
        assert [len(body["names"]) for body in received[:3]] == [1, 3, 0]  # the second does not fit beside the first


@pytest.mark.parametrize(
    ("refuse", "calls"),
    [
        ({"join": 1}, ["join", "leave"]),
        # Nothing of the new version: it goes on as it was.
        ({PAUSE: 1}, ["join", PAUSE, GO_ON, "leave"]),
        # Its actor has its turn: nothing more is asked of it.
        ({BEGIN: 1}, ["join", PAUSE, BEGIN]),
        # It may have a part of the new version: it stays paused.
        ({RECEIVE: 1}, ["join", PAUSE, BEGIN, RECEIVE, END, "leave"]),
        ({RECEIVE: 2}, ["join", PAUSE, BEGIN, RECEIVE, RECEIVE, END, "leave"]),
        ({RECEIVE: 3}, ["join", PAUSE, BEGIN, RECEIVE, RECEIVE, RECEIVE, END, "leave"]),
        # It has all of it.
        ({END: 1}, ["join", PAUSE, BEGIN, RECEIVE, RECEIVE, RECEIVE, END, END, GO_ON, "leave"]),
        ({GO_ON: 1}, ["join", PAUSE, BEGIN, RECEIVE, RECEIVE, RECEIVE, END, GO_ON, GO_ON, "leave"]),
    ],
)
def test_a_server_that_refuses_is_left_in_order_and_let_alone(tensors, refuse, calls, caplog) -> None:
    with (
        running(FakeServer(refuse=refuse), FakeServer()) as [bad, good],
        WeightSender("recompute_kv", timeout_s=10, bucket_bytes=100) as sender,
    ):
        sent = sender.send({1: bad.url, 2: good.url}, tensors, 1)
        assert (sent.num_received, sent.num_dropped) == (1, 1)
        assert bad.calls == calls
        assert len(caplog.records) == 1 and bad.url in caplog.text
        sent = sender.send({1: bad.url, 2: good.url}, tensors, 2)
        assert (sent.num_received, sent.num_dropped) == (1, 0)
        assert bad.calls == calls
        # Its actor has put it right.
        sent = sender.send({3: bad.url, 2: good.url}, tensors, 3)
        assert (sent.num_received, sent.num_dropped) == (2, 0)
        assert bad.bodies[-1] is not None and list(bad.tensors) == list(tensors)


@pytest.mark.parametrize("hang", [{"join": 1}, {PAUSE: 1}, {RECEIVE: 2}])
def test_a_server_that_hangs_is_given_up(tensors, hang) -> None:
    with (
        running(FakeServer(hang=hang), FakeServer()) as [bad, good],
        WeightSender("recompute_kv", timeout_s=2, bucket_bytes=100) as sender,
    ):
        sent = sender.send({1: bad.url, 2: good.url}, tensors, 1)
        assert (sent.num_received, sent.num_dropped) == (1, 1)
        assert (GO_ON in bad.calls) == (PAUSE in hang), "it stays paused with a part of a version"
        assert good.tensors.keys() == tensors.keys()


def test_a_server_that_waits_for_more_is_set_free_where_the_learner_breaks_off(tensors, monkeypatch) -> None:
    """Else it would wait for half an hour, and its actor with it."""
    broadcast = process_group.begin_broadcast

    def breaking(link: process_group.Link, sent: list[torch.Tensor], timeout_s: float) -> None:
        if len(sent) > 1:
            raise TransferError("broken off")
        broadcast(link, sent, timeout_s)

    monkeypatch.setattr(process_group, "begin_broadcast", breaking)
    with running(FakeServer()) as [server], WeightSender("recompute_kv", bucket_bytes=100) as sender:
        assert sender.send({1: server.url}, tensors, 1).num_dropped == 1
        assert server.freed.wait(20)
        assert list(server.tensors) == ["wide.weight"] and GO_ON not in server.calls


def test_a_refusal_at_the_beginning_of_a_broadcast_holds_up_no_other_server(tensors, monkeypatch) -> None:
    """Freeing a group with a broadcast under way waits for the broadcast's deadline, and every transfer with it."""
    broadcast = process_group.begin_broadcast
    left = threading.Event()  # set where the server that refused has been left

    class Left(FakeServer):
        async def answer(self, request: web.Request) -> web.Response:
            if PATHS.get(request.path) == "leave":
                left.set()
            return await super().answer(request)

    with (
        running(Left(refuse={RECEIVE: 2}), FakeServer()) as [bad, good],
        WeightSender("recompute_kv", timeout_s=10, bucket_bytes=100) as sender,
    ):

        def late(link: process_group.Link, sent: list[torch.Tensor], timeout_s: float) -> None:
            broadcast(link, sent, timeout_s)
            if link.url == bad.url and len(sent) > 1:
                left.wait(5)

        monkeypatch.setattr(process_group, "begin_broadcast", late)
        sent = sender.send({1: bad.url, 2: good.url}, tensors, 1)
        assert (sent.num_received, sent.num_dropped) == (1, 1)
        assert good.tensors.keys() == tensors.keys()


def test_an_address_where_nothing_ever_works_is_given_up_for_good(tensors, caplog) -> None:
    with running(FakeServer()) as [server]:
        gone = server.url
    with WeightSender("recompute_kv", timeout_s=10) as sender:
        for opening in range(MAX_FAILURES):
            assert sender.send({opening: gone}, tensors, opening).num_dropped == 1
        assert "from now on" in caplog.text
        assert sender.send({99: gone}, tensors, 99) == Sent()
        assert sender.send({}, tensors, 99) == Sent()


def test_a_server_with_a_key_is_shown_it(tensors) -> None:
    with running(FakeServer(key="secret")) as [server]:
        with WeightSender("recompute_kv", key="secret") as sender:
            assert sender.send({1: server.url}, tensors, 1).num_received == 1
        assert server.calls[-1] == "leave"
        with WeightSender("recompute_kv") as sender:
            assert sender.send({1: server.url}, tensors, 1).num_dropped == 1


def test_nothing_is_sent_to_an_address_that_was_not_configured(tensors, caplog) -> None:
    with running(FakeServer(), FakeServer()) as [own, other]:
        elsewhere = other.url.replace("127.0.0.1", "localhost")
        with WeightSender("recompute_kv") as sender:  # those of this host's actors
            assert sender.send({1: own.url, 2: elsewhere, 3: f"{own.url}/path"}, tensors, 1).num_received == 1
            assert sender.send({1: own.url, 2: elsewhere}, tensors, 2).num_received == 1
        assert caplog.text.count(elsewhere) == 1
        with WeightSender("recompute_kv", urls=[f"{elsewhere}/"]) as sender:
            assert sender.send({1: own.url, 2: elsewhere}, tensors, 3).num_received == 1
        assert own.calls.count(BEGIN) == 2 and other.calls.count(BEGIN) == 1


def test_workers_of_a_configured_router_are_sent_weights(tensors) -> None:
    with running(FakeServer(), FakeServer()) as [router, worker]:
        router.workers = [f"{worker.url}/"]
        with WeightSender("recompute_kv", urls=[router.url]) as sender:
            assert sender.send({1: worker.url}, tensors, 1).num_received == 1


def test_a_server_that_is_not_offered_any_more_is_left(tensors) -> None:
    with running(FakeServer()) as [server], WeightSender("recompute_kv") as sender:
        sender.send({1: server.url}, tensors, 1)
        assert sender.send({}, tensors, 2) == Sent()
        assert server.calls[-1] == "leave"

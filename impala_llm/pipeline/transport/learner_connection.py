"""An actor's connection to one learner rank. While the learner is silent the socket is replaced from time to time.

Invariant: only time in which this actor polled counts as silence of the learner. Messages of another run's learner are
never handled: they raise LearnerLost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.network.keys import ActorKeys
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.transport.active_clock import ActiveClock
from impala_llm.pipeline.transport.messages import (
    MAX_MESSAGE_BYTES,
    UNKNOWN_RUN,
    Message,
    WireError,
    decode,
    encode,
    run_id_of,
)

_log = logging.getLogger(__name__)
_PATIENCE_HEARTBEATS = 5
"""Heartbeats without an answer after which the socket is replaced."""
_MAX_PATIENCE_S = 60.0
_SILENT_HEARTBEATS = 10
"""Heartbeats without an answer after which the learner's silence is logged, once."""

Context = zmq.Context[zmq.Socket[bytes]]
"""ZeroMQ context, with its threads, for any number of channels of a process."""


class LearnerLost(RuntimeError):
    """The learner was silent for too long, or another run has taken its place: the actor should end."""


@dataclass(frozen=True, slots=True)
class ChannelTimes:
    """Times of an actor's channel, in seconds.

    Attributes:
        heartbeat_s: between heartbeats, sent by `poll`; a learner of many actors asks for fewer.
        resend_s: without an acknowledgement, after which the learner is reminded of a trajectory; later reminders
            become rarer. The record itself travels again only where the learner lacks it.
        learner_timeout_s: of silence of the learner, its start included, after which `poll` raises LearnerLost; None:
            never. Only time in which this actor polled counts, a gap between two polls as one heartbeat at most.
        monotonic: source of time.
    """

    heartbeat_s: float = 1.0
    resend_s: float = 5.0
    learner_timeout_s: float | None = None
    monotonic: Callable[[], float] = time.monotonic


class LearnerConnection:
    """Messages to a learner rank and from it. For one thread or event loop.

    Args:
        endpoint: of the rank.
        identity: routing id, unique among living actor processes.
        run_dir: run directory shared with the learner; None on another host: the run is learned from its first answer.
        keys: needed for another host.
        times: see `ChannelTimes`.
        context: ended by its maker; None: the connection makes its own.

    Raises:
        ValueError: an endpoint on another host without keys.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        run_dir: RunDirectory | None,
        keys: ActorKeys | None,
        times: ChannelTimes,
        context: Context | None,
    ) -> None:
        self._endpoint, self._identity, self._keys = endpoint, identity, keys
        self._run_dir = run_dir
        self._run_id = UNKNOWN_RUN if run_dir is None else run_dir.run_id
        self._times = times
        self._clock = ActiveClock(times.heartbeat_s, times.monotonic)
        self._heard = 0.0
        self._is_silence_logged = False
        self.pause_s = times.heartbeat_s
        """Seconds between two heartbeats: each is answered."""
        self._patience_s = _PATIENCE_HEARTBEATS * times.heartbeat_s
        self._next_connect = self._patience_s
        self._waiter: asyncio.Future[None] | None = None
        self._owns_context = context is None
        self._context: Context = zmq.Context() if context is None else context
        self._events: zmq.Socket[bytes] | None = None
        self._is_refusal_logged = False
        try:
            self._socket = self._connect()
        except BaseException:
            self._end_context()
            raise

    def send(self, message: Message, records: Iterable[memoryview] = ()) -> None:
        """Send a message, or drop it if the learner does not read.

        Args:
            message: to send.
            records: that belong to it, one frame each.

        Raises:
            WireError: it cannot be encoded, see `messages.encode`.
        """
        try:
            frames: list[bytes | memoryview] = [encode(message, self._run_id), *records]
            if len(frames) == 1:
                self._socket.send(frames[0], zmq.NOBLOCK)  # several times as fast
            else:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # The queue of a learner that does not read is full. All that matters is offered again.
            _log.debug("no room to send %s", type(message).__name__)
        # Sending may swallow the signal that a message has arrived: see `readable`.
        if self._waiter is not None and self._has_input():
            self.wake()

    def receive(self) -> Message | None:
        """Receive the next message; None where there is none now.

        Raises:
            LearnerLost: another run listens at this endpoint.
        """
        self._clock.tick()
        while self._has_input():
            try:
                frame = b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
                message = decode(frame)
            except WireError as error:
                _log.warning("a message of the learner was dropped: %s", error)
                continue
            run_id = run_id_of(frame)
            if self._run_id == UNKNOWN_RUN:
                self._run_id = run_id
            elif run_id not in (UNKNOWN_RUN, self._run_id):
                raise LearnerLost(f"another run listens at {self._endpoint}: this actor's run has ended")
            self._note_sign_of_life()
            return message
        return None

    def set_pause(self, wanted_s: float) -> None:
        """Set the seconds between two heartbeats to `wanted_s`, the learner's, within this actor's own limits."""
        # Several answers must come before the learner counts as silent.
        most_s = (self._times.learner_timeout_s or math.inf) / _PATIENCE_HEARTBEATS
        self.pause_s = max(self._times.heartbeat_s, min(wanted_s, most_s))

    def check(self) -> bool:
        """Replace the socket if the learner has been silent for some time, and log its silence once.

        Returns:
            Whether the socket is new: messages that were under way may be lost.

        Raises:
            LearnerLost: the silence has lasted for `learner_timeout_s`, or the run has ended.
        """
        # The learner answers each heartbeat. If it does not, the connection may be one that libzmq has given up. It
        # does so for good after an error of protocol, such as bytes that were changed on their way.
        is_new = self._clock.now > self._next_connect
        if is_new:
            if self._run_dir is not None and self._run_dir.has_ended():
                raise LearnerLost(
                    f"this actor's run has ended, or another run has its name: {self._run_dir.path} is gone"
                )
            self._note_refusal()
            self._close_socket(linger=0)
            self._socket = self._connect()
            self._patience_s = min(2 * self._patience_s, _MAX_PATIENCE_S)
            self._next_connect = self._clock.now + self._patience_s
        silence = self._clock.now - self._heard
        limit_s = self._times.learner_timeout_s
        if limit_s is not None and silence > limit_s:
            raise LearnerLost(
                f"the learner has been silent for {silence:.0f} s, more than pipeline.learner_timeout_s={limit_s:g}"
            )
        if silence > _SILENT_HEARTBEATS * self.pause_s and not self._is_silence_logged:
            limit = "null, for ever" if limit_s is None else f"{limit_s:g}"
            _log.warning(
                "the learner has been silent for %.0f s: waiting for it (pipeline.learner_timeout_s=%s)", silence, limit
            )
            self._is_silence_logged = True
        return is_new

    def wait(self, timeout_s: float) -> None:
        """Block until a message can be read or the time is over, a heartbeat at most."""
        self._socket.poll(math.ceil(1000 * min(timeout_s, self._times.heartbeat_s)))

    async def readable(self, timeout_s: float) -> None:
        """Wait until a message can be read, `wake` is called, or the time is over, a heartbeat at most.

        ZeroMQ's descriptor is edge-triggered and stands for commands, not messages: it tells nothing once ZMQ_EVENTS
        was read or anything was sent. So the events are read before waiting, and again after each `send`.
        """
        loop = asyncio.get_running_loop()
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._waiter = loop.create_future()
        loop.add_reader(descriptor, self.wake)
        timer = loop.call_later(min(timeout_s, self._times.heartbeat_s), self.wake)
        try:
            if not self._has_input():
                await self._waiter
        finally:
            timer.cancel()
            loop.remove_reader(descriptor)
            self._waiter = None

    def wake(self) -> None:
        """Let `readable` return now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Close the socket, after the messages that were sent shortly before."""
        self._close_socket()
        self._end_context()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = sockets.dealer(self._context, self._endpoint, self._identity, MAX_MESSAGE_BYTES, self._keys)
        if self._keys is not None and not self._is_refusal_logged:
            self._events = sockets.monitor(self._context, socket)
        return socket

    def _close_socket(self, linger: int | None = None) -> None:
        if self._events is not None:
            self._socket.disable_monitor()
            self._events.close()
            self._events = None
        self._socket.close(linger=linger)

    def _note_refusal(self) -> None:
        """Log once that the learner seems to refuse this actor's key. The actor keeps trying: the key may be added."""
        if self._keys is None or self._events is None or not sockets.ends_without_handshake(self._events):
            return
        self._is_refusal_logged = True
        _log.warning(
            "%s can be reached, and does not take this actor's key %s: see that authorised/ in the learner's "
            "pipeline.keys has it, and that learner.public.json in pipeline.keys here is that of this learner",
            self._endpoint,
            self._keys.public.decode(),
        )

    def _end_context(self) -> None:
        if self._owns_context:
            self._context.term()

    def _note_sign_of_life(self) -> None:
        if self._is_silence_logged:
            _log.warning("the learner is back after %.0f s", self._clock.now - self._heard)
            self._is_silence_logged = False
        self._heard = self._clock.now
        self._patience_s = _PATIENCE_HEARTBEATS * self.pause_s
        self._next_connect = self._clock.now + self._patience_s

    def _has_input(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

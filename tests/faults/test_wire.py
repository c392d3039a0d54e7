"""Bytes that no client of ours would send reach a living engine; transport's own tests go through every kind."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import zmq
from tests.support.waiting import until

from wavecore.transport.errors import MessageTooLarge
from wavecore.transport.io.sockets import make_context
from wavecore.transport.wire.codec import MAX_FRAME_BYTES, encode
from wavecore.transport.wire.messages import Abort, Add, Hello, Ping, Utility
from wavecore.transport.wire.tensors import from_numpy


def test_well_formed_lies(deploy: Any) -> None:
    """Well-formed messages with another life's epoch, another client's name, tensors that lie about their size.

    They are dropped or refused; nobody else's request is touched.
    """
    with deploy({"step_seconds": 0.005}) as deployed, make_context() as context:
        stream = deployed.stream(1, 100)
        epoch = bytes.fromhex(deployed.engine.epoch)
        prompt = from_numpy(np.arange(1, 10, dtype=np.int32))
        ghost, other_life = os.urandom(16), os.urandom(16)
        with context.socket(zmq.PUSH) as push, context.socket(zmq.DEALER) as dealer:
            push.linger = dealer.linger = 0
            dealer.setsockopt(zmq.IDENTITY, ghost)
            push.connect(deployed.engine.input)
            dealer.connect(deployed.engine.output)
            dealer.send_multipart(encode(Hello()))
            dealer.send_multipart(encode(Ping(other_life, 1 << 60)))
            for message in (
                Add(other_life, ghost, 1, 1, prompt, {"max_tokens": 5}),
                Add(epoch, os.urandom(16), 1, 1, prompt, {"max_tokens": 5}),
                Add(epoch, ghost, 7, 1, prompt, {"max_tokens": 5}),
                Abort(other_life, ghost, 1, np.arange(1000, dtype=np.uint32)),
                Utility(epoch, ghost, 1, 1, "__class__", {}),
                Utility(epoch, ghost, 2, 2, "shutdown", {}),
            ):
                push.send_multipart(encode(message))
            head, *tensors = encode(Add(epoch, ghost, 3, 1, prompt, {"max_tokens": 5}))
            push.send_multipart([head, *(bytes(t)[:-4] for t in tensors)])
            stream.check_finished()
            deployed.check_serving()
        until(lambda: deployed.call("stats")["running"] == 0)


def test_message_that_is_too_large(deploy: Any) -> None:
    """A client wants to send more than a frame may hold; or forces it onto the wire.

    The sender refuses it with `MessageTooLarge`. On the wire it costs the sender its connection, nobody else anything.
    """
    with deploy({"step_seconds": 0.005}) as deployed, make_context() as context:
        stream = deployed.stream(1, 100)
        big = np.zeros(MAX_FRAME_BYTES // 4 + 1, np.int32)
        pump = deployed.llm._service.client._pump
        refused = threading.Event()

        def send() -> None:
            with pytest.raises(MessageTooLarge):
                pump.send(0, Add(b"", b"", 0, 1, from_numpy(big), {}))
            refused.set()

        pump.call_soon(send)
        assert refused.wait(60)
        with context.socket(zmq.PUSH) as push:
            push.linger = 0
            push.connect(deployed.engine.input)
            push.send(big.data, copy=False)
            stream.check_finished()
        deployed.check_serving()

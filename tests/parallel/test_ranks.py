"""What ranks on several hosts need: a store that is no listener, the interface that they were given, and a new NCCL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from wavecore.parallel.ranks import GRAPHS_OVER_HOSTS, LINKED, QUIET, check_graphs, join
from wavecore.parallel.store import LinkStore
from wavecore.transport.addresses import host_of, interface_of
from wavecore.transport.errors import NotSupportedError, ResourceError


def test_graphs_over_hosts_need_a_new_nccl() -> None:
    check_graphs(GRAPHS_OVER_HOSTS)
    check_graphs((2, 31, 0))
    with pytest.raises(
        NotSupportedError, match=r"NCCL 2\.28\.9, where they hang: set enforce_eager .*2\.30\.4 or newer"
    ):
        check_graphs((2, 28, 9))


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.1", "10.0.0.1"),
        ("tcp://node-1:7000", "node-1"),
        ("tcp://[::1]:7000", "::1"),
        ("tcp://[::1]", "::1"),
    ],
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.3") == "lo"
    own = {each.address: name for name, found in psutil.net_if_addrs().items() for each in found if "." in each.address}
    for address, name in own.items():
        assert interface_of(address) == name or address.startswith("127.")
    with pytest.raises(ResourceError, match=r"192\.0\.2\.1: no interface of this machine"):
        interface_of("192.0.2.1")


def test_a_store_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo meets at it; nothing listens but on the interface that was named."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *QUIET, *LINKED):
        monkeypatch.setenv(name, "")  # and as it was, behind the test
        monkeypatch.delenv(name)
    values: dict[str, bytes] = {}
    asked: list[str] = []

    def ask(method: str, args: Mapping[str, Any], _seconds: float) -> bytes | None:
        asked.append(method)
        if method == "set":
            values[args["key"]] = args["value"]
        return values.get(args["key"]) if asked.count("get") % 3 else None  # not there at once

    store = LinkStore(ask)
    store.set("text", "a")
    store.wait(["text"])
    assert store.get("text") == b"a" and values == {"text": b"a"}
    try:
        ranks = join(store, 0, 1, 1, True, torch.device("cpu"), lambda _rank: None, interface="lo")
        assert ranks.size == 1 and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
        found = psutil.Process().net_connections("tcp")
        assert {each.laddr.ip for each in found if each.status == "LISTEN"} <= {"127.0.0.1"}
    finally:
        dist.destroy_process_group()

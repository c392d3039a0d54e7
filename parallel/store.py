"""What torch's process groups meet at, over the link of ranks on several hosts: torch's own TCPStore would listen on
every interface, whatever host it is given."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

ASK_SECONDS, POLL_SECONDS = 30.0, 0.01


class LinkStore(Store):
    """Texts and bytes that all ranks may set and get; gloo and NCCL ask for no more of a store than this.

    Args:
        ask: `HostLink.ask`.
    """

    def __init__(self, ask: Callable[[str, Mapping[str, Any], float], Any]) -> None:
        super().__init__()
        self._ask = ask

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", {"key": key, "value": value.encode() if isinstance(value, str) else value}, ASK_SECONDS)

    def get(self, key: str) -> bytes:
        """Wait for it, as long as the group lives: its supervisor limits the start."""
        while (value := self._ask("get", {"key": key}, ASK_SECONDS)) is None:
            time.sleep(POLL_SECONDS)
        return bytes(value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 (as for `get`)
        for key in keys:
            self.get(key)

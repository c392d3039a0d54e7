"""The shared memory of a group whose ranks are all in this process."""

from __future__ import annotations

import os
from contextlib import ExitStack

from wavecore.transport.processes import group_memory
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage


def make_group(ranks: int, until: ExitStack) -> list[GroupMemory]:
    """One rank's hold each. `until` closes what the supervisor would."""
    (_, memory), (_, store), *bells = group_memory.create(ranks, until)
    groups = []
    for rank in range(ranks):
        fd = ProgressPage.create_fd()
        groups.append(GroupMemory(rank, os.dup(memory), store, [bell for _, bell in bells], ProgressPage(fd)))
        os.close(fd)
    return groups

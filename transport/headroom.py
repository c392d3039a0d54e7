"""What the system still gives this process: descriptors and threads. Asked before libzmq is, which aborts the process
when it gets none."""

import contextlib
import resource
import threading
from pathlib import Path

from wavecore.transport.errors import ResourceError


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one. For a process of our own; a library leaves it alone."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptors() -> tuple[int, int]:
    """How many more this process may open, and its limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return limit - sum(1 for _ in Path("/proc/self/fd").iterdir()), limit
    except OSError:  # none for the look itself
        return 0, limit


def check_headroom(what: str, num_descriptors: int, num_threads: int) -> None:
    """Raises:
    ResourceError: what is to be made needs more descriptors or threads than there are.
    """
    free, limit = descriptors()
    if free < num_descriptors:
        needs = f"{num_descriptors} file descriptors, and of this process's {limit} only {free} are free"
        way_out = "close clients or files that are not needed, or raise `ulimit -n`"
        raise ResourceError(f"{what} needs {needs}: {way_out}")
    release = threading.Event()
    probes = [threading.Thread(target=release.wait, daemon=True) for _ in range(num_threads)]
    try:
        for probe in probes:
            start_thread(probe)
    finally:
        release.set()
    for probe in probes:
        probe.join()


def start_thread(thread: threading.Thread) -> None:
    """Raises:
    ResourceError: the system gives no further thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        why = "this user or container has as many processes and threads as it may"
        limit = "`ulimit -u`, or the container's limit of processes"
        reason = f"the thread {thread.name!r} cannot be started: {why} ({limit}); end some, or raise the limit"
        raise ResourceError(reason) from error

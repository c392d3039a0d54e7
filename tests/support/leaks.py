"""Nothing left behind: what a test holds of the machine is compared before and after."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.support.waiting import until

from wavecore.frontend.text.template_process import TemplateProcesses
from wavecore.transport.processes.runtime_dir import RuntimeDir


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """No process, thread, descriptor, shared memory or entry of `folder` more than at the beginning.

    Args:
        folder: where runtime directories are made.
    """
    gc.collect()
    children, threads, files, descriptors = _children(), _threads(), _files(folder), _descriptors()
    yield
    gc.collect()  # an exception that was caught keeps its frames, and they all that a test made
    for found in gc.get_objects():
        if type(found) is TemplateProcesses:  # `isinstance` asks objects, and some answer with a warning
            found.close()  # kept warm for the next chat
    RuntimeDir(None).remove()  # what a killed supervisor left, the next start removes
    # An object that was dropped ends its engine beside what follows, so all of this may take a moment.
    for what, before, now in (
        ("processes", children, _children),
        ("threads", threads, _threads),
        ("files", files, lambda: _files(folder)),
        ("descriptors", descriptors, _descriptors),
    ):
        until(lambda before=before, now=now: not now() - before, f"the end of {what}: {now() - before}", seconds=10)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _threads() -> set[threading.Thread]:
    """Those that run. One that Python did not start is listed for ever: the system knows whether it does.

    Not the workers of asyncio, which live as long as their loop.
    """
    running = [thread for thread in threading.enumerate() if Path(f"/proc/self/task/{thread.native_id}").exists()]
    return {thread for thread in running if not thread.name.startswith("asyncio_")}


def _files(folder: Path) -> set[Path]:
    return {*folder.iterdir(), *Path("/dev/shm").glob("*wavecore*")}


def _descriptors() -> Counter[str]:
    """What open descriptors stand for, without their numbers."""
    links: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            links[re.sub(r"\d+", "N", str(path.readlink()))] += 1
    return links

"""Why did a process end? Words for what the kernel and its last output tell."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

_SIGNALS = {
    signal.SIGILL: "it ran an instruction that this CPU lacks: a wheel built for a newer CPU",
    signal.SIGBUS: "a mapped file shrank or shared memory is full: check the model files and /dev/shm",
    signal.SIGSEGV: "native code crashed; the stack, if any, is in its last output",
    signal.SIGABRT: "native code gave up; its reason, if any, is in its last output",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGINT: "somebody interrupted it",
}
_LIBRARY = re.compile(r"(?:error while loading shared libraries: )?(\S+\.so[.\d]*): cannot open shared object file")
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def explain(name: str, pid: int, returncode: int, output: Sequence[str], oom_kills_before: int) -> str:
    """One or two sentences about a process that ended without its own last words.

    Args:
        name: "engine 0".
        returncode: as subprocess gives it: an exit status, or minus a signal.
        output: its last lines.
        oom_kills_before: `oom_kills()` when it was started.
    """
    if returncode >= 0:
        return f"{name} (pid {pid}) exited with status {returncode}{_hint(output)}"
    number = -returncode
    what = f"{name} (pid {pid}) was ended by signal {number} ({_signal_name(number)})"
    if number == signal.SIGKILL:
        if oom_kills() > oom_kills_before:
            return (
                f"{what}: the kernel ran out of memory and killed it. Lower kv_cache_memory_gib, max_num_seqs or "
                "max_model_len, or give the machine or container more memory"
            )
        return f"{what}: somebody killed it, or a container's memory limit did (see dmesg and the container's events)"
    return f"{what}: {_SIGNALS[signal.Signals(number)]}" if number in _SIGNALS else what


def _hint(output: Sequence[str]) -> str:
    text = "\n".join(output)
    if found := _LIBRARY.search(text):
        return f": the library {found[1]} is missing or not on the loader's path (LD_LIBRARY_PATH)"
    if found := _MODULE.search(text):
        return f": the Python package {found[1]} is not installed for the interpreter that started it"
    last = next((line for line in reversed(output) if line.strip()), "")
    return f"; its last line was: {last[:300]}" if last else " without a word"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"

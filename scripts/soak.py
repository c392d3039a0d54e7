"""Random load, aborts and faults on a real deployment with a scripted model, all from one seed; nothing may be lost.

    python scripts/soak.py --seconds 60 --seed 1 [--dp ENGINES] [--ranks RANKS_OF_EACH]

Faults: any rank of an engine is killed by a random signal, stopped for a moment or for good, sockets get hostile bytes,
an attached reader is stopped or killed, hundreds of requests are aborted at once; the disk is full for a while, files
of the runtime directory vanish. Other clients fork, drop streams for the collector to find, stop from a signal handler,
or sit behind a slow link that breaks. Each request must end exactly once and with the right tokens, each client in
time. Prints a summary; exit code 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
from scripted_tokens import VOCAB_SIZE, right_tokens
from soak_clients import ENGINE_DIED, KINDS

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.prompts import as_prompt
from wavecore.transport.errors import EngineDead, WavecoreError
from wavecore.transport.processes import deployment, group
from wavecore.transport.processes.deployment import EngineEntry
from wavecore.transport.processes.supervisor import Limits, Supervisor

SCRIPT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": [], "num_blocks": 300, "step_seconds": 0.002}
CONFIG: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 256, "max_num_queued_reqs": 100}
OUTSTANDING = 80
FAULT_SECONDS = (1.0, 4.0)  # pause between two faults
DRAIN_SECONDS = 60.0
READER_REQUESTS = 4
OTHERS = 2  # clients beside our own
CLIENT_SECONDS = 90.0  # within which another client must have ended
SIGNALLED_SECONDS = 15.0  # ... after a signal that tells it to stop
DISK_SECONDS = 3.0  # that the disk is full
WRITE = deployment.write


@dataclass(slots=True)
class Sent:
    """A request of ours that has not ended."""

    prompt: list[int]
    max_tokens: int
    abort_at: float


@dataclass(slots=True)
class Other:
    """Another client."""

    kind: str
    process: subprocess.Popen[bytes]
    until: float


@dataclass
class Outcome:
    ends: Counter[str] = field(default_factory=Counter)
    ends_of_others: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    detected: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recovered: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: int = 0


class Soak:
    """One run.

    Args:
        supervisor: started.
        chance: all randomness comes from it.
    """

    def __init__(self, supervisor: Supervisor, runtime_dir: Path, chance: random.Random) -> None:
        self.supervisor, self.runtime_dir, self.chance = supervisor, runtime_dir, chance
        self.llm = LLM.connect(runtime_dir)
        self.service = self.llm._service
        self.notifier, self.live = ThreadNotifier(), dict[Mailbox, Sent]()
        self.outcome = Outcome()
        self.readers: list[subprocess.Popen[bytes]] = []
        self.others: list[Other] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.down_since = 0.0  # when we broke the engine, until it serves again
        self.disk_full_until = 0.0
        self.seen_dead = False
        self.broken_by, self.broken = "", EngineEntry(0)

    def run(self, seconds: float) -> Outcome:
        end = time.monotonic() + seconds
        next_fault = time.monotonic() + 1.0
        while (now := time.monotonic()) < end:
            self.fill(now)
            self.turn(now)
            if len(self.others) < OTHERS:
                self.start_client()
            if now >= next_fault and not self.down_since:
                self.fault()
                next_fault = now + self.chance.uniform(*FAULT_SECONDS)
        end = time.monotonic() + DRAIN_SECONDS
        while (self.live or self.others) and (now := time.monotonic()) < end:
            self.turn(now)
        for other in self.others:
            self.outcome.wrong.append(f"a client ({other.kind}) has not ended")
            other.process.kill()
            other.process.wait()
        for reader in self.readers:
            with contextlib.suppress(ProcessLookupError):
                reader.send_signal(signal.SIGCONT)
            reader.kill()
            reader.wait()
        for entry in self.supervisor.deployment().engines:
            self.check_books(entry.index)
        self.llm.shutdown()
        return self.outcome

    # --- load -----------------------------------------------------------------------------------------------------

    def fill(self, now: float) -> None:
        chance = self.chance
        while len(self.live) < OUTSTANDING:
            prompt = [chance.randrange(1, 1000) for _ in range(chance.choice((1, 5, 40, 120)))]
            count = chance.choice((1, 4, 20, 60))
            params = SamplingParams(max_tokens=count, temperature=0)
            timeout = 0.5 if chance.random() < 0.02 else None
            resume = chance.random() < 0.3
            options = RequestOptions(timeout=timeout)
            request = self.service.prepare(as_prompt({"prompt_token_ids": prompt}), params, options, resume=resume)
            self.outcome.sent += 1
            try:
                mailbox = self.service.mailbox(request, self.notifier, OutputKind.FINAL)
                self.service.client.submit(mailbox)
            except WavecoreError as error:
                self.outcome.ends[f"refused: {error.code}"] += 1
                return
            abort_at = now + chance.uniform(0, 0.3) if chance.random() < 0.2 else float("inf")
            self.live[mailbox] = Sent(prompt, count, abort_at)

    def turn(self, now: float) -> None:
        mailbox = self.notifier.wait(0.01)
        while mailbox is not None:
            self.ended(mailbox)
            mailbox = self.notifier.wait(0)
        for mailbox in [m for m, sent in self.live.items() if sent.abort_at <= now]:
            self.live[mailbox].abort_at = float("inf")
            self.service.client.abort(mailbox)
        for item in [item for item in self.later if item[0] <= now]:
            self.later.remove(item)
            item[1]()
        for other in [o for o in self.others if o.process.poll() is not None or o.until <= now]:
            self.others.remove(other)
            self.client_ended(other)
        if self.down_since:
            engine = self.supervisor.deployment().engines[self.broken.index]
            attached = engine.index in self.service.client.engines
            if engine.state == "ready" and engine.epoch != self.broken.epoch and attached:
                self.outcome.recovered[self.broken_by].append(now - self.down_since)
                self.down_since = 0.0

    def ended(self, mailbox: Mailbox) -> None:
        sent, output = self.live.pop(mailbox, None), mailbox.take()
        if sent is None or output is None:
            self.outcome.wrong.append("a request ended twice, or without a word")
            return
        if isinstance(output.error, EngineDead) and self.down_since and not self.seen_dead:
            self.seen_dead = True
            self.outcome.detected[self.broken_by].append(time.monotonic() - self.down_since)
        self.check(sent, output)

    def check(self, sent: Sent, output: RequestOutput) -> None:
        [choice] = output.outputs
        reason = str(choice.finish_reason)
        self.outcome.ends[f"error: {output.error.code}" if output.error else reason] += 1
        if reason == "length" and len(choice.token_ids) != sent.max_tokens:
            self.outcome.wrong.append(f"finished with {len(choice.token_ids)} of {sent.max_tokens} tokens")
        if list(choice.token_ids) != right_tokens(sent.prompt, len(choice.token_ids)):
            self.outcome.wrong.append(f"wrong tokens after {sent.prompt[:5]}... ({reason})")

    # --- faults ---------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        breaking = (self.kill, self.stop, self.full_disk)
        others = (self.hostile, self.hostile, self.pause, self.mass_abort, self.slow_reader, self.lost_file)
        fault = self.chance.choice((*breaking, *others))
        self.outcome.faults[fault.__name__] += 1
        fault()

    def kill(self) -> None:
        self._break(self.chance.choice((signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM)))

    def stop(self) -> None:
        """For good: the supervisor must notice."""
        self._break(signal.SIGSTOP)

    def pause(self) -> None:
        """For less than the limit: nothing may happen."""
        pid = self.chance.choice(self._engine().ranks).pid
        os.kill(pid, signal.SIGSTOP)
        self.later.append((time.monotonic() + self.chance.uniform(0.2, 1.5), lambda: _signal(pid, signal.SIGCONT)))

    def hostile(self) -> None:
        """Bytes of no protocol, and well-framed messages of garbage, spoken without a ZeroMQ library."""
        entry = self._engine()
        for address, kind in ((entry.input, b"PUSH"), (entry.output, b"DEALER")):
            with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
                peer.settimeout(0.5)
                peer.connect(address.removeprefix("ipc://"))
                if self.chance.random() < 0.3:
                    peer.sendall(self.chance.randbytes(500))
                else:
                    peer.sendall(_greeting(kind))
                    for _ in range(self.chance.randrange(1, 100)):
                        peer.sendall(
                            _frame(self.chance.randbytes(self.chance.randrange(255)), self.chance.random() < 0.3)
                        )

    def mass_abort(self) -> None:
        for mailbox in list(self.live):
            self.service.client.abort(mailbox)

    def slow_reader(self) -> None:
        """Another client, stopped while it streams; then it goes on, or is killed."""
        reader = subprocess.Popen(
            [sys.executable, __file__, "--reader", str(self.runtime_dir)], stderr=subprocess.DEVNULL
        )
        self.readers.append(reader)
        last = signal.SIGKILL if self.chance.random() < 0.5 else signal.SIGCONT
        now = time.monotonic()
        self.later.append((now + 1.5, lambda: _signal(reader.pid, signal.SIGSTOP)))
        self.later.append((now + 4.0, lambda: _signal(reader.pid, last)))

    def start_client(self) -> None:
        """Another client, of one of the kinds of soak_clients.py."""
        kind = self.chance.choice([*KINDS])
        command = [sys.executable, str(Path(__file__).with_name("soak_clients.py")), kind, str(self.runtime_dir)]
        process = subprocess.Popen([*command, str(self.chance.randrange(1 << 30))], stdout=subprocess.PIPE)
        other = Other(kind, process, time.monotonic() + CLIENT_SECONDS)
        self.others.append(other)
        if kind == "signalled":
            self.later.append((time.monotonic() + self.chance.uniform(2.0, 4.0), lambda: self._tell(other)))

    def _tell(self, other: Other) -> None:
        if other not in self.others:
            return
        assert other.process.stdout is not None
        if select.select([other.process.stdout.fileno()], [], [], 0)[0]:  # its handler is there, or it has ended
            other.until = time.monotonic() + SIGNALLED_SECONDS
            other.process.terminate()
        else:
            self.later.append((time.monotonic() + 0.5, lambda: self._tell(other)))

    def client_ended(self, other: Other) -> None:
        status = other.process.poll()
        if status is None:
            self.outcome.wrong.append(f"a client ({other.kind}) hangs")
            other.process.send_signal(signal.SIGABRT)  # faulthandler tells where
            other.process.wait()
        elif status not in (0, ENGINE_DIED):
            self.outcome.wrong.append(f"a client ({other.kind}) ended with status {status}")
        self.outcome.ends_of_others[
            f"{other.kind} {'right' if status == 0 else 'engine died' if status else 'wrong'}"
        ] += 1
        assert other.process.stdout is not None
        other.process.stdout.close()

    def full_disk(self) -> None:
        """No room for deployment.json, while the engine dies."""
        self.disk_full_until = time.monotonic() + DISK_SECONDS
        self.kill()

    def write(self, *args: Any) -> None:
        """In place of `deployment.write`: it may be asked while a disk is full that was full before."""
        if time.monotonic() < self.disk_full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        WRITE(*args)

    def lost_file(self) -> None:
        """A cleaner of old files takes one of the deployment's, or all of them."""
        ours = [path for path in self.runtime_dir.iterdir() if path.is_file() or path.is_socket()]
        for path in ours if self.chance.random() < 0.3 else [self.chance.choice(ours)]:
            path.unlink(missing_ok=True)

    def _break(self, number: signal.Signals) -> None:
        self.down_since, self.seen_dead, self.broken = time.monotonic(), False, self._engine()
        rank = self.chance.choice(self.broken.ranks)
        if rank.rank and number == signal.SIGTERM:  # workers leave that to rank 0
            number = signal.SIGKILL
        self.broken_by = number.name
        _signal(rank.pid, number)

    def _engine(self) -> EngineEntry:
        return self.chance.choice(self.supervisor.deployment().engines)

    # --- the end --------------------------------------------------------------------------------------------------

    def check_books(self, engine: int) -> None:
        """The engine is idle, its blocks are back and its books are in order."""
        client, wrong = self.service.client, self.outcome.wrong
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(WavecoreError):
                stats = client.call("stats", timeout=5, engine=engine).result().value
                if stats["running"] == stats["waiting"] == 0:
                    break
            time.sleep(0.1)
        else:
            wrong.append(f"engine {engine} is not idle 30 s after the last request ended")
            return
        if client.call("check_integrity", engine=engine).result().value is not True:
            wrong.append(f"check_integrity of engine {engine} failed")
        used = client.call("memory_stats", engine=engine).result().value["blocks_in_use"]
        if used:
            wrong.append(f"{used} blocks of engine {engine} are still in use")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="engines")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each engine")
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        return _read(args.reader)
    group.MAX_DELAY = 1.0  # a run breaks the engine many times in a minute
    fds, children = _open_fds(), set(psutil.Process().children(recursive=True))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as script:
        json.dump(SCRIPT, script)
        script.flush()
        sizes = {"data_parallel_size": args.dp, "tensor_parallel_size": args.ranks}
        config = EngineConfig(model=f"scripted:{script.name}", skip_tokenizer_init=True, **CONFIG, **sizes)
        with make_supervisor(config, Limits(ready=60, drain=2)) as supervisor:
            soak = Soak(supervisor, supervisor.start(), random.Random(args.seed))
            with mock.patch.object(deployment, "write", soak.write):
                outcome = soak.run(args.seconds)
            restarted = sum(engine.restarts for engine in supervisor.deployment().engines)
            runtime_dir = soak.runtime_dir
    if set(psutil.Process().children(recursive=True)) - children:
        outcome.wrong.append("processes are left")
    if runtime_dir.exists():
        outcome.wrong.append(f"{runtime_dir} is left")
    lost = outcome.sent - outcome.ends.total()
    _report(args, outcome, lost, restarted, _open_fds() - fds)
    return 1 if lost or outcome.wrong else 0


def _report(args: argparse.Namespace, outcome: Outcome, lost: int, restarted: int, fds: int) -> None:
    print(
        f"seed {args.seed}, {args.seconds:g} s, {args.dp} engines of {args.ranks} ranks: {outcome.sent} requests, "
        f"lost = {lost}, wrong = {len(outcome.wrong)}"
    )
    for name, count in sorted(outcome.ends.items()):
        print(f"  {count:7d} {name}")
    print("other clients: " + ", ".join(f"{count} {name}" for name, count in sorted(outcome.ends_of_others.items())))
    print("faults: " + ", ".join(f"{count} {name}" for name, count in sorted(outcome.faults.items())))
    print(f"restarts: {restarted}; descriptors more than before: {fds}")
    for what, by_fault in (("detected", outcome.detected), ("serving again", outcome.recovered)):
        for name, times in sorted(by_fault.items()):
            middle, longest = np.median(times), max(times)
            print(f"{name} {what} after: median {middle:.3f} s, longest {longest:.3f} s ({len(times)} times)")
    for line in outcome.wrong[:20]:
        print(f"WRONG: {line}")


def _read(runtime_dir: str) -> int:
    """Another client: streams until it is killed, done, or told that the engine died."""
    params = SamplingParams(max_tokens=2000, temperature=0)
    with contextlib.suppress(WavecoreError), LLM.connect(runtime_dir) as llm:
        llm.generate([[i + 1] for i in range(READER_REQUESTS)], params, use_tqdm=False)
    return 0


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _open_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _greeting(kind: bytes) -> bytes:
    """ZMTP 3.0 greeting with the NULL mechanism, and READY; rfc.zeromq.org/spec/23."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return greeting + b"\x04" + bytes([len(ready)]) + ready


def _frame(body: bytes, more: bool) -> bytes:
    return bytes([more, len(body)]) + body


if __name__ == "__main__":
    sys.exit(main())

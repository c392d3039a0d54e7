"""A runner without a model, for tests: its KV cache stores what a real one depends on, so any scheduling error shows.

The fake KV of a position is a checksum of all tokens up to it, computed from the checksum *read through the block
table* at the position before. The next token is a hash of every checksum of the sequence, again read through the block
table. A wrong block, a stale copy, a lost swap or a wrong position therefore changes tokens. Steps run in `wait`, in
launch order, like kernels on a stream. Imports no torch: starts in a fraction of a second.

`model="scripted:PATH"` names a JSON object; all keys are optional:

    vocab_size (512), eos_token_id (0; a list is fine, [] for none), max_model_len (4096), hidden_size (8),
    block_size (16), num_blocks (1024), num_host_blocks (0): config.block_size, config.num_gpu_blocks_override and
        config.max_model_len go first; host blocks count only with config.swap_space_gib > 0.
    step_seconds (0.0), token_seconds (0.0): how long the device takes for a step, and for each of its tokens in
        addition, which is reported, too. swap_block_seconds (0.0): reported, costs nothing.
    transfer_steps (0): a transfer is done with the rows of its own step, or so many steps later. It is done in one
        moment at the end of that time, and the blocks that it brings hold nothing until then.
    scripts ({}): {"<first prompt token>": [token, ...]}: a prompt that starts with this token gets these output
        tokens, then eos (the last one again without eos). "*" is the script of any other prompt. Without a script the
        token is the hash.
    tokenizer (""): reported as the model path, so that text can be decoded.
    load_seconds (0.0): time between the first and the last progress report of loading.
    faults ({}): of one rank; any of
        rank: whose they are (0)
        load_error: message of a ModelError while loading
        load_seconds: time that this rank takes in addition
        exit_at_phase: {"phase": "load" or "kv_cache", "code": 3} or {"phase": ..., "signal": 9}: the process ends there
        nan_token: rows of prompts that start with this token come back as NaN faults
        oom_token: a step with such a prompt raises OutOfMemory; oom_at_steps: [step id, ...] do; oom_at_launches:
            [step id, ...] do before they begin
        raise_at_step, hang_at_step: step id at which `wait` raises RuntimeError, or never returns
        exit_at_step: {"step": 5, "code": 3} or {"step": 5, "signal": 9}
        wait_at_step: {"step": 5, "rank": 0}: in this step the rank waits for that one, for ever
Workers (ranks above 0) compute nothing; they take as long for a step, and have those faults that no request causes.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.plan import (
    NewRequest,
    OutOfMemory,
    RowLogprobs,
    RunnerInfo,
    StepPlan,
    StepResult,
)
from wavecore.transport.errors import ModelError, NotSupportedError
from wavecore.transport.processes.group_memory import GroupMemory

U32 = npt.NDArray[np.uint32]
Progress = Callable[[str, float], None]

POISON = 0xDEADBEEF  # content of a block that nobody wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The JSON object, checked."""

    vocab_size: int = 512
    eos_token_id: int | list[int] = 0
    max_model_len: int = 4096
    hidden_size: int = 8
    block_size: int = 16
    num_blocks: int = 1024
    num_host_blocks: int = 0
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    swap_block_seconds: float = 0.0
    transfer_steps: int = 0
    load_seconds: float = 0.0
    scripts: Mapping[str, list[int]] = field(default_factory=dict)
    tokenizer: str = ""
    faults: Mapping[str, Any] = field(default_factory=dict)

    def faults_of(self, rank: int) -> Mapping[str, Any]:
        return self.faults if self.faults.get("rank", 0) == rank else {}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.eos_token_id) if isinstance(self.eos_token_id, list) else (self.eos_token_id,)

    @classmethod
    def read(cls, model: str) -> Script:
        """From "scripted:PATH"; "scripted:" alone takes all defaults.

        Raises:
            ModelError: unreadable, not JSON, or an unknown key.
        """
        path = model.removeprefix("scripted:")
        if not path:
            return cls()
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{path}: cannot be read as a scripted model: {error}") from error


class ScriptedRunner:
    """Implements `plan.Runner`.

    Args:
        group: shared with the workers, or with ranks in lockstep, if there are any.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        script: Script | None = None,
        group: GroupMemory | None = None,
    ) -> None:
        self.script = script or Script.read(config.model)
        size = config.tensor_parallel_size
        self.chain = StepChain(group.part(size)) if group and size > 1 else None
        self.faults = self.script.faults_of(group.rank if group else 0)
        _load(self.script, self.faults, progress or (lambda *_: None))
        host = self.script.num_host_blocks if config.swap_space_gib > 0 else 0
        self.info = RunnerInfo(
            num_blocks=config.num_gpu_blocks_override or self.script.num_blocks,
            num_host_blocks=host,
            block_size=config.block_size or self.script.block_size,
            max_model_len=config.max_model_len or self.script.max_model_len,
            vocab_size=self.script.vocab_size,
            hidden_size=self.script.hidden_size,
            eos_token_ids=self.script.eos_token_ids,
            dtype="float32",
            device="cpu",
            model_path=self.script.tokenizer,
            swap_block_seconds=self.script.swap_block_seconds,
            token_seconds=self.script.token_seconds,
            max_logprobs=config.max_logprobs,
        )
        info, seqs = self.info, config.max_num_seqs
        self.blocks = np.full((info.num_blocks, info.block_size), POISON, np.uint32)
        self.host_blocks = np.full((host, info.block_size), POISON, np.uint32)
        self.table = np.zeros((seqs, -(-info.max_model_len // info.block_size)), np.int32)
        self.tokens = np.zeros((seqs, info.max_model_len + 1), np.int32)
        self.requests: list[NewRequest | None] = [None] * seqs
        self.queue: deque[_Pending] = deque()
        self.transfers: deque[StepPlan] = deque()
        self.transferred = -1
        self.device_free = 0.0  # when the made-up device is done with what was waited for

    def launch(self, plan: StepPlan | None, least: object = None) -> _Pending:  # noqa: ARG002 (pads nothing)
        if plan is not None and plan.step_id in self.faults.get("oom_at_launches", ()):
            self.queue.clear()
            raise OutOfMemory("the scripted model was told to have no memory for this step")
        steps = self.chain.launch() if self.chain else 0
        pending = _Pending(self, StepPlan.empty() if plan is None else plan, time.monotonic(), steps)
        self.queue.append(pending)
        return pending

    def is_eager(self, plan: StepPlan) -> bool:  # noqa: ARG002 (the interface)
        return False

    def memory_stats(self) -> dict[str, int]:
        return {"kv_cache_bytes": self.blocks.nbytes, "host_kv_cache_bytes": self.host_blocks.nbytes}

    def wants_capture(self, uses: int) -> bool:  # noqa: ARG002 (the interface)
        return False

    def attention_map(self, prompt: list[int], layer: int, head: int) -> Never:  # noqa: ARG002 (the interface)
        raise NotSupportedError("a scripted model has no attention")

    def check_weights(self, folder: str) -> None:  # noqa: ARG002 (the interface)
        raise NotSupportedError("a scripted model has no weights")

    update_weights = check_weights

    def profile(self, on: bool) -> None:  # noqa: ARG002 (the interface)
        raise NotSupportedError("a scripted model runs nothing that could be profiled")

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan's events, write the KV of all rows, then read: like the layers of a model do."""
        self._transfer(plan.after)
        self.transfers.append(plan)
        self.blocks[plan.swap_in[:, 1]] = POISON
        _copy(plan.copies, self.blocks, self.blocks)
        for new in plan.new_requests:
            self.requests[new.slot] = new
            self.tokens[new.slot, : len(new.token_ids)] = new.token_ids
        if plan.step_id >= 0:
            self._fail(plan)
        self.table[plan.table[:, 0], plan.table[:, 1]] = plan.table[:, 2]
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.query_lens.tolist(), strict=True))
        # A row may read, right before its start, what another row of this step writes: earlier positions go first.
        for slot, start, length in sorted(rows, key=lambda row: row[1]):
            self._write(slot, start, length)
        self._transfer(plan.step_id - self.script.transfer_steps)
        return self._read(plan, rows)

    def _transfer(self, step_id: int) -> None:
        """The transfers of plans up to this one happen, as late as they may."""
        while self.transfers and self.transfers[0].step_id <= step_id:
            plan = self.transfers.popleft()
            _copy(plan.swap_out, self.blocks, self.host_blocks)
            _copy(plan.swap_in, self.host_blocks, self.blocks)
            self.transferred = max(self.transferred, plan.step_id)

    def _write(self, slot: int, start: int, length: int) -> None:
        size = self.info.block_size
        table, tokens = self.table[slot], self.tokens[slot]
        value = int(self.blocks[table[(start - 1) // size], (start - 1) % size]) if start else 0
        for position in range(start, start + length):
            value = zlib.crc32(int(tokens[position]).to_bytes(4, "little"), value)
            self.blocks[table[position // size], position % size] = value

    def _read(self, plan: StepPlan, rows: list[tuple[int, int, int]]) -> StepResult:
        tokens = np.full(len(rows), -1, np.int32)
        faults = np.zeros(len(rows), np.uint8)
        logprobs: dict[int, RowLogprobs] = {}
        prompt_logprobs: dict[int, RowLogprobs] = {}
        pooled: dict[int, npt.NDArray[np.float32]] = {}
        for i, (slot, start, length) in enumerate(rows):
            request = self._at(slot)
            end = start + length
            wanted = request.params.prompt_logprobs
            targets = self.tokens[slot, start + 1 : min(end + 1, request.num_prompt)]
            if wanted is not None and len(targets):
                prompt_logprobs[i] = self._logprobs(targets, wanted)
            if request.token_ids[0] == self.faults.get("nan_token", -1):
                faults[i] = 1
            elif plan.samples[i]:
                tokens[i] = self.tokens[slot, end] = self._next(slot, end)
                if request.params.logprobs is not None:
                    logprobs[i] = self._logprobs(tokens[i : i + 1], request.params.logprobs)
            elif request.pooling and end == len(request.token_ids):
                seen = self._context(slot, end)
                pooled[i] = np.array([zlib.crc32(seen, k) / 2**32 for k in range(self.info.hidden_size)], np.float32)
        return StepResult(tokens, faults, logprobs, prompt_logprobs, pooled, self.transferred)

    def _at(self, slot: int) -> NewRequest:
        request = self.requests[slot]
        assert request is not None, f"a row of slot {slot}, where no request began"
        return request

    def _context(self, slot: int, end: int) -> bytes:
        """All checksums of positions below `end`, through the block table."""
        blocks = self.table[slot, : -(-end // self.info.block_size)]
        return self.blocks[blocks].reshape(-1)[:end].tobytes()

    def _next(self, slot: int, end: int) -> int:
        request = self._at(slot)
        scripts = self.script.scripts
        script = scripts.get(str(int(request.token_ids[0])), scripts.get("*"))
        if script is not None:
            place = end - request.num_prompt
            if place < len(script):
                return script[place]
            return self.script.eos_token_ids[0] if self.script.eos_token_ids else script[-1]
        params = request.params
        key = 0 if params.greedy else zlib.crc32(f"{params.seed} {request.choice} {end}".encode())
        return zlib.crc32(self._context(slot, end), key) % self.script.vocab_size

    def _logprobs(self, chosen: npt.NDArray[np.int32], k: int) -> RowLogprobs:
        """Made up: the chosen token is the most likely one, the next k ids follow."""
        ids = (chosen[:, None] + np.arange(-1, k, dtype=np.int32)) % self.script.vocab_size
        ids[:, 0] = chosen
        values = np.broadcast_to(-0.5 * np.maximum(np.arange(1, k + 2), 2).astype(np.float32) + 0.5, ids.shape)
        return RowLogprobs(ids.astype(np.int32), values.copy(), np.ones(len(chosen), np.int32))

    def _fail(self, plan: StepPlan) -> None:
        faults = self.faults
        if not faults:
            return
        first_tokens = {int(self._at(slot).token_ids[0]) for slot in plan.slots.tolist()}
        if plan.step_id in faults.get("oom_at_steps", ()) or faults.get("oom_token", -1) in first_tokens:
            self.queue.clear()
            raise OutOfMemory("the scripted model was told to run out of memory")
        if faults.get("exit_at_step", {}).get("token", -1) in first_tokens:
            _exit(faults["exit_at_step"])
        _fail_at(plan.step_id, faults, self.chain)


class StepChain:
    """How ranks share a step: in a chain, so that they wait for each other as in a collective.

    A rank is done with a step when it has done its own part and the rank behind it is done. So one that fails, hangs or
    is slow holds up all ranks before it, up to rank 0. In the group's memory rank r owns word r, which says how many
    steps it launched (rank 0) or is done with (the others).

    Args:
        group: shared with the other ranks.
    """

    def __init__(self, group: GroupMemory) -> None:
        self._group, self._rank = group, group.rank

    def launch(self) -> int:
        """Rank 0: all do one more step; returns how many that makes."""
        self._group.words[0] += 1
        for rank in range(1, self._group.ranks):
            self._group.ring(rank)
        return self._group.words[0]

    def next_step(self, steps: int) -> None:
        """The others: sleep until rank 0 has launched more than so many steps."""
        self._group.sleep_until(lambda: self._group.words[0] > steps)

    def finish(self, steps: int) -> None:
        """Wait until the rank behind this one is done with so many steps; then this one is, too."""
        behind = self._rank + 1
        if behind < self._group.ranks:
            self._group.sleep_until(lambda: self._group.words[behind] >= steps, behind)
        if self._rank:
            self._group.words[self._rank] = steps
            self._group.ring(self._rank - 1)

    def wait_for_ever(self, rank: int) -> None:
        """For a rank that never does what this one waits for."""
        self._group.sleep_until(lambda: False, rank)


class ScriptedWorker:
    """A rank above 0: follows the steps of rank 0, and computes nothing."""

    def __init__(self, config: EngineConfig, progress: Progress, group: GroupMemory) -> None:
        self.script, self.chain = Script.read(config.model), StepChain(group.part(config.tensor_parallel_size))
        self.progress, self.faults = group.progress, self.script.faults_of(group.rank)
        _load(self.script, self.faults, progress)

    def run(self) -> Never:
        """Until this process is ended, by a fault or by its supervisor."""
        steps, page = 0, self.progress
        while True:
            page.busy(False)
            self.chain.next_step(steps)
            page.busy(True)
            _fail_at(steps, self.faults, self.chain)
            time.sleep(self.script.step_seconds)
            steps += 1
            self.chain.finish(steps)
            page.beat()


@dataclass(eq=False)
class _Pending:
    """A launched step; runs when waited for. Waits must come in launch order."""

    runner: ScriptedRunner
    plan: StepPlan
    launched: float
    steps: int  # of the workers, with this one

    def wait(self) -> StepResult:
        assert self.runner.queue[0] is self, "steps must be waited for in launch order"
        self.runner.queue.popleft()
        result = self.runner.run(self.plan)
        script = self.runner.script
        seconds = script.step_seconds + script.token_seconds * self.plan.num_tokens
        if seconds:
            done = max(self.launched, self.runner.device_free) + seconds
            self.runner.device_free = done
            time.sleep(max(0.0, done - time.monotonic()))
        if self.runner.chain:
            self.runner.chain.finish(self.steps)
        return result


def _load(script: Script, faults: Mapping[str, Any], progress: Progress) -> None:
    for phase in ("load", "kv_cache"):
        progress(phase, 0.0)
        at = faults.get("exit_at_phase", {})
        if at.get("phase") == phase:
            _exit(at)
        if phase == "load":
            time.sleep(script.load_seconds + faults.get("load_seconds", 0.0))
            if "load_error" in faults:
                raise ModelError(str(faults["load_error"]))
        progress(phase, 1.0)


def _fail_at(step: int, faults: Mapping[str, Any], chain: StepChain | None) -> None:
    if step == faults.get("raise_at_step", -1):
        raise RuntimeError("the scripted model was told to raise at this step")
    if step == faults.get("hang_at_step", -1):
        threading.Event().wait()
    if step == faults.get("exit_at_step", {}).get("step", -1):
        _exit(faults["exit_at_step"])
    if chain and step == faults.get("wait_at_step", {}).get("step", -1):
        chain.wait_for_ever(faults["wait_at_step"]["rank"])


def _copy(pairs: npt.NDArray[np.int32], source: U32, target: U32) -> None:
    target[pairs[:, 1]] = source[pairs[:, 0]]  # all pairs at once, as a kernel does


def _exit(how: Mapping[str, Any]) -> None:
    if "signal" in how:
        os.kill(os.getpid(), int(how["signal"]))
        signal.pause()
    os._exit(int(how["code"]))

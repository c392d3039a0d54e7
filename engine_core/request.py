"""One sequence to generate, as the scheduler sees it: validated, hashed, and where it stands.

`Request.from_add` runs in the input thread, so that checking and hashing a long prompt overlap with the device. What
changes every step (counters, tokens of the output) lives in `slots` while the request holds a slot; a request holds
what outlives a slot. Knows no text.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import MAX_PRIORITY, MAX_SALT, MAX_SECONDS, SamplingParams
from wavecore.engine_core.kv_cache import block_hash
from wavecore.engine_core.plan import RowLogprobs, RunnerInfo
from wavecore.engine_core.scheduling.timing_wheel import Timer
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.messages import Add, TensorFrame

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

OPTIONS = frozenset({"priority", "cache_salt", "timeout", "queue_timeout", "first_token_timeout", "pooling", "emitted"})


class State(Enum):
    WAITING = "waiting"  # in the queue, never started
    FORKING = "forking"  # a further choice; waits until the first one's prompt is computed
    LOADING = "loading"  # holds a slot and blocks; some of their content is on its way from the host
    RUNNING = "running"  # holds a slot and blocks
    DRAINING = "draining"  # preempted with steps in flight: keeps its slot until their tokens arrived
    PREEMPTED = "preempted"  # in the queue again
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one request of a client.

    Attributes:
        client, handle: its name.
        tokens: int32 [n], contiguous: prompt, then output known when it last held no slot.
        num_prompt: how many of them are the prompt.
        limit: sequence length at which it ends with finish reason length.
        stop_ids: end-of-sequence ids (unless ignored) and stop_token_ids.
        root, hashes: prefix-cache key of the empty prefix and of each full block known so far.
        needs_prompt_states: every prompt position must run through the model, so no cached prefix is used.
        started, reported: it held a slot once; its first output went out.
        major, minor: the policy's key; smaller goes first.
        blocks: device block table. host_blocks: host copies while swapped out, `swapped` tokens of it.
        stale: its blocks hold content from before a reset of the prefix cache: nobody may share them.
        forks: further choices that wait to share this one's prompt blocks; source: where a fork shares from.
    """

    client: bytes
    handle: int
    tokens: I32
    num_prompt: int
    params: SamplingParams
    limit: int
    stop_ids: tuple[int, ...] = ()
    choice: int = 0
    priority: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
    first_token_timeout: float | None = None
    pooling: str = ""
    prompt_embeds: F32 | None = None
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)

    state: State = State.WAITING
    arrival: float = 0.0
    major: float = 0.0
    minor: int = 0
    queued: bool = False
    started: bool = False
    reported: bool = False
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    swapped: int = 0
    cached_tokens: int = 0
    stale: bool = False
    preemptions: int = 0
    forks: list[Request] = field(default_factory=list)
    source: Request | None = None
    timers: dict[str, Timer[Any]] = field(default_factory=dict)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs_done: int = 0

    @property
    def samples(self) -> bool:
        """False for embeddings and for max_tokens=0: the prompt is computed and nothing is drawn."""
        return not self.pooling and self.params.max_tokens != 0

    @property
    def needs_prompt_states(self) -> bool:
        if self.pooling == "mean":
            return True
        return self.params.prompt_logprobs is not None and self.prompt_logprobs_done < self.num_prompt - 1

    @property
    def nbytes(self) -> int:
        """What it costs to queue."""
        return self.tokens.nbytes + (0 if self.prompt_embeds is None else self.prompt_embeds.nbytes)

    def choices(self) -> list[Request]:
        """This request and its further choices, which wait in `forks`. Prompt logprobs come once, with choice 0."""
        if self.params.n == 1:
            return [self]
        params = replace(self.params, prompt_logprobs=None)
        self.forks = [
            replace(self, handle=self.handle + i, choice=i, params=params, hashes=list(self.hashes), forks=[])
            for i in range(1, self.params.n)
        ]
        for fork in self.forks:
            fork.state, fork.source = State.FORKING, self
            fork.timers, fork.blocks, fork.host_blocks, fork.prompt_logprobs = {}, [], [], []
        return [self, *self.forks]

    @classmethod
    def from_add(cls, add: Add, info: RunnerInfo, config: EngineConfig) -> Request:
        """Check everything again and hash the prompt's blocks.

        Raises:
            ValidationError: naming the field and the way out.
        """
        params = SamplingParams.from_wire(add.params)
        params.check_model(info.vocab_size, info.eos_token_ids)
        options = _options(add.options)
        tokens = _prompt(add.prompt, info.vocab_size)
        pooling = options.get("pooling", "")
        emitted = options.get("emitted", 0)
        num_prompt = len(tokens) - emitted
        if num_prompt < 1:
            raise ValidationError("emitted", f"{emitted} of {len(tokens)} tokens leaves no prompt")
        embeds = None if add.prompt_embeds is None else _embeds(add.prompt_embeds, num_prompt, info.hidden_size)
        if not 0 <= add.handle <= (1 << 32) - params.n:
            raise ValidationError("n", f"handles {add.handle} to {add.handle + params.n - 1} do not fit into 32 bits")
        if params.n != 1 and (pooling or emitted):
            raise ValidationError("n", "must be 1 for embeddings and for a request that goes on elsewhere")
        samples = not pooling and params.max_tokens != 0
        if emitted and not samples:
            raise ValidationError("emitted", "must be 0 for embeddings and with max_tokens 0: nothing is drawn")
        _check_fits(len(tokens), samples, info, config)
        if samples and params.max_tokens is not None and emitted >= params.max_tokens:
            raise ValidationError("emitted", f"{emitted} tokens are all that max_tokens {params.max_tokens} allows")
        room = (info.num_blocks - 1) * info.block_size
        most = math.inf if params.max_tokens is None else num_prompt + params.max_tokens
        if params.seed is None:
            params = replace(params, seed=_seed(config.seed, add.handle, tokens))
        request = cls(
            client=add.client,
            handle=add.handle,
            tokens=tokens,
            num_prompt=num_prompt,
            params=params,
            limit=int(min(most, info.max_model_len, room)),
            stop_ids=(*(() if params.ignore_eos else info.eos_token_ids), *(params.stop_token_ids or ())),
            priority=options.get("priority", 0),
            timeout=options.get("timeout"),
            queue_timeout=options.get("queue_timeout", config.max_queue_seconds),
            first_token_timeout=options.get("first_token_timeout"),
            pooling=pooling,
            prompt_embeds=embeds,
        )
        if config.enable_prefix_caching:
            keys = {"salt": options["cache_salt"].encode()} if "cache_salt" in options else {}
            if embeds is not None:
                keys["prompt_embeds"] = hashlib.sha256(embeds.data).digest()
            request.root = block_hash.root_key(keys)
            block_hash.extend(request.hashes, request.root, tokens, info.block_size)
        return request


def _check_fits(num_tokens: int, samples: bool, info: RunnerInfo, config: EngineConfig) -> None:
    longest = info.max_model_len - (1 if samples else 0)
    if num_tokens > longest:
        room = " with room for one token of output" if samples else ""
        raise ValidationError(
            "prompt",
            f"{num_tokens} tokens, but at most {longest} fit into max_model_len {info.max_model_len}{room}; "
            "shorten the prompt",
        )
    capacity = (info.num_blocks - 1) * info.block_size
    if num_tokens > capacity - (1 if samples else 0):
        raise ValidationError(
            "prompt",
            f"{num_tokens} tokens, but the whole KV cache holds {capacity}; shorten the prompt or give the engine "
            "more KV memory (gpu_memory_utilization, kv_cache_memory_gib, num_gpu_blocks_override)",
        )
    if not config.enable_chunked_prefill and num_tokens > config.max_num_batched_tokens:
        raise ValidationError(
            "prompt",
            f"{num_tokens} tokens, but one step computes at most {config.max_num_batched_tokens} "
            "(max_num_batched_tokens) and chunked prefill is off; shorten the prompt or turn it on",
        )


def _prompt(frame: TensorFrame, vocab_size: int) -> I32:
    if frame.dtype != "int32" or len(frame.shape) != 1 or memoryview(frame.buffer).nbytes != 4 * frame.shape[0]:
        raise ValidationError("prompt", f"must be int32 [n], not {frame.dtype} {list(frame.shape)}")
    if not frame.shape[0]:
        raise ValidationError("prompt", "must hold at least one token")
    tokens = np.array(np.frombuffer(frame.buffer, np.int32))
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValidationError(
            "prompt", f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
    return tokens


def _embeds(frame: TensorFrame, num_tokens: int, hidden_size: int) -> F32:
    if frame.dtype not in ("float32", "bfloat16") or frame.shape != (num_tokens, hidden_size):
        raise ValidationError(
            "prompt_embeds",
            f"must be float32 or bfloat16 [{num_tokens}, {hidden_size}], not {frame.dtype} {list(frame.shape)}",
        )
    item = 4 if frame.dtype == "float32" else 2
    if memoryview(frame.buffer).nbytes != item * num_tokens * hidden_size:
        raise ValidationError("prompt_embeds", "length of the bytes and shape differ")
    if frame.dtype == "float32":
        embeds = np.array(np.frombuffer(frame.buffer, np.float32))
    else:  # bfloat16 is the upper half of a float32
        embeds = (np.frombuffer(frame.buffer, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(embeds).all():
        raise ValidationError("prompt_embeds", "must be finite")
    return embeds.reshape(frame.shape)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(str(name)[:64] for name in options if name not in OPTIONS)
    if unknown:
        raise ValidationError(unknown[0], "is not a request option")
    found = {name: value for name, value in options.items() if value is not None}
    for name, low, high in (("priority", -MAX_PRIORITY, MAX_PRIORITY), ("emitted", 0, (1 << 31) - 1)):
        value = found.get(name, 0)
        if type(value) is not int or not low <= value <= high:
            raise ValidationError(name, f"must be a whole number from {low} to {high}, not {value!r:.80}")
    for name in ("timeout", "queue_timeout", "first_token_timeout"):
        value = found.get(name, 1.0)
        if type(value) not in (int, float) or not 0 < value <= MAX_SECONDS:
            raise ValidationError(name, f"must be above 0 and at most {MAX_SECONDS:.0f} seconds, not {value!r:.80}")
    salt = found.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt.encode(errors="replace")) > MAX_SALT:
        raise ValidationError("cache_salt", f"must be a string of at most {MAX_SALT} bytes")
    if found.get("pooling", "") not in ("", "mean", "last"):
        raise ValidationError("pooling", f'must be "mean" or "last", not {found["pooling"]!r:.80}')
    return found


def _seed(base: int | None, handle: int, tokens: I32) -> int:
    """Fresh entropy; with a base seed, a number that the same script gets again on its next run."""
    if base is None:
        return secrets.randbits(63)
    digest = hashlib.sha256(f"{base} {handle} ".encode())
    digest.update(tokens.data)
    return int.from_bytes(digest.digest()[:8], "little") >> 1

"""One sequence to generate, as the scheduler sees it: what it asks for, and where it stands.

`loop.admission` makes it of a checked message. What changes every step (counters, tokens of the output) lives in
`slots` while the request holds a slot; a request holds what outlives a slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import F32, I32, RowLogprobs


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
        stop_ids: end-of-sequence ids (unless ignored), then stop_token_ids.
        root, hashes: prefix-cache key of the empty prefix and of each full block known so far.
        needs_prompt_states: every prompt position must run through the model, so no cached prefix is used.
        started, reported: it held a slot once; its first output went out.
        started_at, first_token_at, last_token_at: when, by the engine's clock; 0 for not yet. The last one is kept by
            `slots` while it holds a slot.
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
    options: RequestOptions = field(default_factory=RequestOptions)
    prompt_embeds: F32 | None = None
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)

    state: State = State.WAITING
    arrival: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
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
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs_done: int = 0

    @property
    def samples(self) -> bool:
        """False for embeddings and for max_tokens=0: the prompt is computed and nothing is drawn."""
        return not self.options.pooling and self.params.max_tokens != 0

    @property
    def needs_prompt_states(self) -> bool:
        if self.options.pooling == "mean":
            return True
        return self.params.prompt_logprobs is not None and self.prompt_logprobs_done < self.num_prompt - 1

    @property
    def size(self) -> int:
        """What it counts for in the engine's load, in tokens: its share of the prompt, which the first choice computes
        for all, and its output."""
        return (0 if self.choice else self.num_prompt) + self.params.counted_output

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
            fork.blocks, fork.host_blocks, fork.prompt_logprobs = [], [], []
        return [self, *self.forks]

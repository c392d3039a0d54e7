"""One request between the IO thread, which delivers, and its consumer, which takes. One slot: deltas merge.

A slow consumer therefore costs the tokens it has not read, never a queue. A mailbox notifies its consumer once until
the consumer takes. There is no lock: the collector may close the consumer's generator, and a signal handler may shut
the client down, in the middle of anything; see `Choice` for how the two threads get along.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.choice import Choice
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.outputs import FinishName, RequestMetrics, RequestOutput
from wavecore.frontend.text.detokenizer import CONTEXT
from wavecore.frontend.text.logprobs import LazyLogprobs, read_rows
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import RequestError, WavecoreError, from_code
from wavecore.transport.wire.messages import FinishReason, TensorFrame
from wavecore.transport.wire.tensors import to_numpy

logger = logging.getLogger(__name__)

Extra = Mapping[str, Any]
"""What a row says beside its tokens; what names frames gives their places."""
Frames = Sequence[TensorFrame]

EMBEDDING_PARAMS = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
"""Of a request that is pooled and normalised in the engine, and samples nothing."""


class OutputKind(StrEnum):
    """What `take` gives and when a consumer is notified: what is new, all so far, or all once at the end."""

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL = "final"


class Notifier(Protocol):
    """Tells consumers that their mailboxes hold something. Called in the IO thread; must not block or raise."""

    def notify(self, mailboxes: Sequence[Mailbox]) -> bool:
        """Tell those of these mailboxes, perhaps none. Returns whether there still is somebody to tell."""


_GIVEN = "kind", "notifier", "request", "started", "_choices", "_decode", "_only", "_prompt_ids", "_special_stops"
_ARRIVING = "_cached_tokens", "_embedding", "_first_at", "_last_at", "_metrics", "_notified", "_prompt_logprobs"


class Mailbox:
    """Attributes:
    request: what was asked for.
    notifier: tells the consumer.
    started: monotonic time of its submission.
    """

    __slots__ = (*_GIVEN, *_ARRIVING)  # see `Choice`

    def __init__(
        self, request: EngineRequest, tokenizer: Tokenizer | None, notifier: Notifier, kind: OutputKind
    ) -> None:
        self.request = request
        self.notifier = notifier
        self._embedding: npt.NDArray[np.float32] | None = None
        params = request.params
        self.kind = kind
        self._decode = tokenizer.decode_token if tokenizer is not None and params.detokenize else None
        self._prompt_ids: list[int] = request.prompt.tolist()
        end_of_prompt = self._prompt_ids[-CONTEXT:]
        self._special_stops: Mapping[Any, str] = {} if tokenizer is None else tokenizer.special_stops(params)

        def choice(index: int) -> Choice:
            text = tokenizer.detokenizer(params, end_of_prompt) if tokenizer is not None and params.detokenize else None
            return Choice(index, params, text, kind is not OutputKind.DELTA, self._decode)

        self._choices = [choice(i) for i in range(params.n)]
        self._only = self._choices[0] if params.n == 1 else None
        self._notified = False
        self.started = time.monotonic()
        self._metrics = RequestMetrics(time.time())
        self._first_at = self._last_at = 0.0  # monotonic times of tokens; 0 before the first
        self._prompt_logprobs: LazyLogprobs | None = None
        self._cached_tokens: int | None = None

    # --- IO thread -----------------------------------------------------------------------------------------------

    def deliver(
        self, index: int, tokens: Sequence[int], now: float, finish: FinishReason, extra: Extra, frames: Frames
    ) -> bool:
        """Take in one row of a step, which came at the monotonic time `now`.

        Returns:
            Whether the choice has ended: at the engine, by a stop string, or by a fault on this side.
        """
        choice = self._only or self._choices[index]
        if choice.finish is not None:
            return True
        if tokens:
            self._last_at = now
            self._first_at = self._first_at or now
        try:
            if finish or extra:
                self._feed(choice, tokens, finish, extra, frames)
            else:  # nearly every row
                choice.feed(tokens)
        except Exception as error:  # a fault in one request's text ends that request
            logger.exception("request %s: its output cannot be read", self.request.request_id)
            choice.end("error", error=RequestError(f"request {self.request.request_id}: {error!r:.300}"))
        return choice.finish is not None

    def end(self, finish: FinishName, error: WavecoreError | None = None) -> None:
        """End every choice that still runs."""
        for choice in self._choices:
            choice.end(finish, error)

    def needs_notice(self) -> bool:
        """Whether the consumer is to be told now; True once until it takes."""
        if self._notified or (self.kind is OutputKind.FINAL and not self.ended):
            return False
        self._notified = True
        return True

    # --- any thread ----------------------------------------------------------------------------------------------

    def is_running(self, index: int) -> bool:
        return self._choices[index].finish is None

    @property
    def emitted(self) -> list[int]:
        """Tokens of the first choice so far."""
        return list(self._choices[0].emitted)

    @property
    def has_tokens(self) -> bool:
        return any(choice.emitted for choice in self._choices)

    @property
    def seed(self) -> int | None:
        """The seed that the engine drew, once its first output came."""
        return self._choices[0].seed

    def take(self) -> RequestOutput | None:
        """The output since the last take, or all so far; None when there is nothing new."""
        self._notified = False  # first: what comes from here on is told again
        news = [c for c in self._choices if c.has_news]
        if not news:
            return None
        outputs = [choice.take() for choice in (news if self.kind is OutputKind.DELTA else self._choices)]
        if self._first_at:
            self._metrics.first_token_latency = self._first_at - self.started
            self._metrics.last_token_latency = self._last_at - self.started
        self._metrics.num_generation_tokens = sum([choice.taken for choice in self._choices])
        finished = not [choice for choice in self._choices if not choice.told]
        about_prompt = self._prompt_logprobs, self._cached_tokens, self._embedding
        request_id, text = self.request.request_id, self.request.text
        return RequestOutput(request_id, text, self._prompt_ids, outputs, finished, self._metrics, *about_prompt)

    def take_text(self) -> str | None:
        """`take` for nearly every delta of a stream, which has nothing but this text; None: call `take`."""
        self._notified = False
        return None if self._only is None else self._only.take_text()

    @property
    def ended(self) -> bool:
        """Whether all has arrived; `take` may not have given it yet."""
        return not [choice for choice in self._choices if choice.finish is None]

    def _feed(self, choice: Choice, tokens: Sequence[int], finish: FinishReason, extra: Extra, frames: Frames) -> None:
        if "seed" in extra:
            choice.seed = int(extra["seed"])
        if "cached_tokens" in extra:
            self._cached_tokens = int(extra["cached_tokens"])
        if "pooled" in extra:
            self._embedding = to_numpy(frames[extra["pooled"][0]]).astype(np.float32)
        if "prompt_logprobs" in extra:
            columns = [to_numpy(frames[i]) for i in extra["prompt_logprobs"]]
            self._prompt_logprobs = LazyLogprobs(columns, self._decode, first=1)
        logprobs = read_rows(frames, extra["logprobs"]) if "logprobs" in extra else []
        if finish == FinishReason.ERROR:
            choice.feed(tokens, logprobs)
            error = from_code(str(extra.get("code", "request")), str(extra.get("message", "")))
            choice.end("error", error=error)
        else:
            reason = extra.get("message" if finish == FinishReason.TIMEOUT else "stop_token")
            choice.feed(tokens, logprobs, finish, self._special_stops.get(reason, reason))


def notify(mailboxes: Sequence[Mailbox]) -> list[Mailbox]:
    """Tell the consumers that do not know yet, each notifier once. Returns the mailboxes that nobody can read now."""
    by_notifier: defaultdict[Notifier, list[Mailbox]] = defaultdict(list)
    for mailbox in mailboxes:
        ready = by_notifier[mailbox.notifier]  # also where all know: a loop may have been closed since
        if mailbox.needs_notice():
            ready.append(mailbox)
    gone = [notifier for notifier, ready in by_notifier.items() if not notifier.notify(ready)]
    return [mailbox for mailbox in mailboxes if mailbox.notifier in gone] if gone else []

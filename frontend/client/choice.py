"""One output sequence as it arrives: tokens to text, stop strings, logprobs.

Two threads use it without a lock: the IO thread feeds, the consumer takes. What is fed only grows at its end, and how
much of it the consumer may see is replaced as a whole (`_Arrived`) once a row is complete.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.outputs import CompletionOutput, FinishName, PositionLogprobs
from wavecore.frontend.text.detokenizer import Detokenizer
from wavecore.frontend.text.stop_strings import StopStrings
from wavecore.transport.errors import RequestError, WavecoreError
from wavecore.transport.wire.messages import FinishReason

logger = logging.getLogger(__name__)


class _Arrived(NamedTuple):
    """What the consumer may see.

    Attributes:
        tokens: how many of `emitted`; so many of log-probabilities, too.
        readable: how many of them, from the first, are to become text.
        pieces: how many pieces of text came from the stop strings.
    """

    tokens: int = 0
    readable: int = 0
    pieces: int = 0
    cumulative: float | None = None
    finish: FinishName | None = None
    stop_reason: int | str | None = None
    error: WavecoreError | None = None


class Choice:
    """Collects what arrives until `take`.

    Args:
        detokenizer: None gives no text.
        keep_all: `take` gives all so far instead of what is new.

    Attributes:
        emitted: all tokens so far.
        told: its end was taken.
    """

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizer | None, keep_all: bool) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._show_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._keep_all = keep_all
        # Written by the IO thread. The consumer takes from the left of the deques, and nothing beyond `_arrived`.
        self.emitted: list[int] = []
        self.seed: int | None = None
        self._num_pieces = 0
        self._pieces: deque[str] = deque()
        self._new_logprobs: deque[PositionLogprobs] | None = deque() if params.logprobs is not None else None
        self._cumulative: float | None = 0.0 if params.logprobs is not None else None
        self._arrived = _Arrived(cumulative=self._cumulative)
        # Written by the consumer.
        self._taken = self._read_so_far = self._pieces_taken = 0
        self._text: list[str] = []
        self._logprobs: list[PositionLogprobs] = []
        self._fault: WavecoreError | None = None
        self.told = False

    @property
    def finish(self) -> FinishName | None:
        """None while it runs; `take` may not have given it yet."""
        return self._arrived.finish

    # --- the consumer ------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        arrived = self._arrived
        return not self.told and (arrived.finish is not None or self._taken < arrived.tokens)

    def take(self) -> CompletionOutput:
        """What is new, or all so far."""
        arrived = self._arrived
        finish, error = arrived.finish, arrived.error
        try:
            self._render(arrived)
            if finish is not None and not self.told:
                self._flush()
        except Exception as fault:  # the text of one request must not end its neighbours
            logger.exception("the tokens of a request cannot be turned into text")
            self._detokenizer = None
            self._fault = RequestError(f"its tokens cannot be turned into text: {fault!r:.300}")
        if self._fault is not None:
            finish, error = "error", self._fault
        if self._new_logprobs is not None:
            count = min(arrived.tokens - self._taken, len(self._new_logprobs))
            self._logprobs += [self._new_logprobs.popleft() for _ in range(count)]
        output = CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=self.emitted[0 if self._keep_all else self._taken : arrived.tokens],
            cumulative_logprob=arrived.cumulative,
            logprobs=None if self._new_logprobs is None else list(self._logprobs),
            finish_reason=finish,
            stop_reason=arrived.stop_reason,
            seed=self.seed,
            error=error,
        )
        self._taken = arrived.tokens
        self.told = finish is not None
        if not self._keep_all:
            self._text.clear()
            self._logprobs.clear()
        return output

    def _render(self, arrived: _Arrived) -> None:
        """Without stop strings tokens become text only when somebody reads."""
        self._text += [self._pieces.popleft() for _ in range(arrived.pieces - self._pieces_taken)]
        self._pieces_taken = arrived.pieces
        if self._stops is None and self._detokenizer is not None and self._read_so_far < arrived.readable:
            self._text.append(self._detokenizer.feed(self.emitted[self._read_so_far : arrived.readable]))
            self._read_so_far = arrived.readable

    def _flush(self) -> None:
        """What was held back; nothing is fed any more."""
        if self._detokenizer is None or (self._stops is not None and self._stops.found is not None):
            return
        tail = self._detokenizer.flush()
        if self._stops is not None:
            tail = self._stops.feed(tail) + self._stops.flush()
        self._text.append(tail)

    # --- the IO thread -----------------------------------------------------------------------------------------------

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[PositionLogprobs] = (),
        finish: FinishReason = FinishReason.NONE,
        reason: int | str | None = None,
    ) -> None:
        """Take tokens in; a stop string in them finishes the choice and drops what comes after."""
        if self.finish is not None:
            return
        hidden = finish == FinishReason.STOP and not self._show_stop_token and len(tokens) > 0
        found = None
        if self._stops is None or self._detokenizer is None:
            self._accept(tokens, logprobs)
        else:
            for i, token in enumerate(tokens):
                self._accept((token,), logprobs[i : i + 1])
                if hidden and i == len(tokens) - 1:
                    break
                self._read((token,), self._detokenizer, self._stops)
                if (found := self._stops.found) is not None:
                    break
        ended = None if finish == FinishReason.NONE else cast(FinishName, finish.name.lower())
        if found is not None:
            ended, reason = "stop", found
        count = len(self.emitted)
        self._arrived = _Arrived(count, count - hidden, self._num_pieces, self._cumulative, ended, reason)

    def end(self, finish: FinishName, stop_reason: int | str | None = None, error: WavecoreError | None = None) -> None:
        """Finish; what was held back is shown by the last `take`."""
        if self.finish is None:
            count = len(self.emitted)
            self._arrived = self._arrived._replace(tokens=count, finish=finish, stop_reason=stop_reason, error=error)

    def _accept(self, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        self.emitted += tokens
        if self._new_logprobs is not None and self._cumulative is not None:
            self._new_logprobs += logprobs
            self._cumulative += sum(entry[token].logprob for token, entry in zip(tokens, logprobs, strict=False))

    def _read(self, tokens: Sequence[int], detokenizer: Detokenizer, stops: StopStrings) -> None:
        text = detokenizer.feed(tokens)
        # Text of the first min_tokens tokens is no place for a stop.
        self._pieces.append(stops.feed(text) if len(self.emitted) > self._min_tokens else text)
        self._num_pieces += 1

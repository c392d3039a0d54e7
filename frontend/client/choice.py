"""One output sequence as it arrives: tokens to text, stop strings, logprobs.

Two threads use it without a lock: the IO thread feeds, the consumer takes. What is fed only grows at its end, and how
much of it the consumer may see is replaced as a whole (`_Arrived`) once a row is complete.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS, SamplingParams
from wavecore.frontend.outputs import CompletionOutput, FinishName, SampleLogprobs
from wavecore.frontend.text.detokenizer import Detokenizer
from wavecore.frontend.text.logprobs import Decode, LazyLogprobs, Row, position_of
from wavecore.frontend.text.stop_strings import StopStrings
from wavecore.transport.errors import RequestError, WavecoreError
from wavecore.transport.wire.messages import FinishReason

logger = logging.getLogger(__name__)


class _Ending(NamedTuple):
    """How a choice ended."""

    finish: FinishName | None
    stop_reason: int | str | None = None
    error: WavecoreError | None = None


_RUNS = _Ending(None)

_Arrived = tuple[int, int, int, float | None, _Ending]
"""What the consumer may see: how many tokens of `emitted` (and of log-probabilities), how many of them, from the first,
are to become text, how many pieces of text came from the stop strings, the cumulative log-probability, the end."""


_GIVEN = "index", "_decode", "_detokenizer", "_is_plain", "_keep_all", "_lazy", "_min_tokens", "_show_stop_token"
_ARRIVING = "emitted", "finish", "seed", "_arrived", "_cumulative", "_new_logprobs", "_num_pieces", "_pieces", "_stops"
_TAKEN = "taken", "told", "_fault", "_pieces_taken", "_shown", "_text"


class Choice:
    """Collects what arrives until `take`.

    Args:
        detokenizer: None gives no text.
        keep_all: `take` gives all so far instead of what is new.
        decode: for the log-probabilities of tokens.

    Attributes:
        emitted: all tokens so far.
        finish: None while it runs; `take` may not have given it yet.
        told: its end was taken.
    """

    __slots__ = (*_GIVEN, *_ARRIVING, *_TAKEN)  # a delta of one stream of many waits for memory above all

    def __init__(
        self, index: int, params: SamplingParams, detokenizer: Detokenizer | None, keep_all: bool, decode: Decode
    ) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._show_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._keep_all = keep_all
        # Written by the IO thread. The consumer takes from the left of the deques, and nothing beyond `_arrived`.
        self.emitted: list[int] = []
        self.seed: int | None = None
        self.finish: FinishName | None = None
        self._is_plain = params.logprobs is None and self._stops is None
        self._num_pieces = 0
        self._pieces: deque[str] = deque()
        self._decode, self._lazy = decode, (params.logprobs or 0) > MAX_LOGPROBS
        self._new_logprobs: deque[Any] | None = deque() if params.logprobs is not None else None  # rows where lazy
        self._cumulative: float | None = 0.0 if params.logprobs is not None else None
        self._arrived: _Arrived = 0, 0, 0, self._cumulative, _RUNS
        # Written by the consumer.
        self.taken = self._pieces_taken = 0
        self._text = ""
        self._shown: list[Any] = []
        self._fault: WavecoreError | None = None
        self.told = False

    # --- the consumer ------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        arrived = self._arrived
        return not self.told and (self.taken < arrived[0] or arrived[-1] is not _RUNS)

    def take(self) -> CompletionOutput:
        """What is new, or all so far."""
        count, readable, pieces, cumulative, (finish, stop_reason, error) = self._arrived
        new = self.emitted[self.taken : count]
        try:
            self._text += self._render(new[: readable - self.taken], pieces)
            if finish is not None:
                self._flush()
        except Exception as fault:  # the text of one request must not end its neighbours
            logger.exception("the tokens of a request cannot be turned into text")
            self._detokenizer = None
            self._fault = RequestError(f"its tokens cannot be turned into text: {fault!r:.300}")
        found = None if self._stops is None else self._stops.found
        if self._fault is not None:
            finish, error = "error", self._fault
        elif found is not None and finish in ("length", "stop"):  # perhaps only with what was held back
            finish, stop_reason = "stop", found
        logprobs: SampleLogprobs | None = None
        if self._new_logprobs is not None:
            self._shown += [self._new_logprobs.popleft() for _ in range(min(len(new), len(self._new_logprobs)))]
            shown = self._shown.copy()
            logprobs = LazyLogprobs([*zip(*shown, strict=True)] or [()], self._decode) if self._lazy else shown
        ids, end = self.emitted[:count] if self._keep_all else new, (finish, stop_reason, self.seed, error)
        output = CompletionOutput(self.index, self._text, ids, cumulative, logprobs, *end)
        self.taken = count
        self.told = finish is not None
        if not self._keep_all:
            self._text = ""
            self._shown.clear()
        return output

    def take_text(self) -> str | None:
        """New text of a stream of text alone that goes on; None where `take` is needed."""
        count, _, pieces, _, ending = self._arrived
        if ending is not _RUNS or self._new_logprobs is not None or self._keep_all:
            return None
        new = self.emitted[self.taken : count]
        self.taken = count
        return self._render(new, pieces)

    def _render(self, tokens: list[int], pieces: int) -> str:
        """Without stop strings tokens become text only when somebody reads."""
        if self._stops is None:
            return self._detokenizer.feed(tokens) if self._detokenizer is not None and tokens else ""
        text = "".join([self._pieces.popleft() for _ in range(pieces - self._pieces_taken)])
        self._pieces_taken = pieces
        return text

    def _flush(self) -> None:
        """What was held back; nothing is fed any more."""
        if self._detokenizer is None or (self._stops is not None and self._stops.found is not None):
            return
        tail = self._detokenizer.flush()
        if self._stops is not None:
            tail = self._stops.feed(tail, may_end=len(self.emitted) > self._min_tokens) + self._stops.flush()
        self._text += tail

    # --- the IO thread -----------------------------------------------------------------------------------------------

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[Row] = (),
        finish: FinishReason = FinishReason.NONE,
        reason: int | str | None = None,
    ) -> None:
        """Take tokens in; a stop string in them finishes the choice and drops what comes after."""
        if self.finish is not None:
            return
        if self._is_plain and not finish:  # nearly every row
            self.emitted += tokens
            count = len(self.emitted)
            self._arrived = count, count, 0, None, _RUNS
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
        end = _RUNS
        if found is not None:
            end = _Ending("stop", found)
        elif finish:
            end = _Ending(cast(FinishName, finish.name.lower()), reason)
        count = len(self.emitted)
        self._arrived = count, count - hidden, self._num_pieces, self._cumulative, end
        self.finish = end.finish

    def end(self, finish: FinishName, error: WavecoreError | None = None) -> None:
        """Finish; what was held back is shown by the last `take`."""
        if self.finish is None:
            self._arrived = len(self.emitted), *self._arrived[1:-1], _Ending(finish, None, error)
            self.finish = finish

    def _accept(self, tokens: Sequence[int], logprobs: Sequence[Row]) -> None:
        self.emitted += tokens
        if self._new_logprobs is not None and self._cumulative is not None:
            self._new_logprobs += logprobs if self._lazy else [position_of(self._decode, *row) for row in logprobs]
            self._cumulative += sum(float(values[0]) for _, values, _ in logprobs)

    def _read(self, tokens: Sequence[int], detokenizer: Detokenizer, stops: StopStrings) -> None:
        text = detokenizer.feed(tokens)
        self._pieces.append(stops.feed(text, may_end=len(self.emitted) > self._min_tokens))
        self._num_pieces += 1

"""One output sequence as it arrives: tokens to text, stop strings, logprobs. Its mailbox holds the lock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.outputs import CompletionOutput, FinishName, PositionLogprobs
from wavecore.frontend.text.detokenizer import Detokenizer
from wavecore.frontend.text.stop_strings import StopStrings
from wavecore.transport.errors import RequestError, WavecoreError
from wavecore.transport.wire.messages import FinishReason

logger = logging.getLogger(__name__)


class Choice:
    """Collects what arrives until `take`.

    Args:
        detokenizer: None gives no text.
        keep_all: `take` gives all so far instead of what is new.

    Attributes:
        emitted: all tokens so far.
        finish: None while it runs.
    """

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizer | None, keep_all: bool) -> None:
        self.index = index
        self.emitted: list[int] = []
        self.finish: FinishName | None = None
        self.stop_reason: int | str | None = None
        self.error: WavecoreError | None = None
        self.seed: int | None = None
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._show_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._keep_all = keep_all
        self._taken = 0
        self._unread: list[int] = []  # not detokenised yet
        self._text: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = [] if params.logprobs is not None else None
        self._cumulative: float | None = 0.0 if params.logprobs is not None else None
        self._told = False

    @property
    def has_news(self) -> bool:
        return (not self._told and self.finish is not None) or self._taken < len(self.emitted)

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
        if self._stops is None or self._detokenizer is None:
            self._accept(tokens, logprobs)
            visible = tokens[:-1] if finish == FinishReason.STOP and not self._show_stop_token else tokens
            self._unread += visible
        else:
            for i, token in enumerate(tokens):
                self._accept((token,), logprobs[i : i + 1])
                is_stop_token = finish == FinishReason.STOP and i == len(tokens) - 1
                if is_stop_token and not self._show_stop_token:
                    break
                self._read((token,), self._detokenizer, self._stops)
                if self._stops.found is not None:
                    self.finish, self.stop_reason = "stop", self._stops.found
                    return
        if finish != FinishReason.NONE:
            self.end(cast(FinishName, finish.name.lower()), reason)

    def end(self, finish: FinishName, stop_reason: int | str | None = None, error: WavecoreError | None = None) -> None:
        """Finish; what was held back is shown by the last `take`."""
        if self.finish is None:
            self.finish, self.stop_reason, self.error = finish, stop_reason, error

    def take(self) -> CompletionOutput:
        """What is new, or all so far; called by the consumer."""
        try:
            self._render()
            if self.finish is not None and not self._told:
                self._flush()
        except Exception as error:  # the text of one request must not end its neighbours
            logger.exception("the tokens of a request cannot be turned into text")
            self._detokenizer = None
            self.finish, self.error = "error", RequestError(f"its tokens cannot be turned into text: {error!r:.300}")
        output = CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=self.emitted[0 if self._keep_all else self._taken :],
            cumulative_logprob=self._cumulative,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish,
            stop_reason=self.stop_reason,
            seed=self.seed,
            error=self.error,
        )
        self._taken = len(self.emitted)
        self._told = self.finish is not None
        if not self._keep_all:
            self._text.clear()
            if self._logprobs is not None:
                self._logprobs.clear()
        return output

    def _accept(self, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        self.emitted += tokens
        if self._logprobs is not None and self._cumulative is not None:
            self._logprobs += logprobs
            self._cumulative += sum(entry[token].logprob for token, entry in zip(tokens, logprobs, strict=False))

    def _read(self, tokens: Sequence[int], detokenizer: Detokenizer, stops: StopStrings) -> None:
        text = detokenizer.feed(tokens)
        # Text of the first min_tokens tokens is no place for a stop.
        self._text.append(stops.feed(text) if len(self.emitted) > self._min_tokens else text)

    def _render(self) -> None:
        """Text of tokens that wait for a reader: without stop strings they become text only when somebody reads."""
        if self._unread and self._detokenizer is not None:
            self._text.append(self._detokenizer.feed(self._unread))
        self._unread.clear()

    def _flush(self) -> None:
        if self._detokenizer is None or (self._stops is not None and self._stops.found is not None):
            return
        tail = self._detokenizer.flush()
        if self._stops is not None:
            tail = self._stops.feed(tail) + self._stops.flush()
        self._text.append(tail)

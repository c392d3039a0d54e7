"""Outputs as JSON: chunks of a stream, and whole answers. What one kind of answer looks like is a `Shape`.

Nearly every chunk is a text between two constants, so these are made once a choice and joined.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from wavecore.frontend.serve.api.schema import StreamOptions
from wavecore.frontend.serve.http.stream import escaped

LEAST_LOGPROB = -9999.0  # JSON has no infinity; as OpenAI writes it
_NO_USAGE = StreamOptions()
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of answer.

    Attributes:
        whole, chunk: its "object", of an answer and of a chunk.
        first: of the chunk that opens a choice, without braces; empty for none.
        text: what a text becomes in a chunk: bytes before and after it in JSON.
        empty: of a chunk without text.
        choice: of a whole answer: what a choice is, beside its index and its end.
        logprobs: of rows, one a token, with so many alternatives. A prompt's first token has none, and only a text.
    """

    whole: str
    chunk: str
    choice: Callable[[CompletionOutput, str], dict[str, Any]]
    logprobs: Callable[[Sequence[PositionLogprobs | str], int], Any]
    first: bytes = b""
    text: tuple[bytes, bytes] = (b'"text":', b"")
    empty: bytes = b'"text":""'


@dataclass(slots=True)
class Events:
    """The form of one request's answer, whole or as a `StreamForm`.

    Args:
        params: of each prompt.
        token_ids: show them, too.
        echoes: of each prompt its text, to go ahead of its choices, and that of its first token; empty for none.
    """

    shape: Shape
    id: str
    model: str
    params: SamplingParams
    stream_options: StreamOptions | None
    token_ids: bool | None
    echoes: Sequence[tuple[str, str]] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    _prompts: dict[int, RequestOutput] = field(default_factory=dict)

    @property
    def _usage_options(self) -> StreamOptions:
        return self.stream_options or _NO_USAGE

    # --- streams -----------------------------------------------------------------------------------------------------

    def around(self, place: int) -> tuple[bytes, bytes] | None:
        found = self._around.get(place) if self.params.n == 1 else None
        return found if found and found[0] else None

    def chunks(self, place: int, output: RequestOutput) -> bytes:
        parts: list[bytes] = []
        for choice in output.outputs:
            index = place * self.params.n + choice.index
            around, echo = self._around.get(index), None
            if around is None:
                echo = self.echoes[place] if self.echoes else None
                around = self._open(index, place, output, parts)
            if around[0] and choice.finish_reason is None and echo is None:
                if choice.text:
                    parts += (around[0], escaped(choice.text), around[1])
            else:
                self._full(index, output, choice, echo, parts)
        return b"".join(parts)

    def last(self) -> bytes:
        if not self._usage_options.include_usage:
            return DONE
        return self._event([], self._usage(self._prompts.values())) + DONE

    def _open(self, index: int, place: int, output: RequestOutput, parts: list[bytes]) -> tuple[bytes, bytes]:
        """What is sent ahead of a choice; returns what stands around its texts, nothing where chunks hold more."""
        self._prompts.setdefault(place, output)
        if self.shape.first:
            parts.append(self._chunk(index, self.shape.first))
        around = b"", b""
        if self.params.logprobs is None and not (self.token_ids or self._usage_options.continuous_usage_stats):
            before, after = self.shape.text
            head, _, tail = self._chunk(index, before + b'"\0"' + after).partition(b'"\0"')
            around = head, tail
        self._around[index] = around
        return around

    def _full(
        self,
        index: int,
        output: RequestOutput,
        choice: CompletionOutput,
        echo: tuple[str, str] | None,
        parts: list[bytes],
    ) -> None:
        """A choice's last chunks, or one with more than text."""
        text = choice.text if echo is None else echo[0] + choice.text
        more = {"token_ids": choice.token_ids} if self.token_ids else {}
        logprobs = self._logprobs(output, choice, echo)
        if text or (choice.token_ids and (self.token_ids or logprobs)):
            before, after = self.shape.text
            parts.append(self._chunk(index, before + escaped(text) + after, logprobs, more))
        if choice.finish_reason is not None:
            end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            parts.append(self._chunk(index, self.shape.empty, None, end))

    def _chunk(self, index: int, content: bytes, logprobs: Any = None, more: Mapping[str, Any] | None = None) -> bytes:
        fields = {"logprobs": logprobs, "finish_reason": None, **(more or {})}
        choice = b'{"index":%d,%b,%b' % (index, content, escaped(fields)[1:])
        usage = None
        if self._usage_options.continuous_usage_stats:
            usage = self._usage(self._prompts.values())
        return self._event([msgspec.Raw(choice)], usage)

    def _event(self, choices: list[msgspec.Raw], usage: Any) -> bytes:
        chunk = {"id": self.id, "object": self.shape.chunk, "created": self.created, "model": self.model}
        chunk["choices"] = choices
        if self._usage_options.include_usage or usage is not None:
            chunk["usage"] = usage
        return b"data: " + escaped(chunk) + b"\n\n"

    # --- whole answers -----------------------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = []
        for place, output in enumerate(outputs):
            for choice in output.outputs:
                echo = self.echoes[place] if self.echoes else None
                found = self.shape.choice(choice, echo[0] if echo else "")
                index = place * self.params.n + choice.index
                found |= {"index": index, "logprobs": self._logprobs(output, choice, echo)}
                found |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
                if self.token_ids:
                    found |= {"token_ids": choice.token_ids, "prompt_token_ids": output.prompt_token_ids}
                if output.prompt_logprobs is not None and echo is None:
                    found["prompt_logprobs"] = list(output.prompt_logprobs)
                choices.append(found)
        answer = {"id": self.id, "object": self.shape.whole, "created": self.created, "model": self.model}
        return escaped(answer | {"choices": choices, "usage": self._usage(outputs)})

    def _logprobs(self, output: RequestOutput, choice: CompletionOutput, echo: tuple[str, str] | None) -> Any:
        if self.params.logprobs is None:
            return None
        rows: list[PositionLogprobs | str] = list(choice.logprobs or ())
        if echo is not None:
            rows = [row or echo[1] for row in output.prompt_logprobs or ()] + rows
        return self.shape.logprobs(rows, self.params.logprobs)

    def _usage(self, prompts: Collection[RequestOutput]) -> dict[str, Any]:
        count = sum(len(output.prompt_token_ids) for output in prompts)
        completion = sum(output.metrics.num_generation_tokens for output in prompts)
        cached = sum(output.num_cached_tokens or 0 for output in prompts)
        return {
            "prompt_tokens": count,
            "completion_tokens": completion,
            "total_tokens": count + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def top_of(row: PositionLogprobs, count: int) -> list[tuple[int, str, float]]:
    """The chosen token, and behind it the `count` most likely, of -1 all: id, text and log-probability."""
    entries = [(token, entry.decoded_token or "", max(entry.logprob, LEAST_LOGPROB)) for token, entry in row.items()]
    most = count if count >= 0 else len(row)
    ranks = {token: entry.rank or most + 1 for token, entry in row.items()}
    best = sorted((entry for entry in entries if ranks[entry[0]] <= most), key=lambda entry: ranks[entry[0]])
    return [entries[0], *best]

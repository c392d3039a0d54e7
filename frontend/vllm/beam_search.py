"""Beam search: one greedy token a beam and step, with log-probabilities; the prefix cache holds what beams share.

The rules are those of transformers' `generate(num_beams=...)` with its defaults, which vLLM follows, too.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from tqdm import tqdm

from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS, SamplingParams
from wavecore.frontend.client.offline import run_batch
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.client.service import Service
from wavecore.frontend.outputs import FinishName, PositionLogprobs, RequestOutput
from wavecore.frontend.prompts import Prompt, TokensPrompt, token_ids
from wavecore.frontend.vllm.arguments import our_arguments
from wavecore.frontend.vllm.params import BeamSearchParams
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import MAX_TOKEN_ID, OF_REQUEST


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: the prompt's ids and the beam's.
        logprobs: for each token of the beam, what was likely there.
        cum_logprob: of the beam's tokens together.
        text: of all tokens; None without a tokenizer.
        finish_reason: "stop" where an end-of-sequence token ended it, else "length".
    """

    orig_prompt: TokensPrompt
    tokens: list[int]
    logprobs: list[PositionLogprobs]
    lora_request: None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishName | None = None
    stop_reason: None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search(
    service: Service,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    use_tqdm: bool = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """Search for each prompt, for so many of them together.

    Raises:
        ValidationError: a value out of bounds; a prompt of embeddings.
        WavecoreError: a request failed.
    """
    our_arguments(vars(params))
    searches = [_Search(service, service.encode(prompt), params) for prompt in prompts]
    at_once = max(1, len(searches)) if concurrency_limit is None else concurrency_limit
    for begin in range(0, len(searches), OF_REQUEST.whole("concurrency_limit", at_once, 1, MAX_TOKEN_ID)):
        part = searches[begin : begin + at_once]
        with tqdm(total=params.max_tokens, desc="Beam search", unit="token", disable=not use_tqdm) as bar:
            while steps := [request for search in part for request in search.requests(service)]:
                outputs = iter(run_batch(service, steps, use_tqdm=False, raise_on_error=True))
                for search in part:
                    search.extend([next(outputs) for _ in search.running])
                bar.update()
    return [BeamSearchOutput(search.best()) for search in searches]


class _Search:
    """The beams of one prompt."""

    def __init__(self, service: Service, prompt: Prompt, params: BeamSearchParams) -> None:
        if prompt.ids is None:
            raise ValidationError("prompt", "must be text or token ids for a beam search")
        self._eos = () if params.ignore_eos else service.resolved["eos_token_ids"]
        each = max(2, 1 + len(self._eos))
        self._width = OF_REQUEST.whole("beam_width", params.beam_width, 1, MAX_LOGPROBS // each)
        self._keep = each * self._width  # beams to look at: enough go on, even if the likeliest tokens of each end it
        most = OF_REQUEST.whole("max_tokens", params.max_tokens, 1, MAX_TOKEN_ID)
        self._longest = min(len(prompt.ids) + most, service.max_model_len)
        self._prompt, self._params, self._tokenizer = prompt, params, service.tokenizer
        self._step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=self._keep, detokenize=False)
        begun = TokensPrompt(prompt_token_ids=prompt.ids.tolist())
        self.running = [BeamSearchSequence(begun, prompt.ids.tolist(), [])]
        self._finished: list[tuple[float, BeamSearchSequence]] = []  # with their scores, the best first

    def requests(self, service: Service) -> list[EngineRequest]:
        """One more token for every beam."""
        prompts = [replace(self._prompt, ids=token_ids(beam.tokens), text=None) for beam in self.running]
        return [service.prepare(prompt, self._step) for prompt in prompts]

    def extend(self, outputs: list[RequestOutput]) -> None:
        """Take in the next token's log-probabilities of each running beam."""
        likely: list[tuple[float, int, int]] = []  # log-probability together, beam, token
        positions: list[PositionLogprobs] = []
        for i, (beam, output) in enumerate(zip(self.running, outputs, strict=True)):
            positions += output.outputs[0].logprobs or []
            likely += [(beam.cum_logprob + entry.logprob, i, token) for token, entry in positions[i].items()]
        beams, self.running = self.running, []
        for rank, (total, i, token) in enumerate(heapq.nlargest(self._keep, likely, key=itemgetter(0))):
            beam = BeamSearchSequence(
                beams[i].orig_prompt, [*beams[i].tokens, token], [*beams[i].logprobs, positions[i]], cum_logprob=total
            )
            beam.finish_reason = "stop" if token in self._eos else "length"
            if token in self._eos or len(beam.tokens) == self._longest:
                if rank < self._width:
                    self._finished.append((self._score(beam), beam))
            elif len(self.running) < self._width:
                self.running.append(beam)
        self._finished = sorted(self._finished, key=itemgetter(0), reverse=True)[: self._width]
        full = len(self._finished) == self._width
        if full and self.running and self._score(self.running[0]) <= self._finished[-1][0]:
            self.running = []  # what can still come is taken to be no better

    def best(self) -> list[BeamSearchSequence]:
        beams = [beam for _, beam in self._finished]
        for beam in beams:
            if self._tokenizer is not None:
                beam.text = self._tokenizer.decode(beam.tokens, self._params.skip_special_tokens)
        return beams

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.logprobs)
        return beam.cum_logprob / float(length**self._params.length_penalty)

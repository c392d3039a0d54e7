"""An engine to talk to, own or attached: its client, its tokenizer, and what makes requests of prompts."""

from __future__ import annotations

import _thread
import asyncio
import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from wavecore.engine_core.api.children import groups_of
from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import Stages, places
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.mailbox import Mailbox, Notifier, OutputKind
from wavecore.frontend.client.request import EngineRequest, embeds_frame
from wavecore.frontend.prompts import Prompt, token_ids
from wavecore.frontend.text.messages import ChatOptions
from wavecore.frontend.text.tokenizer import LONG_TEXT, Tokenizer
from wavecore.frontend.text.tokenizer_files import generation_defaults, load_tokenizer
from wavecore.transport.errors import ModelError, NotSupportedError, RequestTimeout, ValidationError, WavecoreError
from wavecore.transport.processes import logs
from wavecore.transport.processes.places import Place
from wavecore.transport.processes.supervisor import Limits, Supervisor
from wavecore.transport.wire.checks import OF_REQUEST
from wavecore.transport.wire.codec import MAX_FRAME_BYTES

Progress = Callable[[int, str, float], None]
OnOutput = Callable[[str, str], None]
NO_OPTIONS = RequestOptions()
MAX_ID = 1024
TEXT_THREADS = 4


class Service:
    """An engine to talk to.

    Attributes:
        resolved: what the engine said at ready.
        tokenizer: None with skip_tokenizer_init.
        places: where its engines are found; others attach there with `connect`.
    """

    def __init__(
        self,
        places: Sequence[Place],
        supervisor: Supervisor | None,
        timeout: float,
        tokenizer: Path | None = None,
        stage: str = "",
    ) -> None:
        self.places = places
        self._supervisor = supervisor
        self._numbers = itertools.count()
        self._last_wire: tuple[SamplingParams | None, dict[str, Any]] = None, {}  # of `_wire`
        self._text_threads: ThreadPoolExecutor | None = None
        self.client = EngineClient(*places, timeout=timeout, stage=stage)
        try:
            self.resolved = self.client.resolved
            self.vocab_size = int(self.resolved["vocab_size"])
            self.max_model_len = int(self.resolved["max_model_len"])
            self.tokenizer = _tokenizer(self.resolved, tokenizer)
        except BaseException:
            self.client.close()
            raise

    @classmethod
    def start(cls, config: EngineConfig, progress: Progress | None, supervisor: Supervisor | None = None) -> Service:
        """Start an engine process and attach to it.

        Args:
            supervisor: of `make_supervisor`, for a caller that may want to stop it meanwhile.

        Raises:
            WavecoreError: whatever kept the engine from becoming ready. Nothing is left behind then.
        """
        check_tokenizer(config)
        supervisor = supervisor or make_supervisor(config)
        try:
            return cls([supervisor.start(progress)], supervisor, config.ready_timeout)
        except BaseException:
            supervisor.stop()
            raise

    def close(self) -> None:
        """Let go; stops the engine if it is our own. Idempotent, in any thread and in a signal handler."""
        self.client.close()
        if self._supervisor is not None:
            self._supervisor.stop()
        self._text_threads = None  # they end then; `shutdown` would take a lock, and a signal handler may be here
        if self.tokenizer is not None:
            self.tokenizer.close()
        atexit.unregister(self.close)

    def close_when_dropped(self, owner: object) -> Callable[[], object]:
        """Close when `owner` is collected, or at exit if that comes first.

        Returns:
            What takes that back, for an owner that closes by itself.
        """
        atexit.register(self.close)
        # The collector may run in any thread, also in our IO thread: it only hands over.
        dropped = weakref.finalize(owner, _thread.start_new_thread, self.close, ())
        dropped.atexit = False
        return dropped.detach

    # --- facts ---------------------------------------------------------------------------------------------------

    @cached_property
    def default_params(self) -> SamplingParams:
        """What the model's authors recommend, else the defaults.

        Raises:
            ModelError: generation_config.json recommends what cannot be.
        """
        path = str(self.resolved.get("model_path", ""))
        if not path or self.resolved.get("generation_config") == "vllm":
            return SamplingParams()
        try:
            return SamplingParams(**generation_defaults(path))
        except ValidationError as error:
            raise ModelError(f"{path}/generation_config.json: {error}; correct it, or give SamplingParams") from error

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer; NotSupportedError, with the way out, where there is none for `what`."""
        if self.tokenizer is None:
            way_out = 'give {"prompt_token_ids": [...]}, or tokenizer=FOLDER (--tokenizer FOLDER) at start'
            none = "there is none here (skip_tokenizer_init, or a scripted model)"
            raise NotSupportedError(f"{what} needs a tokenizer, and {none}: {way_out}")
        return self.tokenizer

    # --- requests ------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> Prompt:
        """The prompt with ids. The slow part of `prepare` for long texts; may run in any thread."""
        if prompt.text is None or prompt.ids is not None or prompt.embeds is not None:
            return prompt
        started = time.monotonic()
        tokenizer = self.need_tokenizer("a text prompt")
        tokenizer.check_length(prompt.text, self.max_model_len)
        ids = tokenizer.encode(prompt.text, parse_special=prompt.parse_special)
        return replace(prompt, ids=token_ids(ids) if ids else None, seconds=time.monotonic() - started)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
        resume: bool = False,
    ) -> EngineRequest:
        """A request ready to send.

        Args:
            params: None takes the model's recommended ones.

        Raises:
            ValidationError: a value out of bounds, before it costs anything.
        """
        self.client.check_open()
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValidationError("sampling_params", f"must be SamplingParams, not {type(params).__name__}")
        params = params.of_model(self.vocab_size)
        request_id = str(next(self._numbers)) if request_id is None else request_id
        OF_REQUEST.text("request_id", request_id, 1, MAX_ID)
        if (rank := options.data_parallel_rank) is not None:
            if rank >= (count := len(self.client.numbers)):
                raise ValidationError("data_parallel_rank", f"{rank}, but there are {count} engines, counted from 0")
            options = replace(options, data_parallel_rank=self.client.numbers[rank])
        queue = int(self.resolved["max_num_queued_reqs"])
        if params.n > queue:
            raise ValidationError("n", f"{params.n} choices never fit into the engine's queue of {queue}")
        if OF_REQUEST.flag("resume", resume) and params.n > 1:
            raise NotSupportedError("resume=True with n > 1; send the choices as requests of their own")
        if prompt.cache_salt is not None:
            options = replace(options, cache_salt=prompt.cache_salt)
        prompt = self.encode(prompt)
        embeds = None
        if prompt.embeds is not None:
            embeds = embeds_frame(prompt.embeds, int(self.resolved["hidden_size"]))
            if len(embeds.buffer) > MAX_FRAME_BYTES:
                raise ValidationError("prompt_embeds", f"{len(embeds.buffer)} bytes; at most {MAX_FRAME_BYTES} travel")
            ids = np.zeros(embeds.shape[0], np.int32)
        elif prompt.ids is None:
            raise ValidationError("prompt", "gives no tokens")
        else:
            ids = prompt.ids
            if ids.max() >= self.vocab_size:
                reason = f"token id {ids.max()} is outside the vocabulary of {self.vocab_size}"
                raise ValidationError("prompt_token_ids", reason)
        self._check_length(len(ids), params, options)
        wire, options = self._wire(params), options.after(prompt.seconds)
        return EngineRequest(request_id, prompt.text, ids, params, wire, options, prompt_embeds=embeds, resume=resume)

    def mailbox(self, request: EngineRequest, notifier: Notifier, kind: OutputKind) -> Mailbox:
        """What `client.submit` takes. To be made before the `try` that ends in `client.abort`, so that no interrupt
        between the two loses a request that was sent."""
        return Mailbox(request, self.tokenizer, notifier, kind)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> Prompt:
        """A conversation as a prompt."""
        self.client.check_open()
        started = time.monotonic()
        text, ids = self.need_tokenizer("chat").render_chat(messages, options, max_tokens=self.max_model_len)
        return Prompt(text, token_ids(ids), seconds=time.monotonic() - started)

    def start_text_threads(self) -> None:
        """Of `beside_loop`: not asyncio's own few, which are the program's."""
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, "text")
        all_are_there = threading.Barrier(TEXT_THREADS)
        for _ in range(TEXT_THREADS):  # now, rather than in the loop when a prompt waits
            self._text_threads.submit(all_are_there.wait)
        if self.tokenizer is not None:
            self._text_threads.submit(self.tokenizer.make_fast)

    async def encode_for_loop(self, prompts: Sequence[Prompt], options: RequestOptions) -> list[Prompt]:
        """The prompts with ids; long texts are encoded beside the loop, as by `beside_loop`."""
        if sum(len(prompt.text or "") for prompt in prompts) <= LONG_TEXT:
            return [self.encode(prompt) for prompt in prompts]
        return [await self.beside_loop(partial(self.encode, prompt), options) for prompt in prompts]

    async def beside_loop(self, make: Callable[[], Prompt], options: RequestOptions) -> Prompt:
        """What `make` gives, made in a thread; all the time that it took counts for the deadlines.

        Raises:
            RequestTimeout: a deadline of `options` has passed.
            EngineDead: this is closed.
        """
        self.client.check_open()
        assert self._text_threads is not None
        started = time.monotonic()
        deadline = min(options.deadlines.values(), default=None)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._text_threads, settled, make)
            prompt = await asyncio.wait_for(work, deadline)
        except TimeoutError:
            raise RequestTimeout(f"the deadline of {deadline:g} s passed while the prompt was made") from None
        return replace(prompt, seconds=time.monotonic() - started)

    def _check_length(self, length: int, params: SamplingParams, options: RequestOptions) -> None:
        most = self.max_model_len - (options.pooling is None and params.max_tokens != 0)  # a token is to follow it
        if length > most:
            room = f"max_model_len is {self.max_model_len}, which leaves room for {most}"
            raise ValidationError("prompt", f"has {length} tokens; {room}; shorten it, or start with a larger one")
        params.check_prompt(length)

    def _wire(self, params: SamplingParams) -> dict[str, Any]:
        """Parameters as the engine takes them: words as ids, and without what only the text side reads. The requests of
        a batch mostly share theirs, which never change, so the last ones are remembered."""
        given, wire = self._last_wire
        if params is given:
            return wire
        given = params
        if params.stop:
            if not params.detokenize:
                raise ValidationError("stop", "needs detokenize=True; use stop_token_ids without text")
            special = self.need_tokenizer("stop (a string)").special_stops(params)
            params = replace(params, stop_token_ids=(*(params.stop_token_ids or ()), *special))
        if params.bad_words:
            words = self.need_tokenizer("bad_words").bad_word_ids(params.bad_words)
            params = replace(params, bad_words=None, bad_words_token_ids=(*(params.bad_words_token_ids or ()), *words))
        params.check_model(self.vocab_size, self.resolved["eos_token_ids"], self.resolved["max_logprobs"])
        wire = params.to_wire()
        wire.pop("stop", None)
        self._last_wire = given, wire
        return wire


def settled(make: Callable[[], Prompt]) -> Prompt:
    """A prompt, or an error that is no other thing to those who wait for it: of a function that makes prompts, say, or
    an object in one."""
    try:
        return make()
    except (StopIteration, TimeoutError) as error:  # no future may carry the one; the other would be our deadline's
        raise WavecoreError(f"{error!r} while the prompt was made") from error


def check_tokenizer(config: EngineConfig) -> None:
    """A wrong path is told before the time to load a model is spent."""
    if config.tokenizer is not None and not config.skip_tokenizer_init:
        load_tokenizer(config.tokenizer)


def make_supervisor(
    config: EngineConfig, limits: Limits | None = None, on_output: OnOutput | None = None, stages: Stages | None = None
) -> Supervisor:
    """A supervisor of all engines of a deployment, not started yet. From here on this program logs at their level.

    Args:
        limits: None takes those of the settings.
        on_output: see `Supervisor`; for processes of this host.
        stages: of a pipeline, of which `config` has the deployment's settings; None: all engines are of `config`.

    Raises:
        ConfigError: too few GPUs for all engines; Ray is not installed.
    """
    logs.show(config.log_level)
    limits = limits or Limits(ready=config.ready_timeout, drain=config.shutdown_timeout, step=config.step_timeout)
    if config.data_parallel_backend == "ray":
        from wavecore.engine_core.ray_groups import make_ray_supervisor  # for those alone who have Ray

        return make_ray_supervisor(config, limits)
    first = config.engines_here.start
    models, numbers = stages or {"": (config, places(config))}, itertools.count(first)
    groups = [ranks for stage, (own, engines) in models.items() for ranks in groups_of(own, engines, stage, numbers)]
    return Supervisor(
        groups,
        runtime_dir=config.runtime_dir,
        address=config.address,
        keys=config.keys,
        limits=limits,
        on_output=on_output,
        first=first,
    )


def _tokenizer(resolved: Mapping[str, Any], own: Path | None) -> Tokenizer | None:
    path = own or resolved.get("tokenizer") or resolved.get("model_path")
    if resolved.get("skip_tokenizer_init") or not path:  # a scripted model has no files
        return None
    return load_tokenizer(path)

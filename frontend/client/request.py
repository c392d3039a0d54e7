"""A request ready for an engine: ids, checked parameters, options. Knows the wire's form, not text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.bounds import real, whole
from wavecore.engine_core.api.sampling_params import MAX_PRIORITY, MAX_SALT, MAX_SECONDS, SamplingParams
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.messages import Add, TensorFrame
from wavecore.transport.wire.tensors import from_numpy

I32 = npt.NDArray[np.int32]
MIN_SECONDS = 0.001
DEADLINES = frozenset({"timeout", "queue_timeout", "first_token_timeout"})


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What `EngineClient.submit` sends, and sends again where an engine died before its first token.

    Attributes:
        prompt: int32 [n]; zeros under prompt_embeds.
        params: as the user gave them, for the text side.
        wire: as the engine takes them.
        options: of `messages.Add`.
        resume: go on after the death of an engine by re-prefilling prompt and emitted tokens.
    """

    request_id: str
    text: str | None
    prompt: I32
    params: SamplingParams
    wire: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_embeds: TensorFrame | None = None
    resume: bool = False

    @property
    def timeout(self) -> float | None:
        value = self.options.get("timeout")
        return None if value is None else float(value)

    @property
    def has_deadline(self) -> bool:
        return not DEADLINES.isdisjoint(self.options)

    @property
    def cost(self) -> int:
        """Tokens that an engine may have to compute for it, for choosing the least loaded engine."""
        return len(self.prompt) + self.params.n * (self.params.max_tokens or 0)

    def message(self, handle: int, emitted: list[int], seed: int | None, elapsed: float) -> Add:
        """The message.

        Args:
            emitted: tokens of an earlier life, which go behind the prompt and are drawn on with the same `seed`.
            elapsed: seconds since it was sent first; deadlines go on.
        """
        prompt, options, wire = self.prompt, dict(self.options), dict(self.wire)
        for name in DEADLINES & options.keys():
            options[name] = max(MIN_SECONDS, options[name] - elapsed)
        if emitted:
            prompt = np.concatenate([prompt, np.array(emitted, np.int32)])
            options["emitted"] = len(emitted)
            wire.pop("prompt_logprobs", None)  # reported with the first token
            for name in ("queue_timeout", "first_token_timeout"):
                options.pop(name, None)
            if seed is not None:
                wire["seed"] = seed
        return Add(b"", b"", 0, handle, from_numpy(prompt), wire, options, self.prompt_embeds)


def check_options(
    *,
    priority: int = 0,
    timeout: float | None = None,
    queue_timeout: float | None = None,
    first_token_timeout: float | None = None,
    cache_salt: str | None = None,
    pooling: str | None = None,
) -> dict[str, Any]:
    """Bounded options of a request, without the defaults.

    Raises:
        ValidationError: naming the option.
    """
    options: dict[str, Any] = {}
    if priority != 0:
        options["priority"] = whole("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    deadlines = {"timeout": timeout, "queue_timeout": queue_timeout, "first_token_timeout": first_token_timeout}
    for name, value in deadlines.items():
        if value is not None:
            options[name] = real(name, value, MIN_SECONDS, MAX_SECONDS)
    if cache_salt is not None:
        if len(cache_salt.encode(errors="replace")) > MAX_SALT:
            raise ValidationError("cache_salt", f"must be at most {MAX_SALT} bytes of text")
        options["cache_salt"] = cache_salt
    if pooling is not None:
        if pooling not in ("mean", "last"):
            raise ValidationError("pooling", f'must be "mean" or "last", not {pooling!r:.40}')
        options["pooling"] = pooling
    return options


def embeds_frame(embeds: Any, hidden_size: int) -> TensorFrame:
    """prompt_embeds as a dense frame.

    Args:
        embeds: numpy array or torch tensor, float32, float16 or bfloat16, [n, hidden_size].

    Raises:
        ValidationError: another shape or type, or values that are not finite.
    """
    bits16 = False
    if hasattr(embeds, "detach"):  # a torch tensor; nothing of torch is imported for it
        if getattr(embeds, "is_sparse", False):
            raise ValidationError("prompt_embeds", "must be dense")
        embeds = embeds.detach().cpu().contiguous()
        bits16 = str(embeds.dtype) == "torch.bfloat16"
        embeds = (embeds.float() if bits16 else embeds).numpy()
    array = np.asarray(embeds)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if (
        array.dtype not in (np.float32, np.float16)
        or array.ndim != 2
        or array.shape[1] != hidden_size
        or not len(array)
    ):
        raise ValidationError(
            "prompt_embeds", f"must be floats of shape [n, {hidden_size}], not {array.dtype} {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        raise ValidationError("prompt_embeds", "holds values that are not finite")
    array = array.astype(np.float32)
    if bits16:  # every value is a bfloat16 already: its upper half is exact
        return from_numpy((array.view(np.uint32) >> 16).astype(np.uint16), dtype="bfloat16")
    return from_numpy(array)

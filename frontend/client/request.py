"""A request ready for an engine: ids, sampling parameters and options, all checked, and the message they travel in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.messages import Add, TensorFrame
from wavecore.transport.wire.tensors import from_numpy

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What `EngineClient.submit` sends, and sends again where an engine died before its first token.

    Attributes:
        prompt: int32 [n]; zeros under prompt_embeds.
        params: as the user gave them, for the text side.
        wire: as the engine takes them.
        resume: go on after the death of an engine by re-prefilling prompt and emitted tokens.
    """

    request_id: str
    text: str | None
    prompt: I32
    params: SamplingParams
    wire: Mapping[str, Any]
    options: RequestOptions = field(default_factory=RequestOptions)
    prompt_embeds: TensorFrame | None = None
    resume: bool = False

    @property
    def size(self) -> int:
        """What it counts for in the load of its engine, in tokens: those of its prompt and of its output."""
        return len(self.prompt) + self.params.n * self.params.counted_output

    def message(self, handle: int, emitted: list[int], seed: int | None, elapsed: float) -> Add:
        """The message.

        Args:
            emitted: tokens of an earlier life, which go behind the prompt and are drawn on with the same `seed`.
            elapsed: seconds since it was sent first; deadlines go on.
        """
        prompt, options, wire = self.prompt, self.options.after(elapsed), dict(self.wire)
        if emitted:
            prompt = np.concatenate([prompt, np.array(emitted, np.int32)])
            options = replace(options, emitted=len(emitted), queue_timeout=None, first_token_timeout=None)
            wire.pop("prompt_logprobs", None)  # reported with the first token
            if seed is not None:
                wire["seed"] = seed
        return Add(b"", b"", 0, handle, from_numpy(prompt), wire, options.to_wire(), self.prompt_embeds)


def embeds_frame(embeds: Any, hidden_size: int) -> TensorFrame:
    """prompt_embeds as a dense frame.

    Args:
        embeds: numpy array or torch tensor of floats, [n, hidden_size]; those of 64 bits are rounded to 32.

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
    try:
        array = np.asarray(embeds)
    except ValueError as error:  # lists of different lengths
        raise ValidationError("prompt_embeds", f"must be an array: {error}") from error
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.dtype not in (np.float64, np.float32, np.float16):
        raise ValidationError("prompt_embeds", f"must be floats, not {array.dtype}; convert them to float32")
    if array.ndim != 2 or array.shape[1] != hidden_size or not len(array):
        raise ValidationError("prompt_embeds", f"must have the shape [n, {hidden_size}], not {list(array.shape)}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValidationError("prompt_embeds", "holds values that are not finite as float32")
    if bits16:  # every value is a bfloat16 already: its upper half is exact
        return from_numpy((array.view(np.uint32) >> 16).astype(np.uint16), dtype="bfloat16")
    return from_numpy(array)

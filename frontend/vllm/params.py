"""vLLM's parameter classes: plain objects that may be changed after they were made, checked when made and when used."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from wavecore.engine_core.api import sampling_params as core
from wavecore.engine_core.api.fields import defaults
from wavecore.frontend.client.mailbox import OutputKind
from wavecore.frontend.compat import FOREIGN_POOLING, FOREIGN_SAMPLING, STRUCTURED_OUTPUTS, check_foreign
from wavecore.transport.errors import ValidationError


class RequestOutputKind(Enum):
    """What a stream yields: all so far, what is new, or all once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


OUTPUT_KINDS = dict(zip(RequestOutputKind, (OutputKind.CUMULATIVE, OutputKind.DELTA, OutputKind.FINAL), strict=True))
SamplingType = IntEnum("SamplingType", ["GREEDY", "RANDOM", "RANDOM_SEED"], start=0)


class Fields:
    """A dataclass whose fields and their defaults stand in a table; all but the first are given by keyword.

    Args:
        defaults: of the subclass; without it the fields are those of its base.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    if TYPE_CHECKING:

        def __init__(self, *first: Any, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, defaults: Mapping[str, Any] | None = None) -> None:
        super().__init_subclass__()
        if defaults is None:
            return
        cls.defaults, cls.__annotations__ = defaults, dict.fromkeys(defaults, Any)
        for place, (name, default) in enumerate(defaults.items()):
            by_copy = isinstance(default, list | dict)
            value = {"default_factory": partial(copy.copy, default)} if by_copy else {"default": default}
            setattr(cls, name, field(kw_only=place > 0, **value))
        dataclass(cls)


SAMPLING_DEFAULTS = {
    **{name: default for name, default in defaults(core.SamplingParams).items() if name != "bad_words_token_ids"},
    **{"best_of": None, "output_kind": RequestOutputKind.CUMULATIVE},
    **{name: rule["default"] for name, rule in FOREIGN_SAMPLING.items()},
}


class SamplingParams(Fields, defaults=SAMPLING_DEFAULTS):
    """The fields of `wavecore.SamplingParams`; `output_kind`, for `AsyncLLM`; and those that vLLM alone has.

    Raises:
        ValidationError: a value out of bounds.
        NotSupportedError: a value that asks for what is not here; with the way out.
    """

    def __post_init__(self) -> None:
        checked = self.checked()
        self.stop, self.stop_token_ids, self.bad_words = (
            list(given or ()) for given in (checked.stop, checked.stop_token_ids, checked.bad_words)
        )

    def checked(self) -> core.SamplingParams:
        """The same as the engine's own, checked now."""
        for name in FOREIGN_SAMPLING:
            check_foreign(FOREIGN_SAMPLING, name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValidationError("output_kind", f"must be a RequestOutputKind, not {self.output_kind!r:.60}")
        own = vars(self).keys() - FOREIGN_SAMPLING.keys() - {"output_kind"}
        return core.SamplingParams(**{name: getattr(self, name) for name in own})

    @classmethod
    def of(cls, params: core.SamplingParams) -> Self:
        return cls(**params.to_wire())

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """From values of which None stands for the default."""
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        return copy.deepcopy(self)

    @property
    def sampling_type(self) -> SamplingType:
        return SamplingType(0 if self.temperature == 0 else 1 if self.seed is None else 2)


def checked(params: Any) -> Any:
    """What `LLM.generate` takes as sampling parameters, as our own `LLM` takes it."""
    if isinstance(params, SamplingParams):
        return params.checked()
    return [checked(one) for one in params] if isinstance(params, Sequence) else params


class PoolingParams(Fields, defaults={name: rule["default"] for name, rule in FOREIGN_POOLING.items()}):
    """Of `LLM.embed`.

    Raises:
        NotSupportedError: a value that asks for more than an embedding; with the way out.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        for name in FOREIGN_POOLING:
            check_foreign(FOREIGN_POOLING, name, getattr(self, name))


class StructuredOutputsParams(Fields, defaults=STRUCTURED_OUTPUTS):
    """Can be made, since programs do so whether they use one or not; `SamplingParams` refuses it."""


@dataclass
class BeamSearchParams:
    """Of `LLM.beam_search`.

    Attributes:
        length_penalty: a beam's score is its log-probability divided by its length to this power.
        temperature: changes nothing, since beams are not drawn.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True
    watermarking: None = None
    allowed_token_ids: None = None


@dataclass
class LoRARequest:
    """Can be made, since programs do so whether they use one or not; `LLM.generate` refuses it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


UsageContext = Enum("UsageContext", ["UNKNOWN_CONTEXT", "LLM_CLASS", "API_SERVER", "ENGINE_CONTEXT"])

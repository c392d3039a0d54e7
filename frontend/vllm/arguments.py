"""Arguments of vLLM's calls: shown to `inspect` under its names, checked, and made those of our own calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

from wavecore.frontend.client.service import Service
from wavecore.frontend.compat import FOREIGN_ARGUMENTS, SIGNATURES, check_foreign
from wavecore.frontend.prompts import Prompt, as_prompt, as_prompts, token_ids
from wavecore.frontend.vllm.params import PoolingParams

Method = TypeVar("Method", bound=Callable[..., Any])


def as_in_vllm(method: Method) -> Method:
    """The method with the parameters that vLLM's has, by position and for `inspect.signature`, and with our own.

    Those that only vLLM has and that it does not name are checked, as by `our_arguments`, and do not reach it.
    """
    shown, taken = _signature(SIGNATURES[method.__qualname__]), signature(method).parameters

    @wraps(method)
    def call(self: Any, /, *args: Any, **given: Any) -> Any:
        arguments = shown.bind(self, *args, **given).arguments
        arguments |= arguments.pop("more", {})
        own = {name: arguments.pop(name) for name in taken if name in arguments}
        return method(own.pop("self"), **own, **our_arguments(arguments))

    call.__signature__ = shown  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _signature(parameters: Sequence[str]) -> Signature:
    """Of a method. Each parameter is its name, and behind "=" its default as JSON; by keyword alone behind a "*"."""
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD
    found = [Parameter("self", kind)]
    for parameter in parameters:
        name, _, default = parameter.partition("=")
        if name == "*":
            kind = Parameter.KEYWORD_ONLY
        else:
            found.append(Parameter(name, kind, default=json.loads(default) if default else Parameter.empty))
    return Signature([*found, Parameter("more", Parameter.VAR_KEYWORD)])


def our_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call without those that only vLLM has.

    Raises:
        NotSupportedError: one of these asks for something; with the way out.
    """
    for name in given.keys() & FOREIGN_ARGUMENTS.keys():
        value = given[name]  # a list holds one a prompt
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, PoolingParams):
                one.check()
            else:
                check_foreign(FOREIGN_ARGUMENTS, name, one)
    return {name: value for name, value in given.items() if name not in FOREIGN_ARGUMENTS}


def encoded(service: Service, prompts: Any, tokenization_kwargs: Mapping[str, Any] | None) -> Any:
    """Prompts as they are, or as token ids where an argument says how to make them.

    Raises:
        NotSupportedError: an argument besides add_special_tokens.
    """
    wanted = dict(tokenization_kwargs or {})
    with_special = wanted.pop("add_special_tokens", True)
    check_foreign(FOREIGN_ARGUMENTS, "tokenization_kwargs", wanted)
    if with_special:
        return prompts
    encode = service.need_tokenizer("tokenization_kwargs").encode
    found = [(prompt, prompt.text if prompt.ids is None else None) for prompt in as_prompts(prompts)]
    return [p if text is None else replace(p, ids=token_ids(encode(text, False))) for p, text in found]


def one_prompt(service: Service, prompt: Any, prompt_text: str | None, tokenization_kwargs: Any) -> Prompt:
    """The prompt of a call for one request.

    Args:
        prompt_text: shown in outputs where the prompt is token ids.
        tokenization_kwargs: as of `encoded`.
    """
    found = as_prompt(*encoded(service, [prompt], tokenization_kwargs))
    return found if prompt_text is None or found.ids is None else replace(found, text=prompt_text)

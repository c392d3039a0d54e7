"""`wavecore generate PROMPT`: one answer, streamed."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from wavecore.engine_core.api.fields import defaults
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.cli.parser import CommandParser, settings
from wavecore.frontend.llm import LLM, connect
from wavecore.frontend.prompts import PromptType, TokensPrompt
from wavecore.transport.errors import ValidationError


def run(args: Sequence[str]) -> int:
    options = ("generate", "attach", "sampling")
    values = CommandParser("wavecore generate", "PROMPT", "Answers one prompt.", ["prompt"], options).parse(args)
    text = sys.stdin.read() if values.prompt == "-" else values.prompt
    if not text:
        raise ValidationError("prompt", 'is empty; try: wavecore generate "What is the capital of France?"')
    params = sampling(values)  # a bad value is told before an engine is started
    with open_llm(values) as llm:
        chat = not values.raw and llm.get_tokenizer().chat_template is not None
        prompt = chat_prompt(llm, [*system_message(values), {"role": "user", "content": text}]) if chat else text
        stream_answer(llm, prompt, params)
    return 0


def open_llm(values: Namespace) -> LLM:
    """The running engine that `--attach` names, or one of our own."""
    if values.attach:
        return connect(values.attach, tokenizer=values.tokenizer)
    return LLM.from_config(settings(values))


def sampling(values: Namespace) -> SamplingParams:
    """Of the options "sampling"; one has its parameter's name, but `seed` is a setting of the engine."""
    given = {name: value for name, value in vars(values).items() if name in defaults(SamplingParams)}
    return SamplingParams(**{**given, "seed": values.sampling_seed})


def system_message(values: Namespace) -> list[dict[str, Any]]:
    return [{"role": "system", "content": values.system}] if values.system else []


def chat_prompt(llm: LLM, messages: list[dict[str, Any]]) -> TokensPrompt:
    return {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)}


def stream_answer(llm: LLM, prompt: PromptType, params: SamplingParams) -> str:
    """Print an answer as it comes, then how fast it came. Returns its text."""
    text = ""
    for output in llm.stream(prompt, params):
        choice = output.outputs[0]
        text += choice.text
        print(choice.text, end="", flush=True)
    print(flush=True)
    metrics = output.metrics
    rate = 1 / metrics.time_per_token if metrics.time_per_token else 0.0
    times = f"time to first token {metrics.first_token_latency or 0.0:.3f} s, then {rate:.1f} tokens/s"
    count = f"{metrics.num_generation_tokens} tokens, finish reason {choice.finish_reason}"
    print(f"{times} ({count})", file=sys.stderr)
    return text

"""What vLLM's own tests check of generation, in our words: stops, log-probabilities, text, aborts, cache, lengths.

All on one small random Llama. Greedy continuations of PROMPT are long enough, and their first tokens differ.
"""

from __future__ import annotations

import copy
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavecore import NotSupportedError, ValidationError
from wavecore.vllm import LLM, PoolingParams, RequestOutput, SamplingParams, TokensPrompt
from wavecore.vllm.config import VllmConfig
from wavecore.vllm.sampling_params import BeamSearchParams, RequestOutputKind

FIELDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("vllm_names.json").read_text())["outputs"]
PROMPT = [5, 6, 7, 8]
EOS = 7
LENGTH = 12


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **values})


def one(llm: LLM, prompt: Any = PROMPT, **values: Any) -> RequestOutput:
    [output] = llm.generate(prompt, greedy(**values), use_tqdm=False)
    return output


@pytest.fixture(scope="module")
def tokens(llm: LLM) -> list[int]:
    return list(one(llm).outputs[0].token_ids)


@pytest.fixture(scope="module")
def words(llm: LLM) -> list[int]:
    """Tokens that are plain letters, so that every one of them shows at once."""
    tokenizer = llm.get_tokenizer()
    return [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]).strip().isalpha()]


@pytest.fixture(scope="module")
def texts(llm: LLM, words: list[int]) -> list[str]:
    """The text of a greedy answer in `words` after 0, 1, ... tokens."""
    answer = one(llm, allowed_token_ids=words).outputs[0]
    found = [llm.get_tokenizer().decode(answer.token_ids[:count]) for count in range(LENGTH + 1)]
    assert found[-1] == answer.text and len(set(map(len, found))) == LENGTH + 1
    return found


# --- stop strings and stop tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_stop_string_ends_the_text_where_it_stands(
    llm: LLM, words: list[int], texts: list[str], at: int, size: int, include: bool
) -> None:
    whole = texts[-1]
    stop = whole[at : at + size]
    first = whole.index(stop)
    found = one(llm, allowed_token_ids=words, stop=[stop], include_stop_str_in_output=include).outputs[0]
    assert found.text == whole[: first + size * include]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert len(texts[len(found.token_ids) - 1]) < first + size <= len(texts[len(found.token_ids)])


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_stop_string_that_completes_within_min_tokens_is_text(
    llm: LLM, words: list[int], texts: list[str], at: int, min_tokens: int
) -> None:
    """It may begin there: what counts is the token that completes it."""
    border = len(texts[at])
    stop = texts[-1][border - 1 : border + 1]
    found = one(llm, allowed_token_ids=words, stop=stop, min_tokens=min_tokens).outputs[0]
    for count in range(min_tokens + 1, LENGTH + 1):
        start = texts[count].find(stop, max(0, len(texts[count - 1]) - len(stop) + 1))
        if start >= 0:
            assert (found.text, len(found.token_ids)) == (texts[-1][:start], count)
            assert (found.finish_reason, found.stop_reason) == ("stop", stop)
            return
    assert (found.text, found.finish_reason, found.stop_reason) == (texts[-1], "length", None)


@pytest.mark.parametrize("count", [2, 16, 17, 64, 128])
def test_many_stop_strings(llm: LLM, words: list[int], texts: list[str], count: int) -> None:
    never, stop = [f"never {number}" for number in range(count - 1)], texts[-1][4:7]
    found = one(llm, allowed_token_ids=words, stop=[*never, stop]).outputs[0]
    assert (found.text, found.stop_reason) == (texts[-1][: texts[-1].index(stop)], stop)


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_stop_token_ends_the_output_and_is_its_last_token(llm: LLM, tokens: list[int], at: int) -> None:
    first = tokens.index(tokens[at])
    found = one(llm, stop_token_ids=[tokens[at]]).outputs[0]
    assert list(found.token_ids) == tokens[: first + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", tokens[at])


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_stop_token_within_min_tokens_is_not_drawn(llm: LLM, tokens: list[int], at: int) -> None:
    found = one(llm, stop_token_ids=[tokens[at]], min_tokens=at + 3).outputs[0]
    assert tokens[at] not in found.token_ids[: at + 3] and len(found.token_ids) >= at + 3


@pytest.mark.parametrize("listed", [False, True])
def test_the_model_s_own_end_is_no_stop_reason(llm: LLM, listed: bool) -> None:
    only_eos = {"allowed_token_ids": [EOS], "ignore_eos": False, "stop_token_ids": [EOS] if listed else []}
    found = one(llm, **only_eos).outputs[0]
    assert (list(found.token_ids), found.finish_reason, found.stop_reason) == ([EOS], "stop", None)
    told = one(llm, **{**only_eos, "ignore_eos": True}).outputs[0]
    assert (told.finish_reason, told.stop_reason) == (("stop", EOS) if listed else ("length", None))


def test_stop_reason_is_none_at_the_longest_length(llm: LLM) -> None:
    found = one(llm, max_tokens=3).outputs[0]
    assert (len(found.token_ids), found.finish_reason, found.stop_reason) == (3, "length", None)


def test_a_stop_string_without_text_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="stop"):
        one(llm, stop=["a"], detokenize=False)


@pytest.mark.parametrize("stop", [[""], [None], 3, ["x" * 400]])
def test_what_is_no_stop_string(stop: Any) -> None:
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop)


# --- log-probabilities and text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_hold_the_drawn_token_and_the_likeliest(llm: LLM, count: int) -> None:
    found = one(llm, logprobs=count).outputs[0]
    assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids)
    for token, position in zip(found.token_ids, found.logprobs, strict=True):
        assert next(iter(position)) == token and len(position) == max(count, 1)
        assert [entry.rank for entry in position.values()] == list(range(1, len(position) + 1))
        values = [entry.logprob for entry in position.values()]
        assert values == sorted(values, reverse=True) and values[0] <= 0
    chosen = [position[token].logprob for token, position in zip(found.token_ids, found.logprobs, strict=True)]
    assert found.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


@pytest.mark.parametrize("asked", [True, 1])
def test_true_is_one_log_probability(llm: LLM, asked: Any) -> None:
    found = one(llm, logprobs=asked, prompt_logprobs=asked)
    assert found.outputs[0].logprobs is not None and {len(p) for p in found.outputs[0].logprobs} == {1}
    assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None


@pytest.mark.parametrize("count", [0, 1, 4])
def test_prompt_log_probabilities_are_those_of_its_tokens(llm: LLM, count: int) -> None:
    found = one(llm, prompt_logprobs=count, max_tokens=1)
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == len(PROMPT)
    assert found.prompt_logprobs[0] is None
    for token, position in zip(PROMPT[1:], found.prompt_logprobs[1:], strict=True):
        assert position is not None and token in position and len(position) in (count, count + 1, 1)


def test_prompt_log_probabilities_agree_with_those_of_the_output(llm: LLM, tokens: list[int]) -> None:
    drawn = one(llm, logprobs=0).outputs[0].logprobs
    scored = one(llm, prompt=[*PROMPT, *tokens], prompt_logprobs=0, max_tokens=1).prompt_logprobs
    assert drawn is not None and scored is not None
    for token, a, b in zip(tokens, drawn, scored[len(PROMPT) :], strict=True):
        assert b is not None and a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)


def test_the_text_is_that_of_the_tokens(llm: LLM, tokens: list[int]) -> None:
    assert one(llm).outputs[0].text == llm.get_tokenizer().decode(tokens)


def test_the_texts_of_log_probabilities_join_to_the_text(llm: LLM, words: list[int], texts: list[str]) -> None:
    found = one(llm, allowed_token_ids=words, logprobs=0).outputs[0]
    assert found.logprobs is not None
    pieces = [position[token].decoded_token for token, position in zip(found.token_ids, found.logprobs, strict=True)]
    assert "".join(str(piece) for piece in pieces) == found.text == texts[-1]


def test_without_detokenize_there_is_no_text_anywhere(llm: LLM, tokens: list[int]) -> None:
    found = one(llm, detokenize=False, logprobs=2).outputs[0]
    assert (found.text, list(found.token_ids)) == ("", tokens)
    assert found.logprobs is not None
    assert {entry.decoded_token for position in found.logprobs for entry in position.values()} == {None}


@pytest.mark.parametrize(("asked", "count"), [(-1, 512), (512, 512), (65, 65)])
def test_log_probabilities_of_the_whole_vocabulary(llm: LLM, tokens: list[int], asked: int, count: int) -> None:
    """With max_logprobs=-1; the shapes are those of few."""
    found = one(llm, n=2, temperature=1.0, seed=1, logprobs=asked, prompt_logprobs=asked, max_tokens=3)
    scored = one(llm, [*PROMPT, *found.outputs[1].token_ids], prompt_logprobs=0, max_tokens=1).prompt_logprobs
    assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None and scored is not None
    for choice in found.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == 3
        for token, position in zip(
            (*PROMPT[1:], *choice.token_ids), (*found.prompt_logprobs[1:], *choice.logprobs), strict=True
        ):
            assert type(position) is dict and next(iter(position)) == token and len(position) in (count, count + 1)
            assert {entry.rank for entry in position.values()} >= set(range(1, count + 1))
            assert all(isinstance(entry.decoded_token, str) for entry in position.values())
            if count == 512:
                assert math.fsum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1, abs=1e-4)
        chosen = [position[token].logprob for token, position in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)
    again = [position[token].logprob for token, position in zip(found.outputs[1].token_ids, scored[4:], strict=True)]  # type: ignore[index]
    assert again == pytest.approx(chosen, abs=1e-3)


def test_the_engine_bounds_log_probabilities_as_it_was_told() -> None:
    with LLM("scripted:", skip_tokenizer_init=True, max_logprobs=1) as few:
        assert one(few, logprobs=1, prompt_logprobs=1).outputs[0].logprobs
        for asked in ({"logprobs": 2}, {"prompt_logprobs": 2}, {"logprobs": -1}):
            with pytest.raises(ValueError, match=rf"^{next(iter(asked))}: \d+ is above max_logprobs 1; start"):
                one(few, **asked)


@pytest.mark.parametrize("asked", [513, -2, 1.5, "one"])
def test_log_probabilities_out_of_bounds(llm: LLM, asked: Any) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        one(llm, logprobs=asked)


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_n_choices_have_an_order_and_differ(llm: LLM, count: int) -> None:
    found = one(llm, n=count, temperature=1.0, seed=3).outputs
    assert [choice.index for choice in found] == list(range(count))
    assert len({tuple(choice.token_ids) for choice in found}) == count


def test_equal_seeds_draw_equal_tokens_and_others_do_not(llm: LLM) -> None:
    params = [greedy(temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    first, second, third = [list(o.outputs[0].token_ids) for o in llm.generate([PROMPT] * 3, params, use_tqdm=False)]
    assert first == second != third


@pytest.mark.parametrize("seed", [-1, None])
def test_a_seed_of_minus_one_is_none(llm: LLM, seed: int | None) -> None:
    drawn = {tuple(one(llm, temperature=1.0, seed=seed).outputs[0].token_ids) for _ in range(3)}
    assert len(drawn) == 3


@pytest.mark.parametrize(
    "values", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.0}, {"logit_bias": {}}]
)
def test_truncation_to_one_token_is_greedy(llm: LLM, tokens: list[int], values: dict[str, Any]) -> None:
    given = {"temperature": 0.0 if "logit_bias" in values else 1.0, **values}
    assert list(one(llm, **given).outputs[0].token_ids) == tokens


def test_allowed_tokens_bias_and_bad_words(llm: LLM, tokens: list[int]) -> None:
    assert set(one(llm, allowed_token_ids=[9, 11]).outputs[0].token_ids) <= {9, 11}
    assert set(one(llm, logit_bias={13: 100.0}).outputs[0].token_ids) == {13}
    assert one(llm, logit_bias={tokens[0]: -100.0}).outputs[0].token_ids[0] != tokens[0]
    word = llm.get_tokenizer().decode([300])
    assert 300 not in one(llm, bad_words=[word], logit_bias={300: 50.0}).outputs[0].token_ids


@pytest.mark.parametrize(
    "values",
    [
        {"n": 0}, {"n": -1}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": 1.5},
        {"max_tokens": -1}, {"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4}, {"presence_penalty": 3.0},
        {"frequency_penalty": -3.0}, {"repetition_penalty": 0.0}, {"best_of": 3}, {"output_kind": "delta"},
        {"allowed_token_ids": []}, {"structured_outputs": {"json": {}}}, {"flat_logprobs": True},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_bounds_are_value_errors(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingParams(**values)


def test_parameters_may_be_changed_and_are_checked_when_they_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.ignore_eos = 3, 0.0, True
    assert len(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids) == 3
    copied = params.clone()
    copied.max_tokens = -1
    assert params.max_tokens == 3 and copy.copy(params) == params
    with pytest.raises(ValidationError, match="max_tokens"):
        llm.generate(PROMPT, copied, use_tqdm=False)


# --- prompts, lengths, cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": PROMPT},
        TokensPrompt(prompt_token_ids=PROMPT),
        {"prompt_token_ids": PROMPT, "multi_modal_data": None},
        np.array(PROMPT),
        tuple(PROMPT),
    ],
    ids=["dict", "TokensPrompt", "no media", "array", "tuple"],
)
def test_forms_of_a_prompt(llm: LLM, tokens: list[int], prompt: Any) -> None:
    assert list(one(llm, prompt=[prompt]).outputs[0].token_ids) == tokens


def test_prompts_of_text(llm: LLM) -> None:
    prompts = ["The capital", {"prompt": "of France"}, {"prompt": "is", "mm_processor_kwargs": None}]
    outputs = llm.generate(prompts, greedy(max_tokens=2), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["The capital", "of France", "is"]
    assert [output.prompt_token_ids for output in outputs] == [
        llm.get_tokenizer().encode(text) for text in ("The capital", "of France", "is")
    ]


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 3, [greedy(max_tokens=count) for count in (1, 2, 3)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate([PROMPT] * 3, [greedy()] * 2, use_tqdm=False)


@pytest.mark.parametrize("over", [0, 1, 50])
def test_a_prompt_that_leaves_no_room_is_refused(llm: LLM, over: int) -> None:
    longest = llm.llm_engine.model_config.max_model_len
    with pytest.raises(ValueError, match="max_model_len"):
        one(llm, prompt=[9] * (longest + over))


@pytest.mark.parametrize("room", [1, 3])
def test_an_output_ends_where_the_context_does(llm: LLM, room: int) -> None:
    longest = llm.model_config.max_model_len
    found = one(llm, prompt=[9] * (longest - room), max_tokens=None).outputs[0]
    assert (len(found.token_ids), found.finish_reason) == (room, "length")


@pytest.mark.parametrize("prompt", [[[]], [""], [[-1]], [[600]], [{"nonsense": 1}], 5], ids=str)
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompt, greedy(), use_tqdm=False)


def test_cached_tokens_are_whole_blocks_of_the_same_prefix(llm: LLM, tokens: list[int]) -> None:
    assert llm.reset_prefix_cache()
    block = llm.llm_engine.vllm_config.cache_config.block_size
    long = [*range(10, 10 + block), 5, 6]
    first, second = one(llm, prompt=long), one(llm, prompt=long)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, block)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    salted = one(llm, prompt={"prompt_token_ids": long, "cache_salt": "other"})
    assert salted.num_cached_tokens == 0
    assert llm.reset_prefix_cache() and one(llm, prompt=long).num_cached_tokens == 0


def test_metrics_count_under_vllm_s_names(llm: LLM) -> None:
    def counted() -> dict[str, float]:
        return {metric.name: metric.value for metric in llm.get_metrics()}  # type: ignore[attr-defined]

    before = counted()
    one(llm, prompt=[9, 9, 9], max_tokens=4)
    after = counted()
    assert after["vllm:generation_tokens"] - before["vllm:generation_tokens"] == 4
    assert after["vllm:prompt_tokens"] - before["vllm:prompt_tokens"] == 3
    assert after["vllm:request_success"] - before["vllm:request_success"] == 1
    assert after["vllm:num_requests_running"] == 0


# --- arguments of calls ----------------------------------------------------------------------------------------------


def test_what_asks_for_nothing_is_taken(llm: LLM, tokens: list[int]) -> None:
    nothing = {"lora_request": None, "tokenization_kwargs": {}, "mm_processor_kwargs": None, "priority": None}
    [output] = llm.generate(PROMPT, greedy(), use_tqdm=False, **nothing)
    assert list(output.outputs[0].token_ids) == tokens and output.lora_request is None
    llm.generate([PROMPT], greedy(), use_tqdm=False, lora_request=[None], priority=[1])


@pytest.mark.parametrize("name", ["lora_request", "mm_processor_kwargs", "tokenization_kwargs"])
def test_what_asks_for_more_is_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(NotSupportedError, match=name):
        llm.generate(PROMPT, greedy(), use_tqdm=False, **{name: {"a": 1}})


def test_a_text_without_special_tokens_around_it(llm: LLM) -> None:
    [output] = llm.generate(
        "The capital", greedy(max_tokens=1), use_tqdm=False, tokenization_kwargs={"add_special_tokens": False}
    )
    assert output.prompt_token_ids == llm.get_tokenizer().encode("The capital", add_special_tokens=False)


@pytest.mark.parametrize("content_format", ["auto", "string"])
def test_a_chat(llm: LLM, content_format: str) -> None:
    messages = [{"role": "user", "content": "The capital"}]
    [output] = llm.chat(messages, greedy(), False, chat_template_content_format=content_format)
    assert output.prompt is not None and "<|im_start|>user\nThe capital<|im_end|>" in output.prompt
    [other] = llm.chat(messages, greedy(), False, chat_template="{{ messages[0]['content'] }}!")
    assert other.prompt == "The capital!"


def test_contents_in_parts_are_for_the_template_alone(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match="chat_template_content_format"):
        llm.chat([{"role": "user", "content": "a"}], greedy(), False, chat_template_content_format="openai")


@pytest.mark.parametrize("name", ["encode", "classify", "reward", "sleep", "wake_up", "collective_rpc", "apply_model"])
def test_methods_that_are_not_here_are_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(NotSupportedError, match=f"{name}: .{{8}}"):
        getattr(llm, name)
    assert not hasattr(llm, name)  # for programs that ask


def test_embeddings_are_lists_of_the_last_token(llm: LLM) -> None:
    [last] = llm.embed([PROMPT], use_tqdm=False)
    [mean] = llm.embed([PROMPT], use_tqdm=False, pooling="mean")
    assert isinstance(last.outputs.embedding, list) and last.outputs.embedding != mean.outputs.embedding
    assert math.hypot(*last.outputs.embedding) == pytest.approx(1.0, abs=1e-5)


def test_embeddings_take_parameters_that_ask_for_no_more(llm: LLM) -> None:
    [plain], [given] = (
        llm.embed(PROMPT, use_tqdm=False, pooling_params=p) for p in (None, PoolingParams(task="embed"))
    )
    assert given.outputs == plain.outputs
    with pytest.raises(NotSupportedError, match="pooling_params"):
        llm.embed(PROMPT, use_tqdm=False, pooling_params={"dimensions": 8})
    changed = PoolingParams()
    changed.dimensions = 8
    with pytest.raises(NotSupportedError, match="dimensions"):
        llm.embed([PROMPT], use_tqdm=False, pooling_params=[changed])


@pytest.mark.parametrize("first", [["The capital"], ["The capital", "of France"]])
def test_scores_are_cosines_of_embeddings(llm: LLM, first: list[str]) -> None:
    second = ["of France", "is"]
    scores = llm.score(first if len(first) > 1 else first[0], second, use_tqdm=False)
    embedded = [np.array(output.outputs.embedding) for output in llm.embed([*first, *second], use_tqdm=False)]
    expected = [embedded[i % len(first)] @ embedded[len(first) + i] for i in range(2)]
    assert [output.outputs.score for output in scores] == pytest.approx(expected, abs=1e-6)
    assert all(output.finished and output.prompt_token_ids for output in scores)


def test_outputs_have_the_fields_of_vllm_s(llm: LLM) -> None:
    generated = one(llm, logprobs=1)
    assert generated.outputs[0].logprobs is not None
    [logprob] = generated.outputs[0].logprobs[0].values()
    [embedded] = llm.embed(PROMPT, use_tqdm=False)
    [scored] = llm.score("a", "b", use_tqdm=False)
    outputs = [generated, generated.outputs[0], logprob, embedded, embedded.outputs, scored.outputs]
    assert {type(output).__name__ for output in outputs} == FIELDS.keys()
    for output in outputs:
        assert [name for name in FIELDS[type(output).__name__] if not hasattr(output, name)] == []
    assert (embedded.outputs.hidden_size, embedded.num_cached_tokens) == (48, 0)


def test_scores_that_cannot_be(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="data_1"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(NotSupportedError, match="chat_template"):
        llm.score("a", "b", chat_template="{{ messages }}")


def test_facts_of_the_engine_under_vllm_s_names(llm: LLM) -> None:
    config = llm.llm_engine.model_config
    assert (config.max_model_len, config.get_vocab_size(), config.get_hidden_size()) == (256, 512, 48)
    assert str(config.dtype) == "torch.float32" and config.hf_config.model_type == "llama"
    assert llm.llm_engine.tokenizer is llm.get_tokenizer() and config is llm.llm_engine.model_config
    assert llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 16
    assert llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size == 1
    assert llm.llm_engine.vllm_config.parallel_config.data_parallel_size == 1
    other = VllmConfig.of({**config.resolved, "tensor_parallel_size": 4}, 2).parallel_config
    assert (other.tensor_parallel_size, other.data_parallel_size, other.world_size) == (4, 2, 4)
    with pytest.raises(AttributeError):
        config.max_model_len = 3


def test_calls_by_position(llm: LLM) -> None:
    messages = [{"role": "user", "content": "The capital"}]
    [output] = llm.chat(messages, greedy(), False, None, None, "{{ messages[0]['content'] }}?", "auto", True, False)
    assert output.prompt == "The capital?"
    assert llm.reset_prefix_cache(True, False)
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(TypeError, match="positional"):
        llm.generate(PROMPT, greedy(), False)  # by keyword alone, as in vLLM
    with pytest.raises(TypeError, match="nonsense"):
        llm.generate(PROMPT, greedy(), nonsense=1)


def test_a_profile_is_of_the_settings_at_start(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match="profile_prefix"):
        llm.start_profile("run")
    with pytest.raises(NotSupportedError, match="torch_profiler_dir"):  # which this engine has not
        llm.start_profile(profile_prefix=None, max_iterations=0)


def test_a_template_is_given_to_each_chat(tiny_llama: Any) -> None:
    with pytest.raises(NotSupportedError, match="chat_template"):
        LLM(str(tiny_llama), chat_template="{{ messages }}")


# --- LLMEngine -------------------------------------------------------------------------------------------------------


def test_requests_one_by_one_and_steps(llm: LLM, tokens: list[int]) -> None:
    engine = llm.llm_engine
    assert engine.step() == []
    engine.add_request("all", PROMPT, greedy(output_kind=RequestOutputKind.FINAL_ONLY), prompt_text="shown")
    engine.add_request("parts", {"prompt_token_ids": PROMPT}, greedy(output_kind=RequestOutputKind.DELTA))
    engine.add_request("ended", PROMPT, greedy(max_tokens=200), None, None, None, {"a": "b"}, 0)
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request("all", PROMPT, greedy())
    engine.abort_request(["ended", "unknown"])
    found: dict[str, list[list[int]]] = {"all": [], "parts": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.prompt == ("shown" if output.request_id == "all" else None)
            found[output.request_id].append(list(output.outputs[0].token_ids))
    assert found["all"] == [tokens] and [*chain(*found["parts"])] == tokens
    assert engine.get_num_unfinished_requests() == 0


# --- beam search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"beam_width": 0},
        {"beam_width": 99},
        {"beam_width": 2, "max_tokens": 0},
        {"beam_width": 2, "structured_outputs": {"a": 1}},
    ],
    ids=str,
)
def test_beams_out_of_bounds(llm: LLM, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(values)[-1]):
        llm.beam_search([PROMPT], BeamSearchParams(**{"max_tokens": 4, **values}))


# --- settings that change what is loaded -----------------------------------------------------------------------------


def test_random_weights_and_no_recommended_sampling(tiny_llama: Path, tmp_path: Path) -> None:
    """A folder without weights, whose generation_config.json is left aside."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 4}')
    settings = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory_gib": 0.05, "disable_tqdm": True}
    with LLM(str(tmp_path), **settings) as first:
        assert first.get_default_sampling_params().temperature == 0.3
        drawn = one(first).outputs[0].token_ids
    with LLM(str(tmp_path), generation_config="vllm", **settings) as second:
        assert second.get_default_sampling_params() == SamplingParams()
        assert one(second).outputs[0].token_ids == drawn

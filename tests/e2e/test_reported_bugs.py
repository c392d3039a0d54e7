"""Public bug reports about text and sampling parameters, replayed on the scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_model import EOS, VOCAB, ids_of, write_model

from wavecore import LLM, AsyncLLM, RequestOutput, SamplingParams, ValidationError

CASES = {
    300: ids_of("DEF", "G", "HI", "J", " more"),
    301: [*ids_of("abc", "Z", "Z"), EOS],
    302: ids_of("한국어 你好 👩‍👩‍👧‍👦!"),
    303: [EOS] * 9,
    304: ids_of("visible"),
    305: ids_of("a", "b", "<|endoftext|>", "c"),
    306: ids_of("go", "<|im_start|>", " on"),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    files = write_model(tmp_path_factory.mktemp("model"), CASES, max_model_len=64)
    with LLM(**files, max_num_seqs=8) as llm:
        yield llm


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 32, **values})


def both(llm: LLM, first: int, params: SamplingParams) -> RequestOutput:
    """The answer, after checking that a stream gives the same."""
    [whole] = llm.generate([first], params, use_tqdm=False)
    deltas = list(llm.stream([first], params))
    assert "".join(d.outputs[0].text for d in deltas) == whole.outputs[0].text
    assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.outputs[0].token_ids
    last = deltas[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason)
    assert all(d.outputs[0].finish_reason is None for d in deltas[:-1])
    return whole


def test_stop_over_token_borders(llm: LLM) -> None:
    output = both(llm, 300, greedy(stop="DEFGHIJ")).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "DEFGHIJ")
    assert output.token_ids == ids_of("DEF", "G", "HI", "J")
    for delta in llm.stream([300], greedy(stop="DEFGHIJ")):
        assert delta.outputs[0].text == ""


def test_held_back_tail_is_flushed(llm: LLM) -> None:
    output = both(llm, 301, greedy(stop=["ZZZ"], max_tokens=len(ids_of("abc", "Z", "Z")))).outputs[0]
    assert (output.text, output.finish_reason) == ("abcZZ", "length")
    assert both(llm, 301, greedy(stop=["ZZZ"])).outputs[0].text == "abcZZ"


def test_stop_token_costs_no_visible_text(llm: LLM) -> None:
    output = both(llm, 304, greedy(stop_token_ids=[EOS])).outputs[0]
    assert (output.text, output.finish_reason) == ("visible", "stop")
    output = both(llm, 304, greedy(stop_token_ids=[ids_of("visible")[-1]])).outputs[0]
    assert output.stop_reason == ids_of("visible")[-1]
    assert "visible".startswith(output.text)


@pytest.mark.parametrize("include", [True, False])
def test_include_stop_str(llm: LLM, include: bool) -> None:
    output = both(llm, 300, greedy(stop="GH", include_stop_str_in_output=include)).outputs[0]
    assert output.text == ("DEFGH" if include else "DEF")
    last = ids_of("visible")[-1]
    output = both(llm, 304, greedy(stop_token_ids=[last], include_stop_str_in_output=include)).outputs[0]
    assert (output.text == "visible") is include


def test_a_stop_string_that_is_a_special_token_is_that_token(llm: LLM) -> None:
    """With skip_special_tokens the text never holds it; many clients give a model's end of turn so."""
    [end] = ids_of("<|im_start|>")
    for stop in ("<|im_start|>", ["never", "<|im_start|>", "<|endoftext|>"]):
        output = both(llm, 306, greedy(stop=stop)).outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("go", "stop", "<|im_start|>")
        assert output.token_ids == [*ids_of("go"), end]
    output = both(llm, 306, greedy(stop="<|im_start|>", include_stop_str_in_output=True)).outputs[0]
    assert output.text == "go", "skip_special_tokens goes before"
    [several] = llm.generate([306], greedy(stop="<|im_start|>", stop_token_ids=[end, 7], n=2), use_tqdm=False)
    assert [(output.text, output.stop_reason) for output in several.outputs] == [("go", "<|im_start|>")] * 2
    output = both(llm, 306, greedy(stop_token_ids=[end])).outputs[0]
    assert output.stop_reason == end
    # ... also where the end of sequence itself is ignored, and never before min_tokens
    output = both(llm, 303, greedy(stop="<|im_end|>", ignore_eos=True)).outputs[0]
    assert (output.finish_reason, output.stop_reason, len(output.token_ids)) == ("stop", "<|im_end|>", 1)
    assert len(both(llm, 303, greedy(stop="<|im_end|>", min_tokens=5)).outputs[0].token_ids) > 5


def test_a_stop_string_with_a_special_token_among_other_text(llm: LLM) -> None:
    for stop in ("<|im_start|> on", ["x", "o<|im_start|>"]):
        with pytest.raises(
            ValidationError, match=r"^stop: '.*never comes.*'<\|im_start\|>'.*skip_special_tokens=False"
        ):
            llm.generate([306], greedy(stop=stop), use_tqdm=False)
        shown = both(llm, 306, greedy(stop=stop, skip_special_tokens=False)).outputs[0]
        assert shown.stop_reason == (stop if isinstance(stop, str) else stop[1])
    output = both(llm, 306, greedy(stop="<|im_start|>", skip_special_tokens=False)).outputs[0]
    assert (output.text, output.stop_reason) == ("go", "<|im_start|>")


def test_no_end_before_min_tokens(llm: LLM) -> None:
    output = both(llm, 303, greedy(min_tokens=5, max_tokens=9)).outputs[0]
    assert len(output.token_ids) >= 5
    output = both(llm, 300, greedy(stop="E", min_tokens=len(ids_of("DEF")))).outputs[0]
    assert output.text.startswith("DEF")


def test_several_end_tokens(tmp_path: Path) -> None:
    ends = [0, 1, 2]
    files = write_model(tmp_path, {300: [0, 1, 2, 0, 1, 2, 0, 1]}, eos_token_id=ends)
    with LLM(**files) as llm:
        [output] = llm.generate([300], greedy(min_tokens=5), use_tqdm=False)
        assert len(output.outputs[0].token_ids) > 5
        [output] = llm.generate([300], greedy(), use_tqdm=False)
        assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([0], None)


def test_engine_stops_when_the_reader_leaves(llm: LLM) -> None:
    for i, _ in enumerate(llm.stream([9, 9], greedy(ignore_eos=True, max_tokens=60))):
        if i == 2:
            break
    assert llm.debug_requests() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [VOCAB]),
        ("logit_bias", {VOCAB: 5.0}),
        ("logit_bias", {"-1": 5.0}),
        ("logit_bias", {"abc": 1.0}),
        ("allowed_token_ids", [VOCAB]),
        ("allowed_token_ids", []),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 65),
        ("logprobs", 10**9),
        ("logprobs", 65),
        ("n", 0),
        ("n", 10**9),
        ("n", 1.5),
        ("n", "3"),
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("seed", 1 << 64),
        ("stop", ["x"] * 129),
        ("stop", "x" * 257),
        ("bad_words", ["x"] * 129),
        ("max_tokens", True),
    ],
)
def test_values_out_of_bounds_name_their_field(llm: LLM, field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        llm.generate([300], SamplingParams(**{field: value}), use_tqdm=False)


def test_nothing_left_to_sample(llm: LLM) -> None:
    token = ids_of("a")[0]
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        llm.generate([300], SamplingParams(allowed_token_ids=[token], bad_words=["a"]), use_tqdm=False)


@pytest.mark.parametrize("prompt", ["", [[]], [""], {"prompt_token_ids": [-1]}, {"prompt_token_ids": [VOCAB]}])
def test_empty_and_impossible_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValidationError):
        llm.generate(prompt, use_tqdm=False)
    with pytest.raises(ValidationError):
        llm.chat([], use_tqdm=False)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []
    assert llm.embed([], use_tqdm=False) == []


def test_longest_prompt(llm: LLM) -> None:
    [output] = llm.generate([5] * 63, greedy(), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    for length in (64, 65):
        with pytest.raises(ValidationError, match=f"{length} tokens; max_model_len is 64"):
            llm.generate([5] * length, greedy(), use_tqdm=False)
    with pytest.raises(ValidationError, match="max_model_len"):
        llm.generate("long text " * 10_000, use_tqdm=False)


def test_prompt_logprobs_alone(llm: LLM) -> None:
    [output] = llm.generate([5, 6, 7], greedy(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    assert output.outputs[0].token_ids == []
    assert output.prompt_logprobs is not None
    assert [p is None for p in output.prompt_logprobs] == [True, False, False]


def test_max_tokens_is_capped_by_the_context(llm: LLM) -> None:
    [output] = llm.generate([5] * 10, greedy(max_tokens=10**6, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 54
    assert output.outputs[0].finish_reason == "length"
    [output] = llm.generate([5] * 10, greedy(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 54


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs(llm: LLM, count: int) -> None:
    output = both(llm, 304, greedy(logprobs=count)).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entries)) == token
        assert count <= len(entries) <= count + 1 or count == 0
        assert entries[token].decoded_token == llm.get_tokenizer().decode_token(token)
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    )


def test_logprobs_end_where_a_stop_string_ends(llm: LLM) -> None:
    output = both(llm, 300, greedy(stop="G", logprobs=1)).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == len(ids_of("DEF", "G"))


def test_prompt_logprobs_with_a_warm_prefix_cache(llm: LLM) -> None:
    prompt = [7, 8, 9] * 15
    first, second = (
        llm.generate(prompt, greedy(max_tokens=2, prompt_logprobs=k), use_tqdm=False)[0].prompt_logprobs for k in (5, 5)
    )
    assert first == second
    assert first is not None
    assert len(first) == len(prompt)
    assert all(p is not None and prompt[i + 1] in p for i, p in enumerate(first[1:]))


def test_characters_split_over_tokens(llm: LLM) -> None:
    output = both(llm, 302, greedy(max_tokens=60)).outputs[0]
    assert output.text == "한국어 你好 👩‍👩‍👧‍👦!"
    for delta in llm.stream([302], greedy(max_tokens=60)):
        assert "\ufffd" not in delta.outputs[0].text


def test_special_tokens_are_shown_on_demand(llm: LLM) -> None:
    assert both(llm, 305, greedy()).outputs[0].text == "abc"
    assert both(llm, 305, greedy(skip_special_tokens=False)).outputs[0].text == "ab<|endoftext|>c"
    shown = greedy(skip_special_tokens=False, include_stop_str_in_output=True)
    assert both(llm, 305, shown).outputs[0].text == "ab<|endoftext|>c<|im_end|>"
    assert both(llm, 305, greedy(detokenize=False)).outputs[0].text == ""


def test_seeded_beside_unseeded(llm: LLM) -> None:
    runs = [
        llm.generate([[5, 6], [5, 6]], [SamplingParams(seed=7), SamplingParams()], use_tqdm=False)[0] for _ in range(3)
    ]
    assert len({tuple(r.outputs[0].token_ids) for r in runs}) == 1
    assert runs[0].outputs[0].seed == 7


@pytest.mark.parametrize("n", [2, 5, 8])
def test_choices(llm: LLM, n: int) -> None:
    [output] = llm.generate([302], greedy(n=n, max_tokens=60), use_tqdm=False)
    assert [o.index for o in output.outputs] == list(range(n))
    assert {o.text for o in output.outputs} == {"한국어 你好 👩‍👩‍👧‍👦!"}
    assert isinstance(output.num_cached_tokens, int)


def test_one_end_for_each_choice(llm: LLM) -> None:
    ends: list[int] = []
    for delta in llm.stream([300], greedy(n=3, max_tokens=5)):
        ends += [o.index for o in delta.outputs if o.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]


async def test_abort_and_submit_at_once(llm: LLM) -> None:
    """Ids are reused at once; a late abort never reaches the next request."""
    other = AsyncLLM.connect(llm.runtime_dir)
    try:
        for _ in range(50):
            stream = other.generate({"prompt_token_ids": [9, 9]}, greedy(ignore_eos=True, max_tokens=50), "X")
            await anext(stream)
            await stream.aclose()
            outputs = [o async for o in other.generate({"prompt_token_ids": [304]}, greedy(), "X")]
            assert "".join(o.outputs[0].text for o in outputs) == "visible"
            assert outputs[-1].outputs[0].finish_reason == "stop"
        assert other.num_unfinished == 0
    finally:
        other.shutdown()


def test_bad_words(llm: LLM) -> None:
    words = llm.get_tokenizer().bad_word_ids(["visible"])
    assert tuple(ids_of("visible")) in words
    assert tuple(ids_of(" visible")) in words
    [output] = llm.generate([5], greedy(bad_words=["visible"]), use_tqdm=False)
    assert output.finished


def test_n_and_stop_and_priority_and_timeout_together(llm: LLM) -> None:
    [output] = llm.generate([300], greedy(n=2, stop=["HI"]), use_tqdm=False, priority=3, timeout=30.0)
    assert [o.text for o in output.outputs] == ["DEFG", "DEFG"]
    for wrong in ({"priority": 1.5}, {"timeout": 0}, {"timeout": float("nan")}, {"timeout": "5"}):
        with pytest.raises(ValidationError):
            llm.generate([300], use_tqdm=False, **wrong)

"""What a pipeline refuses before it starts, and where it cuts text into sentences."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavecore import ModelPipeline, SamplingParams
from wavecore.frontend.pipeline import SENTENCE_END, _Flow, _Stage
from wavecore.transport.errors import ConfigError, EngineDead, ModelError

MODEL = "scripted:"


def flow(overlap: bool = True) -> _Flow:
    stage: Any = _Stage("s", None, (), str, "prompt", None, overlap)  # type: ignore[arg-type]
    return _Flow(stage, None, None, None, None)  # type: ignore[arg-type]


def sentences(text: str) -> list[str]:
    whole = flow()
    whole.feed(text, True)
    return [*whole.due]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One. ", "Two! ", "Three?"]),
        ("Pi is 3.14, e.g. not 3.\n\nNext", ["Pi is 3.14, e.g. ", "not 3.\n\n", "Next"]),
        ('"Go." He went... "No?!" (Yes.) ', ['"Go." ', "He went... ", '"No?!" ', "(Yes.) "]),
        ("A list\n- one\n- two", ["A list\n", "- one\n", "- two"]),
        ("你好。世界！「好。」再见", ["你好。", "世界！", "「好。」", "再见"]),
        ("\n\n Begins late. Ends", ["\n\n Begins late. ", "Ends"]),
        ("", [""]),
        (" \n ", [" \n "]),
    ],
)
def test_where_sentences_end(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@given(st.text("aB.!?…\"') \n。！」", max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_sentences_are_the_same_however_their_text_arrives(text: str, cuts: list[int]) -> None:
    arriving = flow()
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts)]):
        arriving.feed(text[start:end], False)
        assert "".join(arriving.due) + arriving.unread == text[:end]
    arriving.feed(text[max([0, *(min(cut, len(text)) for cut in cuts)]) :], True)
    assert [*arriving.due] == sentences(text)
    assert "".join(arriving.due) == text
    assert all(sentence.strip() for sentence in arriving.due) or not text.strip()


def test_a_long_text_without_sentences_takes_linear_time() -> None:
    """Also where each character could begin the end of one."""
    for text in ("a", " ", ".", "\n", " \n", "。", ".'", "'", "」"):
        assert SENTENCE_END.search("a" + text * 200_000) is None


def test_without_overlap_a_stage_waits_for_all() -> None:
    waiting = flow(overlap=False)
    waiting.feed("One. Two", False)
    assert not waiting.due
    waiting.feed(". Three ", True)
    assert [*waiting.due] == ["One. Two. Three "]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "draft"}, "none of prompt, draft"),
        ({"name": "prompt"}, "none of prompt, draft"),
        ({"name": "two words"}, "must be an identifier"),
        ({"name": 7}, "must be an identifier"),
        ({"prompt": "{rewrite}"}, "stage next: template '{rewrite}' cannot be filled.*may name prompt, draft"),
        ({"prompt": "{}"}, "cannot be filled"),
        ({"prompt": "if (x) { return }"}, "writes other braces twice"),
        ({"prompt": "{draft:d}"}, "cannot be filled"),
        ({"prompt": 7}, "cannot be filled"),
        ({"runtime_dir": "x", "log-level": "info"}, "give log_level, runtime_dir to ModelPipeline"),
        ({"sampling_params": SamplingParams(n=2)}, "of one choice"),
        ({"sampling_params": SamplingParams(detokenize=False)}, "with detokenize"),
        ({"sampling_params": {"temperature": 0}}, "must be SamplingParams"),
        ({"gpus": 0}, "gpus must be a list"),
        ({"gpus": [-1]}, "gpus must be a whole number from 0"),
        ({"overlap": 1}, "overlap must be true or false"),
        ({"max_num_seq": 1}, "did you mean max_num_seqs"),
    ],
)
def test_a_stage_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    pipeline = ModelPipeline().add_stage("draft", MODEL)
    with pytest.raises(ConfigError, match=message):
        pipeline.add_stage(**{"name": "next", "model": MODEL, **arguments})
    assert len(pipeline._stages) == 1


def test_a_tokenizer_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        ModelPipeline().add_stage("draft", MODEL, tokenizer=tmp_path / "nowhere")


def test_templates_fill_in_what_they_name() -> None:
    pipeline = ModelPipeline().add_stage("draft", MODEL, prompt="Write {{about}} {prompt}").add_stage("rewrite", MODEL)
    pipeline.add_stage("check", MODEL, prompt="{rewrite} of {draft}, asked {prompt}")
    texts = {"prompt": "a {draft}", "draft": "b", "rewrite": "c"}
    asked = [stage.prompt(texts) for stage in pipeline._stages]
    assert asked == ["Write {about} a {draft}", "b", "c of b, asked a {draft}"]


def test_settings_of_all_stages_and_of_one() -> None:
    pipeline = ModelPipeline(max_num_seqs=4, log_level="error").add_stage("a", MODEL)
    pipeline.add_stage("b", MODEL, max_num_seqs=8)
    assert [(s.config.max_num_seqs, s.config.log_level) for s in pipeline._stages] == [(4, "error"), (8, "error")]


def test_a_pipeline_that_does_not_run() -> None:
    pipeline = ModelPipeline()
    with pytest.raises(ConfigError, match="starts once, with its stages"):
        pipeline.__enter__()
    with pytest.raises(EngineDead, match="stage draft was not started"):
        pipeline.add_stage("draft", MODEL).run("hello")
    pipeline.shutdown()

"""One output sequence: several tokens at once, stop strings inside them, lazily made text, faults."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.tokenizers_for_tests import byte_level

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.choice import Choice
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.outputs import Logprob
from wavecore.frontend.text.logprobs import read_logprobs
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.wire.messages import FinishReason
from wavecore.transport.wire.tensors import from_numpy

TOKENIZER = Tokenizer(byte_level(), "test")


def choice(keep_all: bool = True, **values: object) -> Choice:
    params = SamplingParams(**values)  # type: ignore[arg-type]
    return Choice(0, params, TOKENIZER.detokenizer(params, []), keep_all)


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


def entry(token: int) -> dict[int, Logprob]:
    return {token: Logprob(-1.0, 1)}


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_inside_a_step_of_several_tokens(size: int) -> None:
    tokens = [*ids("abc"), *ids("STOP"), *ids(" tail")]
    kept = len(ids("abc") + ids("STOP"))
    found = choice(stop="STOP", logprobs=1)
    for i in range(0, len(tokens), size):
        new = tokens[i : i + size]
        found.feed(new, [entry(t) for t in new])
    output = found.take()
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", "STOP")
    assert output.token_ids == tokens[:kept]
    assert output.logprobs is not None
    assert [next(iter(e)) for e in output.logprobs] == tokens[:kept]
    assert output.cumulative_logprob == pytest.approx(-kept)


def test_rows_after_the_end_are_dropped() -> None:
    ended = choice(stop="a")
    ended.feed(ids("a"))
    ended.feed(ids("b"), finish=FinishReason.LENGTH)
    ended.end("error")
    output = ended.take()
    assert (output.text, output.finish_reason, output.token_ids) == ("", "stop", ids("a"))
    assert not ended.has_news


def test_stop_string_before_min_tokens_is_text() -> None:
    early = choice(stop="b", min_tokens=2)
    early.feed([*ids("a"), *ids("b")])
    early.feed([*ids("b")])
    assert early.take().text == "ab"


def test_deltas_join_to_the_whole() -> None:
    whole, parts = choice(), choice(keep_all=False)
    texts = []
    for token in ids("Grüße 你好 👩‍👩‍👧"):
        whole.feed([token])
        parts.feed([token])
        texts.append(parts.take().text)
    for c in (whole, parts):
        c.feed([], finish=FinishReason.LENGTH)
    texts.append(parts.take().text)
    assert "".join(texts) == whole.take().text == "Grüße 你好 👩‍👩‍👧"


def test_incomplete_end_is_flushed_once() -> None:
    cut = choice()
    cut.feed([byte_level().token_to_id("ð")], finish=FinishReason.LENGTH)
    assert cut.take().text == "\ufffd"
    assert cut.take().text == "\ufffd"


def test_ids_without_a_token_are_empty_text() -> None:
    """Rows of the LM head beyond the tokenizer."""
    strange = choice()
    strange.feed([*ids("a"), 60_000, *ids("b")], finish=FinishReason.LENGTH)
    assert strange.take().text == "ab"


def test_logprob_frames() -> None:
    frames = [
        from_numpy(np.array([[7, 7, 8], [9, 1, 2]], np.int32)),
        from_numpy(np.array([[-0.5, -0.5, -1.0], [-5.0, -0.1, -0.2]], np.float32)),
        from_numpy(np.array([1, 40], np.int32)),
    ]
    first, second = read_logprobs(frames, [0, 1, 2], str)
    assert first == {7: Logprob(-0.5, 1, "7"), 8: Logprob(-1.0, 2, "8")}
    assert list(second) == [9, 1, 2]
    assert second[9].rank == 40
    assert [e.rank for e in second.values()] == [40, 1, 2]
    assert len(read_logprobs(frames, [0, 1, 2, 0, 1, 2], None)) == 4


def test_a_fault_of_the_detokenizer_ends_its_choice() -> None:
    class Broken:
        def feed(self, ids: object) -> str:
            raise RuntimeError("no such byte")

        def flush(self) -> str:
            return ""

    broken = Choice(0, SamplingParams(), Broken(), keep_all=False)
    broken.feed([1, 2])
    output = broken.take()
    assert (output.finish_reason, output.token_ids) == ("error", [1, 2])
    assert "no such byte" in str(output.error)
    assert not broken.has_news


def test_a_fault_in_the_text_ends_the_request_only(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(logprobs=1)
    request = EngineRequest("r", None, np.ones(1, np.int32), params, {})
    mailbox = Mailbox(request, TOKENIZER, ThreadNotifier(), OutputKind.DELTA)
    ended = mailbox.deliver(0, [5], FinishReason.NONE, {"logprobs": [0, 1, 2]}, ())  # frames that are not there
    assert ended
    output = mailbox.take()
    assert output is not None
    assert output.finished
    assert "IndexError" in str(output.error)
    assert "cannot be read" in caplog.text

"""One output sequence: several tokens at once, stop strings inside them, lazily made text, faults."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.support.tokenizers_for_tests import byte_level, sentencepiece

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.choice import Choice
from wavecore.frontend.client.mailbox import Mailbox, OutputKind, notify
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.outputs import Logprob
from wavecore.frontend.text.detokenizer import CONTEXT
from wavecore.frontend.text.logprobs import LazyLogprobs, Row, position_of, read_rows
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.wire.messages import FinishReason
from wavecore.transport.wire.tensors import from_numpy

TOKENIZER = Tokenizer(byte_level(), "test")
NOW = 0.0


def choice(keep_all: bool = True, **values: object) -> Choice:
    params = SamplingParams(**values)  # type: ignore[arg-type]
    return Choice(0, params, TOKENIZER.detokenizer(params, []), keep_all, None)


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


def entry(token: int) -> Row:
    return np.array([token], np.int32), np.array([-1.0], np.float32), np.int32(1)


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


@pytest.mark.parametrize("values", [{}, {"logprobs": 0}, {"stop": "STOP"}])
@pytest.mark.parametrize("keep_all", [False, True])
def test_what_came_before_an_abort_is_given_with_its_end(keep_all: bool, values: dict[str, object]) -> None:
    aborted = choice(keep_all, **values)
    for token in (first := ids("Grüße")):
        aborted.feed([token], [entry(token)])
    aborted.take()
    for token in (second := ids(" 你好")):
        aborted.feed([token], [entry(token)])
    aborted.end("abort")
    aborted.feed(ids("late"))
    output = aborted.take()
    assert (output.text, output.finish_reason) == ("Grüße 你好" if keep_all else " 你好", "abort")
    assert output.token_ids == ([*first, *second] if keep_all else second)
    assert not aborted.has_news


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
    first, second = [position_of(str, *row) for row in read_rows(frames, [0, 1, 2])]
    assert first == {7: Logprob(-0.5, 1, "7"), 8: Logprob(-1.0, 2, "8")}
    assert list(second) == [9, 1, 2]
    assert second[9].rank == 40
    assert [e.rank for e in second.values()] == [40, 1, 2]
    assert len(read_rows(frames, [0, 1, 2, 0, 1, 2])) == 4


def test_a_fault_of_the_detokenizer_ends_its_choice() -> None:
    class Broken:
        def feed(self, ids: object) -> str:
            raise RuntimeError("no such byte")

        def flush(self) -> str:
            return ""

    broken = Choice(0, SamplingParams(), Broken(), False, None)
    broken.feed([1, 2])
    output = broken.take()
    assert (output.finish_reason, output.token_ids) == ("error", [1, 2])
    assert "no such byte" in str(output.error)
    assert not broken.has_news


def test_a_fault_in_the_text_ends_the_request_only(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(logprobs=1)
    request = EngineRequest("r", None, np.ones(1, np.int32), params, {})
    mailbox = Mailbox(request, TOKENIZER, ThreadNotifier(), OutputKind.DELTA)
    ended = mailbox.deliver(0, [5], NOW, FinishReason.NONE, {"logprobs": [0, 1, 2]}, ())  # frames that are not there
    assert ended
    output = mailbox.take()
    assert output is not None
    assert output.finished
    assert "IndexError" in str(output.error)
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("stop", [[], ["zzz"]], ids=["plain", "with a stop string"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stop_token_is_an_id_and_text_on_demand_only(size: int, include: bool, stop: list[str]) -> None:
    """Here it is an ordinary word, as a stop token id may be."""
    tokens = [*ids("a"), *ids("b"), *ids("c")]
    for finish, text in ((FinishReason.STOP, "abc" if include else "ab"), (FinishReason.LENGTH, "abc")):
        ended = choice(stop=stop, include_stop_str_in_output=include)
        for i in range(0, len(tokens), size):
            last = i + size >= len(tokens)
            ended.feed(tokens[i : i + size], (), finish if last else FinishReason.NONE, tokens[-1] if last else None)
        output = ended.take()
        assert (output.text, output.token_ids, output.stop_reason) == (text, tokens, tokens[-1])


def test_text_that_might_have_become_a_stop_string_is_shown_at_the_end() -> None:
    held = choice(stop="abZZZ", keep_all=False)
    held.feed([*ids("a"), *ids("b")])
    assert held.take().text == ""
    held.feed(ids("Z"), finish=FinishReason.LENGTH)
    assert held.take().text == "abZ"


def test_what_a_detokenizer_held_back_goes_through_the_stop_strings_and_is_none_after_one() -> None:
    class Late:
        """Gives everything but the first letter at the end only."""

        def feed(self, ids: object) -> str:
            return "S"

        def flush(self) -> str:
            return "TOP and more"

    def late(stop: str, finish: FinishReason = FinishReason.LENGTH, min_tokens: int = 0) -> tuple[str, object, object]:
        one = Choice(0, SamplingParams(stop=stop, min_tokens=min_tokens), Late(), True, None)
        one.feed([1], finish=finish)
        output = one.take()
        return output.text, output.finish_reason, output.stop_reason

    assert late("STOP") == ("", "stop", "STOP")
    assert late("STOP", FinishReason.TIMEOUT) == ("", "timeout", None)
    assert late("STOP", min_tokens=1) == ("STOP and more", "length", None)  # within min_tokens it is text
    assert late("S") == ("", "stop", "S")
    assert late("x") == ("STOP and more", "length", None)


def test_a_stop_string_that_only_the_end_completes_is_found() -> None:
    """U+FFFD stands for bytes that become no character any more, which the end alone shows."""
    for finish in (FinishReason.LENGTH, FinishReason.STOP):
        one = choice(stop="a\ufffd", include_stop_str_in_output=True)
        one.feed([*ids("a"), byte_level().token_to_id("ð")])
        one.feed([byte_level().token_to_id("<|im_end|>")], finish=finish, reason=2)
        output = one.take()
        assert (output.text, output.finish_reason, output.stop_reason) == ("a\ufffd", "stop", "a\ufffd")
        again = one.take()
        assert (again.text, again.finish_reason, again.stop_reason) == ("a\ufffd", "stop", "a\ufffd")


def test_an_end_without_a_token_hides_none() -> None:
    one = choice()
    one.feed(ids("abc"))
    one.feed([], finish=FinishReason.STOP)
    assert one.take().text == "abc"


def test_text_ends_where_its_detokenizer_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def feed(self, ids: Sequence[int]) -> str:
            if ids == [7]:
                raise RuntimeError("no such byte")
            return "x"

        def flush(self) -> str:
            return "and more"

    broken = Choice(0, SamplingParams(), Broken(), True, None)
    for token in (5, 7, 5):
        broken.feed([token])
        assert (broken.take().text, broken.told) == ("x", token == 7 or bool(caplog.records))
    assert len(caplog.records) == 1

    mailbox = mailbox_of()
    mailbox._choices[0]._detokenizer = Broken()
    mailbox.deliver(0, [7], NOW, FinishReason.NONE, {}, ())
    output = mailbox.take()
    assert output is not None and output.finished and "no such byte" in str(output.error)


def test_without_text_stop_strings_stop_nothing() -> None:
    one = Choice(0, SamplingParams(stop="a"), None, True, None)
    one.feed(ids("a"))
    output = one.take()
    assert (output.text, output.finish_reason, output.token_ids) == ("", None, ids("a"))


def test_deltas_hold_the_logprobs_of_their_tokens_alone() -> None:
    for keep_all, second in ((False, [6]), (True, [5, 6])):
        one = choice(keep_all=keep_all, logprobs=1)
        one.feed([5], [entry(5)])
        one.take()
        one.feed([6], [entry(6)])
        output = one.take()
        assert output.logprobs is not None
        assert [next(iter(e)) for e in output.logprobs] == output.token_ids == second
        assert output.cumulative_logprob == -2.0


def mailbox_of(kind: OutputKind = OutputKind.DELTA, prompt: list[int] | None = None, **params: object) -> Mailbox:
    values = SamplingParams(**params)  # type: ignore[arg-type]
    request = EngineRequest("r", None, np.array(prompt or [1], np.int32), values, {})
    return Mailbox(request, TOKENIZER, ThreadNotifier(), kind)


def test_rows_of_a_choice_that_ended_change_nothing() -> None:
    mailbox = mailbox_of()
    assert mailbox.deliver(0, [5], NOW, FinishReason.LENGTH, {}, ())
    assert mailbox.deliver(0, [6], NOW, FinishReason.NONE, {"seed": 3, "cached_tokens": 4}, ())
    output = mailbox.take()
    assert output is not None
    assert (output.outputs[0].token_ids, output.outputs[0].seed, output.num_cached_tokens) == ([5], None, None)
    assert output.metrics is not None and output.metrics.num_generation_tokens == 1


def test_what_a_deadline_or_a_stop_token_says_reaches_the_caller() -> None:
    for finish, extra, reason in (
        (FinishReason.TIMEOUT, {"message": "waited 3 s", "code": "timeout"}, "waited 3 s"),
        (FinishReason.STOP, {"stop_token": 7}, 7),
        (FinishReason.STOP, {}, None),
    ):
        mailbox = mailbox_of()
        assert mailbox.deliver(0, [5], NOW, finish, extra, ())
        output = mailbox.take()
        assert output is not None
        assert (output.outputs[0].stop_reason, output.outputs[0].finish_reason) == (reason, finish.name.lower())


def test_tokens_that_come_with_an_error_are_kept() -> None:
    mailbox = mailbox_of()
    mailbox.deliver(0, [5, 6], NOW, FinishReason.ERROR, {"code": "numerical", "message": "NaN"}, ())
    output = mailbox.take()
    assert output is not None
    assert output.outputs[0].token_ids == [5, 6] and "NaN" in str(output.error)


def test_latencies_are_those_of_the_first_and_of_the_newest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecore.frontend.client.mailbox.time.monotonic", lambda: 100.0)
    mailbox = mailbox_of(kind=OutputKind.CUMULATIVE, n=2)
    for seconds, index, tokens in ((1.0, 1, [5, 6]), (3.0, 0, [7]), (4.0, 0, [])):
        mailbox.deliver(index, tokens, 100.0 + seconds, FinishReason.NONE, {}, ())
    output = mailbox.take()
    assert output is not None and output.metrics is not None
    metrics = output.metrics
    assert (metrics.first_token_latency, metrics.last_token_latency, metrics.num_generation_tokens) == (1.0, 3.0, 3)


def test_tokens_that_were_taken_as_text_alone_are_counted() -> None:
    mailbox = mailbox_of()
    for token in (5, 6):
        mailbox.deliver(0, [token], NOW + 1, FinishReason.NONE, {}, ())
        assert mailbox.take_text() is not None
    mailbox.deliver(0, [7], NOW + 2, FinishReason.LENGTH, {}, ())
    assert mailbox.take_text() is None, "the end is told by `take`"
    output = mailbox.take()
    assert output is not None and output.outputs[0].token_ids == [7]
    assert output.metrics.num_generation_tokens == 3
    assert output.metrics.time_per_token == pytest.approx(0.5)
    assert mailbox_of(n=2).take_text() is None


def test_prompt_logprobs_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of long prompts would hold up all streams of a program."""
    decoded: list[int] = []
    monkeypatch.setattr(Tokenizer, "decode_token", lambda _, token: decoded.append(token) or str(token))
    frames = (
        from_numpy(np.array([[2, 2, 9], [3, 8, 7]], np.int32)),
        from_numpy(np.array([[-1.0, -1.0, -2.0], [-3.0, -0.5, -1.5]], np.float32)),
        from_numpy(np.array([1, 40], np.int32)),
    )
    mailbox = mailbox_of(prompt=[1, 2, 3], prompt_logprobs=2)
    mailbox.deliver(0, [5], NOW, FinishReason.LENGTH, {"prompt_logprobs": [0, 1, 2]}, frames)
    output = mailbox.take()
    assert output is not None and output.prompt_logprobs is not None and decoded == []
    found = output.prompt_logprobs
    second = {2: Logprob(-1.0, 1, "2"), 9: Logprob(-2.0, 2, "9")}
    third = {3: Logprob(-3.0, 40, "3"), 8: Logprob(-0.5, 1, "8"), 7: Logprob(-1.5, 2, "7")}
    assert found[1] == second and decoded == [2, 9]
    assert len(found) == 3 and [*found] == found[:] == [None, second, third]
    assert found[-1] == third and found[1:] == [second, third] and found[::-2] == [third, None]
    with pytest.raises(IndexError):
        found[3]
    assert type(copied := pickle.loads(pickle.dumps(found))) is list and copied == [*found]


@pytest.mark.parametrize("kind", list(OutputKind))
def test_logprobs_of_many_alternatives_are_made_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch, kind: OutputKind
) -> None:
    """Those of a whole vocabulary would hold up all streams of a program."""
    decoded: list[int] = []
    monkeypatch.setattr(Tokenizer, "decode_token", lambda _, token: decoded.append(token) or str(token))
    mailbox, count = mailbox_of(kind=kind, logprobs=100), 100
    for token in (7, 99):
        frames = (
            from_numpy(np.array([[token, *range(count)]], np.int32)),
            from_numpy(np.array([[-0.5 - token, *[-0.5 - i for i in range(count)]]], np.float32)),
            from_numpy(np.array([1 + token], np.int32)),
        )
        end = FinishReason.LENGTH if token == 99 else FinishReason.NONE
        mailbox.deliver(0, [token], NOW, end, {"logprobs": [0, 1, 2]}, frames)
        if kind is not OutputKind.FINAL:
            output = mailbox.take()
    if kind is OutputKind.FINAL:
        output = mailbox.take()
    assert output is not None and decoded == []
    choice = output.outputs[0]
    assert choice.cumulative_logprob == -107.0 and isinstance(choice.logprobs, LazyLogprobs)
    assert len(choice.logprobs) == len(choice.token_ids) == (1 if kind is OutputKind.DELTA else 2)
    last = choice.logprobs[-1]
    assert [*last] == [99, *range(99)] and last == {i: Logprob(-0.5 - i, i + 1, str(i)) for i in range(100)}
    assert len(decoded) == 100, "one position was read"
    assert type(copied := pickle.loads(pickle.dumps(choice.logprobs))) is list and choice.logprobs == copied


def test_whole_outputs_show_every_choice_and_deltas_those_with_news() -> None:
    for kind, shown in ((OutputKind.DELTA, [1]), (OutputKind.CUMULATIVE, [0, 1])):
        mailbox = mailbox_of(kind=kind, n=2)
        mailbox.deliver(1, [5], NOW, FinishReason.NONE, {}, ())
        output = mailbox.take()
        assert output is not None and not output.finished
        assert [o.index for o in output.outputs] == shown
        assert mailbox.has_tokens and mailbox.take() is None


def test_a_whole_output_that_is_taken_early_is_whole_at_the_end_too() -> None:
    mailbox = mailbox_of(kind=OutputKind.FINAL, n=2)
    mailbox.deliver(0, ids("ab"), NOW, FinishReason.LENGTH, {}, ())
    early = mailbox.take()
    mailbox.deliver(1, ids("cd"), NOW, FinishReason.LENGTH, {}, ())
    output = mailbox.take()
    assert early is not None and output is not None
    assert [[o.text for o in taken.outputs] for taken in (early, output)] == [["ab", ""], ["ab", "cd"]]
    assert [early.finished, output.finished] == [False, True]


def test_without_detokenize_there_is_no_text() -> None:
    mailbox = mailbox_of(detokenize=False)
    mailbox.deliver(0, ids("ab"), NOW, FinishReason.LENGTH, {}, ())
    output = mailbox.take()
    assert output is not None and (output.outputs[0].text, output.outputs[0].token_ids) == ("", ids("ab"))


def test_a_stop_string_that_is_a_special_token_is_named_as_it_was_given() -> None:
    end = byte_level().token_to_id("<|im_end|>")
    mailbox = mailbox_of(stop=["<|im_end|>"])
    mailbox.deliver(0, [*ids("ab"), end], NOW, FinishReason.STOP, {"stop_token": end}, ())
    output = mailbox.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "<|im_end|>")


def test_an_embedding_is_float32() -> None:
    mailbox = mailbox_of(kind=OutputKind.FINAL)
    values = np.array([0.5, 0.25], np.float16)
    mailbox.deliver(0, [], NOW, FinishReason.STOP, {"pooled": [1]}, [from_numpy(values[:1]), from_numpy(values)])
    output = mailbox.take()
    assert output is not None and output.embedding is not None
    assert output.embedding.dtype == np.float32 and output.embedding.tolist() == [0.5, 0.25]


def test_one_notice_until_it_is_taken_and_all_of_a_notifier_in_one_call() -> None:
    told: list[list[Mailbox]] = []

    class Recorder:
        def notify(self, mailboxes: Sequence[Mailbox]) -> bool:
            told.append(list(mailboxes))
            return True

    first, second = mailbox_of(), mailbox_of()
    first.notifier = second.notifier = Recorder()
    for mailbox in (first, second):
        mailbox.deliver(0, [5], NOW, FinishReason.NONE, {}, ())
    notify([first, second])
    notify([first, second])
    assert told == [[first, second], []]  # asked whether there still is somebody
    first.take()
    notify([first, second])
    assert told == [[first, second], [], [first]]


def test_the_first_word_keeps_its_space_behind_the_prompt() -> None:
    tokenizer = Tokenizer(sentencepiece(), "test")
    new = sentencepiece().encode("is").ids
    a_third_of_a_character = sentencepiece().encode("你").ids[1:2]
    # The last tokens are what counts: the first few of the second prompt end inside a character.
    for prompt in (
        sentencepiece().encode("the").ids,
        [*a_third_of_a_character * CONTEXT, *sentencepiece().encode("the").ids],
    ):
        request = EngineRequest("r", None, np.array(prompt, np.int32), SamplingParams(), {})
        mailbox = Mailbox(request, tokenizer, ThreadNotifier(), OutputKind.FINAL)
        mailbox.deliver(0, new, NOW, FinishReason.LENGTH, {}, ())
        output = mailbox.take()
        assert output is not None and output.outputs[0].text == " is"


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after nearly every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("values", [{}, {"stop": "STOP"}, {"n": 3}, {"stop": ["STOP", "none"], "n": 2}])
@pytest.mark.parametrize("kind", OutputKind)
def test_a_reader_beside_the_io_thread_sees_all_of_it_once(
    quick_switches: None, kind: OutputKind, values: dict[str, object], logprobs: int | None
) -> None:
    """Two threads and no lock: nothing is lost, doubled or out of step, and no reader sleeps over what came. The text
    of a stop token, which comes last where nothing else ends it, is never seen."""
    params = SamplingParams(logprobs=logprobs, **values)  # type: ignore[arg-type]
    request = EngineRequest("r", None, np.ones(1, np.int32), params, {})
    whole = "Grüße " * 60 + ("STOP" if params.stop else "") + "tail"
    tokens = ids(whole)
    text = whole.removesuffix("STOPtail") if params.stop else TOKENIZER.backend.decode(tokens[:-1])
    extra = {} if logprobs is None else {"logprobs": [0, 1, 2]}
    for _ in range(10):
        notifier = ThreadNotifier()
        mailbox = Mailbox(request, TOKENIZER, notifier, kind)

        def feed(mailbox: Mailbox = mailbox) -> None:
            for at in range(0, len(tokens), 2):
                new = tokens[at : at + 2]
                last = FinishReason.STOP if at + 2 >= len(tokens) else FinishReason.NONE
                frames = (
                    from_numpy(np.array([[t] for t in new], np.int32)),
                    from_numpy(np.full((len(new), 1), -1.0, np.float32)),
                    from_numpy(np.ones(len(new), np.int32)),
                )
                for index in range(params.n):
                    mailbox.deliver(index, new, NOW, last, extra, frames)
                    notify([mailbox])

        io_thread = threading.Thread(target=feed)
        io_thread.start()
        texts, seen, ends = ([""] * params.n, [[] for _ in range(params.n)], [0] * params.n)
        finished = False
        while not finished:
            assert notifier.wait(30) is mailbox
            output = mailbox.take()
            if output is None:
                continue
            finished = output.finished
            for c in output.outputs:
                assert (c.logprobs is None) == (logprobs is None)
                assert logprobs is None or [next(iter(entry)) for entry in c.logprobs or ()] == c.token_ids
                fresh = kind is OutputKind.DELTA
                texts[c.index] = texts[c.index] + c.text if fresh else c.text
                seen[c.index] = seen[c.index] + c.token_ids if fresh else c.token_ids
                ends[c.index] += c.finish_reason is not None and (fresh or finished)
        io_thread.join()
        assert mailbox.take() is None
        assert texts == [text] * params.n
        assert [TOKENIZER.backend.decode(t).split("STOP")[0] for t in seen] == [whole.split("STOP")[0]] * params.n
        assert ends == [1] * params.n


@pytest.mark.parametrize("size", [1, 2, 9])
def test_only_stops_that_are_complete_within_min_tokens_are_text(size: int) -> None:
    early = choice(stop="ab", min_tokens=1)
    tokens = [*ids("a"), *ids("b"), *ids("c")]
    for at in range(0, 3, size):
        early.feed(tokens[at : at + size])
    output = early.take()
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "ab")
    assert output.token_ids == tokens[:2]


def test_without_detokenize_log_probabilities_have_no_text() -> None:
    frames = [
        from_numpy(np.array(rows, kind)) for rows, kind in (([[5, 6]], "i4"), ([[-1.0, -2.0]], "f4"), ([1], "i4"))
    ]
    for detokenize in (True, False):
        params = SamplingParams(logprobs=1, detokenize=detokenize)
        request = EngineRequest("0", None, np.array([1], np.int32), params, {}, RequestOptions())
        mailbox = Mailbox(request, TOKENIZER, ThreadNotifier(), OutputKind.FINAL)
        mailbox.deliver(0, [5], NOW, FinishReason.LENGTH, {"logprobs": [0, 1, 2]}, frames)
        output = mailbox.take()
        assert output is not None and output.outputs[0].logprobs is not None
        texts = [entry.decoded_token for entry in output.outputs[0].logprobs[0].values()]
        assert all(isinstance(text, str) for text in texts) if detokenize else texts == [None, None]


def test_text_alone_is_taken_as_the_whole_delta_would_be() -> None:
    tokens = ids("한국어 텍스트, Grüße aus Köln.")
    plain, whole = choice(keep_all=False), choice(keep_all=False)
    texts: list[str] = []
    for i, token in enumerate(tokens):
        end = FinishReason.STOP if i == len(tokens) - 1 else FinishReason.NONE
        for one in (plain, whole):
            one.feed([token], finish=end)
        news = plain.take_text()
        assert (news is None) is (end is not FinishReason.NONE), "the end is told by `take`"
        texts.append(plain.take().text if news is None else news)
        assert texts[-1] == whole.take().text
    assert plain.taken == len(tokens)
    stopping = choice(keep_all=False, stop="xy")
    stopping.feed(ids("ax"))
    assert stopping.take_text() == "a"
    stopping.feed(ids("b"))
    assert stopping.take_text() == "xb"
    assert stopping.taken == len(ids("ax") + ids("b"))
    for other in (choice(), choice(keep_all=False, logprobs=1)):
        other.feed(ids("a"), [entry(ids("a")[0])])
        assert other.take_text() is None and other.take().text == "a"

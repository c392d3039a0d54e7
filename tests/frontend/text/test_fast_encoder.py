"""The faster encoder gives the ids of `tokenizers`, or is not used."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.tokenizers_for_tests import CORPUS, byte_level, sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models

from wavecore.engine_core.models.files import DEFAULT_FILE
from wavecore.frontend.text import fast_encoder
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.frontend.text.tokenizer_files import load_tokenizer
from wavecore.transport.errors import ValidationError

pytest.importorskip("fastokens")
ROOT = Path(__file__).parents[3]
RANGES = (
    (32, 127),
    (0xA0, 0x2FF),
    (0x300, 0x36F),
    (0x600, 0x6FF),
    (0x3040, 0x30FF),
    (0xAC00, 0xAFFF),
    (0x1F300, 0x1F6FF),
)


def texts(count: int) -> list[str]:
    """Of all scripts, in random mixtures."""
    draw = random.Random(3)

    def character() -> str:
        return draw.choice((" ", "\n", chr(draw.randrange(*draw.choice(RANGES)))))

    return ["".join([character() for _ in range(draw.randrange(60))]) for _ in range(count)]


def check(backend: Backend, given: list[str]) -> None:
    fast = fast_encoder.fast_encoder(backend)
    assert fast is not None
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    for text in [*given, *added, *[f"x {name} y{name}" for name in added]]:
        for special in (True, False):
            assert fast(text, special) == backend.encode(text, add_special_tokens=special).ids, text


def test_the_ids_are_those_of_tokenizers() -> None:
    check(byte_level(), CORPUS + texts(500))


@pytest.mark.slow
def test_the_ids_of_a_real_model() -> None:
    file = Path("~/.cache/wavecore").expanduser() / DEFAULT_FILE
    if not file.exists():
        pytest.skip("the default model was not fetched")
    files = [path.read_text() for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("frontend/**/*.py"))]
    check(load_tokenizer(file).backend, files + texts(3000))


def test_a_kind_that_is_not_known_stays_as_it_is() -> None:
    for backend in (sentencepiece(), Backend(models.WordLevel({"a": 0}, unk_token="a"))):
        tokenizer = Tokenizer(backend, "here")
        before = [tokenizer.encode(text) for text in CORPUS]
        tokenizer.make_fast()
        assert [tokenizer.encode(text) for text in CORPUS] == before


def test_one_difference_is_enough_to_leave_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoding = SimpleNamespace(encode=lambda *_: SimpleNamespace(ids=[1]))
    found = SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=lambda _: encoding))
    monkeypatch.setattr(fast_encoder, "import_module", lambda _: found)
    caplog.set_level("INFO", fast_encoder.logger.name)
    assert fast_encoder.fast_encoder(byte_level()) is None and "other ids" in caplog.text


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(fast_encoder, "import_module", import_module)
    assert fast_encoder.fast_encoder(byte_level()) is None


def test_text_that_is_none_is_refused_as_before() -> None:
    tokenizer = Tokenizer(byte_level(), "here")
    tokenizer.make_fast()
    with pytest.raises(ValidationError, match="not valid Unicode"):
        tokenizer.encode("\ud800")

"""The comparison with transformers finds every template of a folder, and says what differs."""

from __future__ import annotations

import json
from pathlib import Path

import compare_templates
import pytest

from wavecore.frontend.text.tokenizer import Tokenizer


def test_templates_are_found_in_files_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    named = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "rag", "template": "{{ documents }}"},
    ]
    (tmp_path / "a" / "b" / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "a" / "chat_template.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('content') }}"})
    )
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert compare_templates.main([str(tmp_path)]) == 0
    count = len(compare_templates.CONVERSATIONS)
    assert capsys.readouterr().out == f"4 templates, {count} conversations each: 0 differ\n"
    assert count >= 20


def test_a_difference_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setattr(Tokenizer, "render_chat", lambda *_: ("ours", []))
    assert compare_templates.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(compare_templates.CONVERSATIONS) + 1
    assert "x.jinja: one question: transformers 'What is the weather in Köln?', wavecore 'ours'" in lines[0]


def test_without_folders_it_says_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_templates.main([]) == 2
    assert "FOLDER" in capsys.readouterr().out

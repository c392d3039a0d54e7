"""Every form of prompt, and every malformed one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wavecore.frontend.prompts import as_prompt, as_prompts
from wavecore.transport.errors import NotSupportedError, ValidationError


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("text", 1),
        (["a", "b"], 2),
        ({"prompt": "a"}, 1),
        ({"prompt_token_ids": [1, 2]}, 1),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        (["a", {"prompt_token_ids": [1]}, [5]], 3),
        (np.array([1, 2]), 1),
        ([np.array([1, 2]), (3, 4)], 2),
    ],
)
def test_forms(prompts: Any, count: int) -> None:
    assert len(as_prompts(prompts)) == count


def test_an_empty_list_holds_no_prompts() -> None:
    assert as_prompts([]) == []
    with pytest.raises(ValidationError):
        as_prompt([])


def test_ids_become_int32() -> None:
    prompt = as_prompt({"prompt_token_ids": [1, 2], "prompt": "ab", "cache_salt": "s"})
    assert prompt.ids is not None
    assert prompt.ids.dtype == np.int32
    assert prompt.ids.tolist() == [1, 2]
    assert (prompt.text, prompt.cache_salt) == ("ab", "s")


@pytest.mark.parametrize(
    "prompts",
    [
        "",
        [[]],
        [""],
        None,
        7,
        {"prompt": ""},
        {"prompt": 5},
        {},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1], "prompt": 5},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [1 << 31]},
        {"prompt_token_ids": [1 << 63]},
        {"prompt_token_ids": [1 << 64]},
        {"prompt_token_ids": ["a"]},
        {"prompt_token_ids": [[1], [2, 3]]},
        {"prompt_token_ids": [True, False]},
        {"prompt": "a", "promt": "b"},
        {"prompt": "a", "parse_special": 1},
    ],
)
def test_malformed(prompts: Any) -> None:
    with pytest.raises(ValidationError):
        as_prompts(prompts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_modal_data", {"image": 1}),
        ("multi_modal_data", "image"),
        ("mm_processor_kwargs", {"a": None}),
        ("encoder_prompt", "a"),
        ("prompt_is_token_ids", [False, True]),
        ("token_type_ids", [0, 1]),
        ("prompt_token_offsets", [(0, 1)]),
    ],
)
def test_what_only_other_models_take_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(NotSupportedError, match=name):
        as_prompt({"prompt": "a", name: value})


@pytest.mark.parametrize("value", [None, {}, [], "", [False, False]], ids=str)
def test_what_asks_for_nothing_is_taken(value: Any) -> None:
    embeds = np.ones((2, 8), np.float32)
    prompt = as_prompt({"prompt_embeds": embeds, "prompt_token_ids": [1, 2], "prompt_is_token_ids": value})
    assert prompt.embeds is embeds and prompt.ids is None

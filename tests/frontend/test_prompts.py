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


def test_media_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="multi_modal_data"):
        as_prompt({"prompt": "a", "multi_modal_data": {}})

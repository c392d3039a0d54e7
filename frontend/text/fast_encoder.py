"""Encoding ten times as fast: fastokens, where it is installed and gives the ids that `tokenizers` gives."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import tokenizers

logger = logging.getLogger(__name__)

Encode = Callable[[str, bool], list[int]]
"""Text, and whether what the tokenizer puts around a text is wanted -> ids."""

# What pre-tokenizers, normalizers and merges tell apart: one difference in it, and `tokenizers` stays.
PROBE = (
    " The  capital's 12345.67e-8\r\n\n\tof  \n France—naïve, cafe\u0301 I'LL don't x_y __init__(self):\n    return\n "
    "Grüße ΑΩ Привет عربى हिन्दी ไทย 한국어 你好,世界!。 👩‍👩‍👧‍👦🏳️‍🌈 \u200b\u00a0\u3000\ufeff\ufffd "
    "½ ﬁ Å İ ǅ <0x41> ▁ Ġ "
) * 2


def fast_encoder(backend: tokenizers.Tokenizer) -> Encode | None:
    """What encodes as `backend` does; None where there is nothing faster, which includes any doubt."""
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    try:
        made = import_module("fastokens").Tokenizer.from_json_str(backend.to_str())

        def encode(text: str, add_special_tokens: bool) -> Any:
            return made.encode(text, add_special_tokens).ids

        for text in ("", "a", PROBE, PROBE.join(["", *added[:64], ""]), " ".join(added)):
            for special in (False, True):
                if encode(text, special) != backend.encode(text, add_special_tokens=special).ids:
                    raise ValueError("it gives other ids than tokenizers")
    except ImportError:
        return None
    except Exception as error:
        logger.info("fastokens is not used for this model: %s", error)
        return None
    return encode

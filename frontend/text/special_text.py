"""Text that spells special tokens without being one: what users write stays text, wherever a template puts it.

A template or the model may write control tokens; the strings of a user may not. Where a user's string holds the text of
a special token, or begins or ends with a part of one that its neighbours could complete, an invisible mark goes into it
before rendering. In the rendered text a mark counts only if a special token would form across it: the text is cut there
and the pieces are encoded apart. All other text gives exactly the tokens that transformers gives.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

_MARKS = range(0xF0000, 0x110000)  # for private use: no text has a need of them
# One of them in any of the ways that `_ways` has
_WRITTEN = re.compile(
    f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]"
    r"|\\udb[89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}|\\U00(?:0f|10)[0-9a-f]{4}"
)
_NOTHING = "(?!)"  # matches nowhere


class SpecialText:
    """Knows the special tokens of one tokenizer; made once.

    Args:
        special: their texts.
    """

    def __init__(self, special: Sequence[str]) -> None:
        several = sorted((s for s in special if len(s) > 1), key=len, reverse=True)
        single = "".join(s for s in special if len(s) == 1)
        self._single = re.compile(f"[{re.escape(single)}]" if single else _NOTHING)
        self._longest = len(several[0]) if several else 0
        self._lengths = range(1, self._longest)
        self._begins = {s[:cut] for s in several for cut in range(1, len(s))}
        self._ends = {s[cut:] for s in several for cut in range(1, len(s))}
        by_first = defaultdict(list)
        for s in several:  # longest first: of two that begin in one place, the longer is found
            by_first[s[0]].append(re.escape(s[1:]))
        # The first character alone is consumed, so that one token is also found inside another.
        starts = [f"{re.escape(c)}(?=({'|'.join(rest)}))" for c, rest in by_first.items()]
        self._find = re.compile("|".join(starts) or _NOTHING)
        outer = "".join({c for s in several for c in (s[0], s[-1])})
        self._hint = re.compile(f"[{re.escape(outer)}]" if outer else _NOTHING)

    def mark(self, text: str, mark: str) -> str:
        """A user's string, with marks."""
        text = self._single.sub("\ufffd", text)
        if not self._hint.search(text):
            return text
        text = self._find.sub(lambda found: found[0] + mark, text)
        core = text.strip()  # a template may strip it, and must find the space at the ends then
        if self._ends & {core[:n] for n in self._lengths}:
            text = text.replace(core, mark + core, 1)
        if self._begins & {core[-n:] for n in self._lengths}:
            text = text.rstrip() + mark + text[len(text.rstrip()) :]
        return text

    def pieces(self, text: str, mark: str) -> list[str]:
        """A rendered text in the pieces that are encoded apart; joined they are the text without marks."""
        parts = written(mark).split(text)
        whole = "".join(parts)
        return _cut(whole, [at for at in accumulate(map(len, parts[:-1])) if self._forms_across(whole, at)])

    def apart(self, text: str) -> list[str]:
        """A whole text of a user in pieces of which none holds a special token."""
        text = self._single.sub("\ufffd", text)
        return _cut(text, [found.end() for found in self._find.finditer(text)])

    def _forms_across(self, text: str, at: int) -> bool:
        low, high = max(0, at - self._longest + 1), at + self._longest - 1
        return any(m.start() < at < m.end(m.lastindex or 0) for m in self._find.finditer(text, low, high))


def used_characters(json_text: str) -> set[str]:
    """Characters for private use in a value of JSON, in any way of writing them."""
    return set(
        _WRITTEN.findall(json_text.replace("\\\\", "\\"))
    )  # JSON doubles backslashes, with which a text may spell one


def unused_characters(used: set[str], count: int) -> list[str]:
    """Characters for private use other than `used_characters`; fewer if these leave fewer."""
    return [c for c in map(chr, _MARKS[: len(used) + count]) if used.isdisjoint(_ways(c))][:count]


def written(mark: str) -> re.Pattern[str]:
    """Finds a mark in a rendered text."""
    return re.compile("|".join(map(re.escape, _ways(mark))))


def _cut(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _ways(mark: str) -> tuple[str, ...]:
    """A template may write a string as JSON in ASCII, or as Python shows it."""
    return mark, json.dumps(mark)[1:-1], repr(mark)[1:-1]

"""Stop strings over a stream of text: nothing of a stop text is sent before it is known to be none.

Of several stop strings the one that is complete first wins, the longer one of two that end together; so the result does
not depend on how the text is cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one sequence.

    Attributes:
        found: the stop string that ended the text, None so far.
    """

    __slots__ = ("_firsts", "_held", "_include", "_stops", "found")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, may_end: bool = True) -> str:
        """Text that may be shown now; after a stop string is found, the last of it.

        Args:
            may_end: False for text of the first min_tokens: a stop string that is complete in it is text as any other.
        """
        if not self._held and self._firsts.isdisjoint(text):  # nearly every call
            return text
        known = len(self._held)
        text = self._held + text
        match: tuple[int, int, str] | None = None
        for stop in self._stops if may_end else ():
            start = text.find(stop, max(0, known - len(stop) + 1))  # what was complete before was not to end it
            if start >= 0 and (match is None or (start + len(stop), start) < match[:2]):
                match = (start + len(stop), start, stop)
        if match is not None:
            end, start, self.found = match
            self._held = ""
            return text[: end if self._include else start]
        shown = len(text) - self._possible(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held-back tail of a text that ended otherwise."""
        text, self._held = self._held, ""
        return text

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(text), len(stop) - 1), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

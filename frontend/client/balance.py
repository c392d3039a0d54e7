"""Which engine gets a request: one that has room now, with the lowest price: its load, less what it need not compute.

One unit, the token. A request counts for its prompt and its output (`EngineRequest.size`) from the moment it is sent
until it ends. A client counts its own requests, and each engine tells it what those of others add up to (`Load`); so
nothing is counted twice or subtracted, however late a report is.

An engine that was sent the start of a prompt has it in its prefix cache, probably: nobody says when it leaves. So a
client remembers a bounded number of the prompts' starts, the last used ones, and where they went.
"""

from collections import OrderedDict
from collections.abc import Sequence
from random import sample

from wavecore.frontend.client.engines import EngineState, Flight, RemoteEngine
from wavecore.frontend.client.request import EngineRequest

FIRST_PREFIX, LAST_PREFIX = 64, 16384  # tokens; a prompt is remembered at these lengths and the powers of two between
MAX_PREFIXES = 1 << 13
CACHED_WORTH = 8
"""An engine may have so many more tokens to do than another for each token of a prompt that it has cached. More than 1,
as those that run share its steps, and most end before they write all that they are counted for."""


class Balance:
    """Chooses engines for the requests of one client."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self._engines = sample(engines, len(engines))  # clients that know nothing yet begin at different ones
        self._holders: OrderedDict[int, set[int]] = OrderedDict()  # prefix -> engines that were sent it

    def choose(self, flight: Flight) -> RemoteEngine | None:
        """The engine for a request; of equals, the one whose turn is longest ago. None: none is up that may take it."""
        request, worth = flight.mailbox.request, dict[int, int]()
        for level, prefix in enumerate(flight.prefixes):
            worth |= dict.fromkeys(self._holders.get(prefix, ()), CACHED_WORTH * (FIRST_PREFIX << level))

        def price(engine: RemoteEngine) -> tuple[bool, int, int]:
            return len(request.prompt) > engine.room, engine.load - worth.get(engine.index, 0), engine.turn

        may = [e for e in self._engines if request.options.data_parallel_rank in (None, e.index)]
        return min((engine for engine in may if engine.state is EngineState.UP), key=price, default=None)

    def prefixes(self, request: EngineRequest) -> list[int]:
        """Names of a prompt's first 64, 128, 256 ... tokens with its cache salt, of which two that clash do no harm.
        Empty where there is nothing to choose, or nothing cached."""
        caching = len(self._engines) > 1 and any(e.resolved.get("enable_prefix_caching") for e in self._engines)
        if not caching or request.prompt_embeds is not None:
            return []
        names, start, end = [hash(request.options.cache_salt)], 0, FIRST_PREFIX
        while end <= min(len(request.prompt), LAST_PREFIX):
            names.append(hash((names[-1], request.prompt[start:end].tobytes())))
            start, end = end, 2 * end
        return names[1:]

    def sent(self, flight: Flight, engine: RemoteEngine) -> None:
        """Count a request that was sent to an engine."""
        engine.turn = 1 + max(other.turn for other in self._engines)
        engine.own_tokens += flight.mailbox.request.size
        engine.room -= len(flight.mailbox.request.prompt)
        engine.unstarted[flight.mailbox] = None
        for prefix in flight.prefixes:
            self._holders.setdefault(prefix, set()).add(engine.index)
            self._holders.move_to_end(prefix)
        while len(self._holders) > MAX_PREFIXES:
            self._holders.popitem(last=False)

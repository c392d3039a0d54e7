"""How ranks in lockstep agree on their next forward pass, on pauses and on their end: the rules, without any I/O.

Ranks whose forward passes share collectives must run the same number of them. So before each one all ranks *vote*, and
each decides the same from all votes. A *wave* is the time between two moments in which all of them are idle. Nobody
coordinates, and no message starts or ends a wave: the first vote of a wave is what wakes the other ranks.

    idle:     clear my bell; take in what came; `joins`? else sleep until the bell rings
    running:  take in what came; plan a step; publish `vote`; if the wave begins here, ring all bells;
              wait for the votes of all ranks; `decide`:
              a step anywhere -> one forward pass on every rank, of at least the agreed size, real or dummy
              a graph is due anywhere -> every rank captures one when its steps are back, before its next vote
              no work anywhere, or paused -> the wave is over; else go on

A vote must stay readable while its rank is one agreement ahead: each rank needs two places for votes, used in turn.
A dummy in flight may count as work, because it launches no further one: only a step that somebody planned does.

The rules were checked exhaustively for small groups (tests/parallel/test_wave_model.py). Who does the I/O:
`transport/processes/votes.py`; who lives by it: `engine_core/loop/dp_proc.py`.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Wish(IntEnum):
    """What one rank asks of all. An agreement grants one: of those that anybody has, the highest."""

    NONE = 0
    RESUME = 1
    LEAVE = 2
    PAUSE = 4


class Vote(NamedTuple):
    """What a rank says in an agreement.

    Attributes:
        work: 1 if it has requests or steps in flight; also while it is paused.
        wishes: the sum of those of `Wish` that were not granted yet.
        rows, tokens, max_query_len: of the step that it planned, at least 1; 0 if it planned none.
        eager: 1 if that step cannot run from CUDA graphs: then no rank's does, as what ranks do together is replayed by
            all of them or by none.
        capture: 1 if it is time that ranks capture a graph. Counts as work.
    """

    work: int
    wishes: int
    rows: int = 0
    tokens: int = 0
    max_query_len: int = 0
    eager: int = 0
    capture: int = 0


class Wave:
    """One rank's view of its group. After the same agreement it is equal on all ranks, but for `wishes`.

    Attributes:
        agreements: how many were voted in; the number of the last one.
        number: waves that ended.
        running: a wave is on: there will be a further agreement.
        paused: nobody plans steps.
        draining: no rank takes new requests; the group leaves when all are done.
        left: it has left; there is no further agreement.
        settling: a pause or an end was granted just now. The next agreement follows at once and confirms it: that all
            devices are idle, or that nothing came in through a door that was closing.
        wishes: of this rank, not granted yet.
        captures: the last agreement was that all ranks capture a graph.
    """

    __slots__ = (
        "_voted_work", "agreements", "captures", "draining", "left",
        "number", "paused", "running", "settling", "wishes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.agreements = self.number = self.wishes = 0
        self.running = self.paused = self.draining = self.left = self.settling = self._voted_work = False
        self.captures = False

    def ask(self, wish: Wish) -> None:
        """Vote for it until an agreement grants it. Of a pause and its end, both not granted yet, the later counts."""
        if wish != Wish.LEAVE:
            self.wishes &= Wish.LEAVE
        self.wishes |= wish

    def joins(self, work: bool, in_flight: bool, peer_voted: bool) -> bool:
        """Whether this rank votes now.

        Args:
            work: it has requests or steps in flight.
            in_flight: it has steps in flight. A paused rank votes when they are back, so that the votes of a paused
                group say that its devices are idle.
            peer_voted: another rank has voted in the next agreement.
        """
        if self.left or (self.paused and in_flight):
            return False
        # In a draining group that is paused, requests end without a step: the last rank to run out of them ends it.
        emptied = self.draining and self._voted_work and not work
        return self.running or peer_voted or bool(self.wishes) or (work and not self.paused) or emptied

    def vote(
        self,
        work: bool,
        rows: int = 0,
        tokens: int = 0,
        max_query_len: int = 0,
        eager: bool = False,
        capture: bool = False,
    ) -> Vote:
        """This rank's vote in the next agreement, to be published under its number `agreements`."""
        self.agreements += 1
        self.running, self._voted_work = True, work
        return Vote(work, self.wishes, rows, tokens, max_query_len, eager, capture)

    def decide(self, votes: Sequence[Vote]) -> tuple[int, int, int, bool] | None:
        """Act on the votes of all ranks in the last agreement.

        Returns:
            The least (rows, tokens, max_query_len) of the forward pass that every rank runs now, and whether it is
            eager; None if there is none. A step that was planned before a pause was granted runs.
        """
        before = self.paused, self.draining
        work = any(vote.work for vote in votes)
        wishes = 0
        for vote in votes:
            wishes |= vote.wishes
        granted = next((wish for wish in (Wish.PAUSE, Wish.LEAVE, Wish.RESUME) if wishes & wish), Wish.NONE)
        self.wishes &= ~granted
        self.draining |= granted == Wish.LEAVE
        self.paused = granted == Wish.PAUSE or (self.paused and granted != Wish.RESUME)
        self.settling = (self.paused, self.draining) > before
        self.left = before[1] and not work
        self.running = not self.left and ((work and not self.paused) or self.settling)
        self.number += not self.running
        rows, tokens, max_query_len, eager, captures = map(max, zip(*(vote[2:] for vote in votes), strict=True))
        self.captures = bool(captures)
        return (rows, tokens, max_query_len, bool(eager)) if rows else None

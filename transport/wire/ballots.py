"""Votes as messages: what a rank knows of an agreement, whom it tells, and what it answers. No I/O and no clock.

Ranks on several hosts are a star: each has a connection to the *head*, rank 0, which passes votes on. Messages may be
lost, doubled or overtaken, since connections break; so nothing counts on a message, but all on three rules:

- a rank tells the head its vote; the head passes the first vote of an agreement on, which wakes the others, and all of
  them when it has them all;
- a rank that waits says now and then what it knows (`again`), to whomever it lacks a vote of;
- whoever hears that and knows more answers with all that it knows; also of the agreement before its own last one, which
  a peer may still wait in.

A rank votes in k + 1 when it has all votes of k, so a peer is one agreement ahead or behind at most: what is told of
others is of no use. Checked exhaustively (tests/parallel/test_vote_link_model.py).
"""

from collections.abc import Mapping, Sequence

Vote = tuple[int, ...]
Told = dict[int, Vote]
"""Votes by rank."""


class Ballots:
    """One rank's part.

    Args:
        rank: this one.
        voters: all ranks, the head first.

    Attributes:
        agreement: the last one that this rank voted in.
    """

    def __init__(self, rank: int, voters: Sequence[int]) -> None:
        head, *others = voters
        self.rank, self.agreement = rank, 0
        self._voters = frozenset(voters)
        self.peers: Sequence[int] = others if rank == head else [head]
        self._is_head = rank == head
        self._known: dict[int, Told] = {}
        self._told: dict[tuple[int, int], set[int]] = {}  # (agreement, peer): whose votes it knows, if nothing is lost

    def votes(self, agreement: int) -> Mapping[int, Vote]:
        """Those that are known, by rank."""
        return self._known.get(agreement, {})

    def missing(self) -> set[int]:
        """Ranks whose vote in this rank's last agreement is not known; while there are any, this rank waits."""
        return set(self._voters - self.votes(self.agreement).keys()) if self.agreement else set()

    def wakes(self, agreement: int) -> bool:
        """After `publish` or `take`: whether this rank has something to do, as the agreement begins or is complete."""
        return agreement > self.agreement or not self.missing()

    def publish(self, agreement: int, vote: Vote) -> list[int]:
        """This rank votes. Returns the peers to `tell`."""
        self.agreement = agreement
        self._known = {number: votes for number, votes in self._known.items() if number >= agreement - 1}
        self._told = {key: ranks for key, ranks in self._told.items() if key[0] >= agreement - 1}
        return self._learn(agreement, {self.rank: vote})

    def take(self, peer: int, agreement: int, votes: Told, again: bool) -> list[int]:
        """A peer says what it knows. Returns the peers to `tell`."""
        if peer not in self.peers or abs(agreement - self.agreement) > 1 or not votes.keys() <= self._voters:
            return []
        told = self._told.setdefault((agreement, peer), set())
        if again:
            told.clear()
        told.update(votes)
        return self._learn(agreement, votes, peer if again else None)

    def tell(self, peer: int, agreement: int) -> Told:
        """What to say to a peer, which counts as told."""
        known = self._known.setdefault(agreement, {})
        self._told.setdefault((agreement, peer), set()).update(known)
        return dict(known)

    def repeat(self) -> list[int]:
        """The peers to tell once more, and ask, because this rank waits."""
        missing = self.missing()
        return [peer for peer in self.peers if not self._is_head or peer in missing] if missing else []

    def _learn(self, agreement: int, votes: Told, asks: int | None = None) -> list[int]:
        known = self._known.setdefault(agreement, {})
        known.update(votes)
        return [peer for peer in self.peers if self._is_due(agreement, peer, known, peer == asks)]

    def _is_due(self, agreement: int, peer: int, known: Told, asks: bool) -> bool:
        told = self._told.get((agreement, peer), set())
        if not known.keys() - told:
            return False
        # The head passes on what wakes, and what ends the wait; of a rank, all that the head lacks is its own vote.
        return asks or not self._is_head or not told or len(known) == len(self._voters)

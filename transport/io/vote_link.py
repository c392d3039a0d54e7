"""Votes of ranks in lockstep on several hosts: what `transport/processes/votes.py` is on one, over their link.

`wire/ballots.py` has the rules.
"""

from collections.abc import Sequence
from typing import Any

from wavecore.transport.io.host_link import HostLink, RankPlace
from wavecore.transport.wire.ballots import Ballots, Vote
from wavecore.transport.wire.messages import Message, Votes


class VoteLink(HostLink):
    """`publish`, `wait`, `has_begun` and `ring_others` are the main loop's, as of `VoteBoard`.

    Args:
        place, further: those of `HostLink`.
    """

    def __init__(self, place: RankPlace, *further: Any) -> None:
        self._ballots = Ballots(place.rank, place.voters)
        super().__init__(place, *further)
        self._awaited = place.voters

    def publish(self, agreement: int, vote: Vote) -> None:
        with self._turn_of():
            self._tell(self._ballots.publish(agreement, tuple(map(int, vote))), agreement)

    def has_begun(self, agreement: int) -> bool:
        self._check()
        return bool(self._ballots.votes(agreement))

    def ring_others(self) -> None:
        """Nothing: the vote itself rings."""

    def wait(self, agreement: int) -> list[Vote]:
        """The votes of all ranks, when all are there.

        Raises:
            EngineDead: the group's life is over.
        """
        votes, voters = self._ballots.votes, self.place.voters
        late = next((rank for rank in voters if rank != self.place.rank and rank not in votes(agreement)), None)
        self._sleep_until(lambda: len(votes(agreement)) == len(voters), late)
        self._check()
        return [votes(agreement)[rank] for rank in voters]

    # --- with the lock ------------------------------------------------------------------------------------------------

    def _on_message(self, rank: int, message: Message) -> None:
        if isinstance(message, Votes):
            self._tell(self._ballots.take(rank, message.agreement, message.votes, message.again), message.agreement)

    def _tell(self, ranks: Sequence[int], agreement: int, again: bool = False) -> None:
        for rank in ranks:
            self._send(rank, Votes(self.life, agreement, self._ballots.tell(rank, agreement), again))
        if self._ballots.wakes(agreement):
            self._wake()

    def _repeat(self) -> None:
        if lacking := self._ballots.repeat():
            self._tell(lacking, self._ballots.agreement, again=True)

"""Votes in shared memory: what is read is whole and of the agreement that was asked for; nobody waits for the dead."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.support.group_memory import make_group

from wavecore.transport.errors import EngineDead
from wavecore.transport.processes import votes
from wavecore.transport.processes.votes import VoteBoard

VOTE = (1, 0, 5, 600, 7, 1, 0)


@pytest.fixture
def boards() -> Iterator[list[VoteBoard]]:
    """Of the three ranks of a group, all in this process."""
    with ExitStack() as stack:
        yield [VoteBoard(group) for group in make_group(3, stack)]


def test_two_agreements_can_be_read_at_once_and_older_ones_are_gone(boards: list[VoteBoard]) -> None:
    one, two, _ = boards
    for agreement in range(1, 8):
        one.publish(agreement, (agreement, *[0] * 6))
        assert two.read(0, agreement) == (agreement, *[0] * 6)
        assert two.read(0, agreement + 1) is two.read(0, agreement - 2) is two.read(1, agreement) is None
        assert agreement == 1 or two.read(0, agreement - 1) == (agreement - 1, *[0] * 6)
        assert two.has_begun(agreement) and not two.has_begun(agreement + 1) and not one.has_begun(agreement)


@pytest.mark.parametrize("word", range(votes._SLOT))
def test_a_vote_of_which_any_word_is_old_is_no_vote(boards: list[VoteBoard], word: int) -> None:
    """On ARM a reader may see writes in another order than they were made in."""
    one, two, _ = boards
    one.publish(3, (0, 6, 1, 1, 1, 0, 1))
    at = one._slot(0, 3) + word
    old = one._group.words[at]
    one.publish(5, VOTE)
    new, one._group.words[at] = one._group.words[at], old
    assert two.read(0, 5) is two.read(0, 3) is None
    one._group.words[at] = new
    assert two.read(0, 5) == VOTE


def test_waiting_names_the_rank_and_ends_with_the_last_vote(boards: list[VoteBoard]) -> None:
    one, two, three = boards
    found: list[list[tuple[int, ...]]] = []
    one.publish(1, VOTE)
    three.publish(1, VOTE)
    one._group.progress.busy(True)
    waiting = threading.Thread(target=lambda: found.append(one.wait(1)))
    waiting.start()
    deadline = time.monotonic() + 30
    while one._group.progress.waits_for != 1:
        assert time.monotonic() < deadline
    assert not found
    two.publish(1, VOTE)
    waiting.join(30)
    assert found == [[VOTE] * 3] and one._group.progress.waits_for is None


def test_a_rank_that_ended_is_not_waited_for(boards: list[VoteBoard]) -> None:
    one, two, three = boards
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ended:
        two._group.words[votes._WORDS] = ended.pid
        one.publish(1, VOTE)
        two.publish(1, VOTE)
        three.publish(1, VOTE)
        assert one.wait(1) == [VOTE] * 3
        three.publish(2, VOTE)
        one.publish(2, VOTE)
        threading.Timer(0.1, lambda: ended.communicate(b"\n")).start()
        with pytest.raises(EngineDead, match=rf"rank 1 \(pid {ended.pid}\) ended before its vote in agreement 2"):
            one.wait(2)
    with pytest.raises(EngineDead, match="rank 1"):  # nor one whose process id is free again
        three.wait(2)


def test_a_bell_that_rings_before_the_sleep_is_heard(boards: list[VoteBoard]) -> None:
    one, two, _ = boards
    looks: list[bool] = []
    one.ring_others()
    two._group.sleep_until(lambda: bool(looks.append(True)) or len(looks) == 2)  # type: ignore[func-returns-value]
    two._group.sleep_until(lambda: False, seconds=0.01)

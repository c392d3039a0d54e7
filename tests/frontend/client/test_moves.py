"""Whatever engines and connections do while requests move: one end each, each token once, and books that balance."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frontend.client.fake_engine import FakePump, World

from wavecore.frontend.client.engines import EngineState
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.transport.wire.messages import Abort, Add, FinishReason, Load, Utility

ENGINES = 3
MUCH = 1 << 20


@dataclass
class Job:
    """A choice at an engine: how far its tokens are, and when they end."""

    request: int
    choice: int
    known: int
    max_tokens: int
    told: bool = False


@dataclass
class Engine:
    """What one engine has received, and what it has said that is still on its way."""

    jobs: dict[int, Job] = field(default_factory=dict)
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)

    def clear(self) -> None:
        for store in (self.jobs, self.inbox, self.outbox):
            store.clear()


def token(request: int, choice: int, place: int) -> int:
    return 10_000 * request + 100 * choice + place


class Site:
    """A client, and engines that do what they are told to, one event after the other."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(FakePump, "call_later", lambda *_: None)
        self.world = World(self.patch, engines=ENGINES)
        self.requests = self.world.client._requests
        self.remotes = list(self.world.client._engines.values())
        self.engines = [Engine() for _ in range(ENGINES)]
        self.sent = 0  # of what the pump took, that is in the engines' inboxes
        self.mailboxes: list[Mailbox] = []
        self.deaths: Counter[int] = Counter()  # of engines that had the request when they died

    # --- the engines' side ----------------------------------------------------------------------------------------

    def carry(self) -> None:
        """What the client sent is on its way to the engine's present session."""
        for index, message in self.world.pump.sent[self.sent :]:
            self.engines[index].inbox.append(message)
        self.sent = len(self.world.pump.sent)

    def receive(self, engine: Engine) -> None:
        self.carry()
        if not engine.inbox:
            return
        message: Add | Abort | Utility = engine.inbox.popleft()
        if isinstance(message, Add):
            prompt = self.world.prompt_of(message)
            known = int(message.options.get("emitted", 0))
            for i in range(message.params.get("n", 1)):
                job = Job(prompt[0], i, known, message.params["max_tokens"])
                assert engine.jobs.setdefault(message.handle + i, job) is job, "a handle twice in one session"
        elif isinstance(message, Abort):
            ended = [handle for handle in message.handles.tolist() if engine.jobs.pop(handle, None)]
            engine.outbox.append(([(handle, [], int(FinishReason.ABORT)) for handle in ended], {}))

    def compute(self, engine: Engine, handle: int) -> None:
        job = engine.jobs[handle]
        new = token(job.request, job.choice, job.known)
        job.known += 1
        ends = job.known >= job.max_tokens
        extras = {} if job.told else {0: {"seed": 1}}
        job.told = True
        engine.outbox.append(([(handle, [new], int(FinishReason.LENGTH) if ends else 0)], extras))
        if ends:
            del engine.jobs[handle]

    def speak(self, index: int, room: int, others: int) -> None:
        engine = self.engines[index]
        waiting = sum(not job.told for job in engine.jobs.values())
        rows, extras = engine.outbox.popleft() if engine.outbox else ([], {})
        self.world.pump.step(index, rows, extras, load=Load(others, waiting, room))

    def is_up(self, index: int) -> bool:
        return self.remotes[index].state is EngineState.UP

    def restart(self, index: int) -> None:
        self.carry()
        self.engines[index].clear()
        self.world.pump.new_life(index)

    # --- what happens ---------------------------------------------------------------------------------------------

    def submit(self, random: Random) -> None:
        for _ in range(random.randint(1, 4)):
            n = random.choice([1, 1, 2])
            options: Any = {
                "max_tokens": random.randint(1, 5),
                "n": n,
                "resume": n == 1 and random.random() < 0.5,
                "rank": random.choice([None, None, None, 0, 1]),
            }
            prompt = [len(self.mailboxes), *[1] * random.randint(1, 200)]
            self.mailboxes.append(self.world.submit(prompt, OutputKind.CUMULATIVE, **options))

    def receive_some(self, random: Random) -> None:
        engine = random.choice(self.engines)
        for _ in range(random.randint(1, 6)):
            self.receive(engine)

    def compute_one(self, random: Random) -> None:
        engine = random.choice(self.engines)
        if engine.jobs:
            self.compute(engine, random.choice(list(engine.jobs)))

    def speak_up(self, random: Random) -> None:
        index = random.randrange(ENGINES)
        if self.is_up(index):
            self.speak(index, random.choice([0, 100, MUCH]), random.choice([0, 0, 500, 5000]))

    def abort(self, random: Random) -> None:
        if self.mailboxes:
            self.world.client.abort(random.choice(self.mailboxes))

    def die(self, random: Random) -> None:
        index = random.randrange(ENGINES)
        if self.is_up(index):
            here = {job.request for job in self.engines[index].jobs.values()}
            self.deaths.update(request for request in here if not self.mailboxes[request].ended)
            self.carry()
            self.world.kill(index)
            self.carry()  # what goes to others; nothing reaches this one
            self.engines[index].clear()

    def come_back(self, random: Random) -> None:
        index = random.randrange(ENGINES)
        if self.remotes[index].state is EngineState.DOWN:
            self.restart(index)

    def forget_the_client(self, random: Random) -> None:
        index = random.randrange(ENGINES)
        if self.is_up(index):
            self.carry()
            self.engines[index].clear()
            self.world.pump.new_session(index)

    def reconnect(self, random: Random) -> None:
        index = random.randrange(ENGINES)
        if self.is_up(index):
            self.world.pump.disconnect(index)
            self.world.pump.reconnect(index)

    def end(self) -> None:
        """In peace everything ends."""
        for _ in range(30):
            for index, engine in enumerate(self.engines):
                if self.remotes[index].state is EngineState.DOWN:
                    self.restart(index)
                self.carry()
                while engine.inbox:
                    self.receive(engine)
                for handle in list(engine.jobs):
                    self.compute(engine, handle)
                while engine.outbox:
                    self.speak(index, MUCH, 0)

    # --- what holds -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.check_books()
        for number, mailbox in enumerate(self.mailboxes):
            for choice in mailbox._choices:
                assert choice.emitted == [token(number, choice.index, i) for i in range(len(choice.emitted))]
                assert choice.finish != "length" or len(choice.emitted) == mailbox.request.params.max_tokens
        for request, count in self.deaths.items():
            assert count < 2 or (count == 2 and self.mailboxes[request].ended), "what may be the cause is sent again"

    def check_books(self) -> None:
        flights = self.requests._flights.values()
        for remote in self.remotes:
            here = [flight.mailbox for flight in flights if flight.at and flight.at.engine is remote]
            assert remote.own_tokens == sum(mailbox.request.size for mailbox in here)
            assert remote.unstarted.keys() <= set(here)
        stays = [stay for flight in flights for stay in (flight.at, flight.left) if stay]
        assert all(stay.handles for stay in stays)
        assert sorted(self.requests._rows) == sorted(handle for stay in stays for handle in stay.handles)


OFTEN = [Site.submit, Site.receive_some, Site.compute_one, Site.speak_up]
EVENTS = [*OFTEN * 4, Site.abort, Site.die, Site.come_back, Site.forget_the_client, Site.reconnect]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 999)), min_size=50, max_size=100))
@settings(max_examples=80)
def test_whatever_happens_while_requests_move(events: list[tuple[Any, int]]) -> None:
    site = Site()
    try:
        for event, seed in events:
            event(site, Random(seed))
            site.check()
        site.end()
        site.check()
        assert all(mailbox.ended for mailbox in site.mailboxes) and not site.world.client.num_live
        assert not site.requests._rows and not site.requests._flights
    finally:
        site.world.client.close()
        site.patch.undo()

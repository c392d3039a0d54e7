"""One engine whose ranks lie on two hosts: one failure domain, whatever happens to a host or to the network."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import LIMITS
from tests.faults.test_hosts import PATIENT, deaf, passing, weak
from tests.faults.test_tensor_parallel import SETTINGS
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.lockstep_hosts import one_engine_settings, started
from tests.support.rank_faults import Fault, environment_of_ranks
from tests.support.waiting import two_free_ports, until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.engines import EngineState
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import EngineEntry
from wavecore.transport.processes.supervisor import Limits

pytestmark = pytest.mark.slow
RUN, WAIT = ([{"prompt_token_ids": prompt} for prompt in prompts(n, seed=n)] for n in (4, 2))  # as many as slots, more
LONG = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
Start = Callable[..., Any]


class Hosts:
    """Two hosts, and a client of each.

    Attributes:
        right: the tokens of `RUN`, then of `WAIT`, when nothing goes wrong.
    """

    def __init__(self, clients: list[LLM], proxy: Any) -> None:
        self.clients, self.proxy = clients, proxy
        self.right = self.generate()
        self.epoch = self.engine(0).epoch

    def generate(self) -> list[list[int]]:
        outputs = self.clients[0].generate([*RUN, *WAIT], LONG, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def engine(self, host: int) -> EngineEntry:
        """As that host knows it."""
        return deployment.read(self.clients[host].runtime_dir).engines[0]

    def pid(self, rank: int) -> int:
        return self.engine(rank).ranks[rank].pid

    @contextmanager
    def broken(self, says: str, of_other: str, go_on: bool = True) -> Iterator[None]:
        """Streams that have begun when something happens end with an error that says this, those without a token go on,
        or end, too. The other host knows why. Then both are in a new life, and answer right."""
        begun = [self.clients[0].stream(prompt, LONG) for prompt in RUN]
        first = [next(stream).outputs[0].token_ids for stream in begun]
        waiting = [self.clients[0].stream(prompt, LONG) for prompt in WAIT]
        yield
        for stream, right, got in zip(begun, self.right, first, strict=False):
            tokens = list(got)
            with pytest.raises(EngineDead, match=says):
                for output in stream:
                    tokens += output.outputs[0].token_ids
            assert tokens == right[: len(tokens)]
        for stream, right in zip(waiting, self.right[len(RUN) :], strict=True):
            with nullcontext() if go_on else pytest.raises(EngineDead, match=says):
                assert [token for output in stream for token in output.outputs[0].token_ids] == right
        causes = [until(lambda host=host: self.engine(host).last_cause) for host in range(2)]  # type: ignore[misc]
        assert of_other in causes[1].message
        for host in range(2):
            until(lambda host=host: (now := self.engine(host)).state == "ready" and now.epoch != self.epoch)  # type: ignore[misc]
        assert self.engine(0).epoch == self.engine(1).epoch
        assert self.generate() == self.right


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`with start() as hosts:`; with `via` the second host connects through a proxy. A file "fault" in `tmp_path` is a
    fault of a rank's."""
    for name, value in environment_of_ranks(tmp_path).items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def make(limits: Limits = LIMITS, via: Any = None) -> Iterator[Hosts]:
        model = str(save_model(tmp_path / "model", make_config("Qwen3", num_attention_heads=4)))
        port = two_free_ports()
        with ExitStack() as stack:
            proxy = None if via is None else stack.enter_context(via(port))
            own = one_engine_settings(tmp_path, 2, port)
            if proxy:
                own[1]["data_parallel_address"] = f"tcp://127.0.0.1:{proxy.port}"
            configs = [EngineConfig(model=model, tensor_parallel_size=2, **SETTINGS, **each) for each in own]
            clients = stack.enter_context(started([make_supervisor(config, limits) for config in configs]))
            yield Hosts(clients, proxy)

    return make


RANK = ["rank 0 on 127.0.0.", "rank 1 on 127.0.0.3"]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank(start: Start, rank: int) -> None:
    """An engine over two hosts loses a rank (kill -9); rank 0 is the one that clients talk to.

    Streams end with `EngineDead`, which names the rank and its host; both hosts start their ranks again, which meet in
    a new life, and requests without a token go on there.
    """
    with start() as hosts:
        says = "signal 9" if rank == 0 else RANK[1]
        with hosts.broken(says, RANK[0] if rank == 0 else "signal 9"):
            os.kill(hosts.pid(rank), signal.SIGKILL)


def test_rank_of_another_host_that_raises(start: Start, tmp_path: Path) -> None:
    """A rank of an engine on another host than its clients' meets an exception.

    Streams get it, with the rank, its host and the error.
    """
    with (
        start() as hosts,
        hosts.broken(r"rank 1 on 127\.0\.0\.3: RuntimeError: as this test wants", "RuntimeError: as this test wants"),
    ):
        Fault(1, "step", "raise").write(tmp_path / "fault")


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_host(start: Start, rank: int) -> None:
    """One of the two hosts of an engine stops (SIGSTOP of all that runs on it), and goes on later.

    After 10 s of silence the other ends, and names its rank and host. When it goes on it is told that its life is over,
    ends, and meets the other in the next one. A stopped rank 0 is to clients as any engine that is out of reach.
    """
    with start(limits=PATIENT) as hosts:
        pid, other = hosts.pid(rank), 1 - rank
        says = r"rank 1 on 127\.0\.0\.3 was silent" if rank else r"engine 0 at 127\.0\.0\.2 has been out of reach"
        with hosts.broken(says, "on 127.0.0.", go_on=rank == 1):
            os.kill(pid, signal.SIGSTOP)
            until(lambda: hosts.engine(other).state != "ready")
            assert f"rank {rank} on 127.0.0." in str(hosts.engine(other).last_cause)
            if rank == 0:  # the client comes to its own verdict at about the same time
                [engine] = hosts.clients[0]._service.client._engines.values()
                until(lambda: engine.state is EngineState.UNREACHABLE)
            os.kill(pid, signal.SIGCONT)


def test_half_open_network(start: Start) -> None:
    """The network between the two hosts of an engine carries nothing for a while, and no connection breaks.

    After 10 s both sides end, and each names the other. They meet in a new life when the network carries again.
    """
    with start(via=weak) as hosts, hosts.broken(r"rank 1 on 127\.0\.0\.3 was silent for 10 s", RANK[0]):
        hosts.proxy.change = deaf
        for host in range(2):
            until(lambda host=host: hosts.engine(host).state != "ready")  # type: ignore[misc]
            assert "was silent for 10 s" in str(hosts.engine(host).last_cause)
        hosts.proxy.change = passing


def test_connections_that_break(start: Start) -> None:
    """Connections between the two hosts of an engine break again and again, and come back.

    No request is lost, and no token wrong.
    """
    with start(via=weak) as hosts:
        streams = [hosts.clients[0].stream(prompt, LONG) for prompt in RUN]
        found = [list[int]() for _ in streams]
        for step, outputs in enumerate(zip(*streams, strict=False)):
            if step % 30 == 10:
                hosts.proxy.reset()
            for tokens, output in zip(found, outputs, strict=True):
                tokens += output.outputs[0].token_ids
        assert [tokens[:100] for tokens in found] == [right[:100] for right in hosts.right[: len(RUN)]]
        assert hosts.generate() == hosts.right
        assert [hosts.engine(host).restarts for host in range(2)] == [0, 0]
        assert hosts.proxy.connections > 3


@pytest.mark.parametrize("host", [0, 1])
def test_sigterm_to_one_host(start: Start, host: int) -> None:
    """One of the two hosts of an engine gets SIGTERM.

    The engine drains: running requests finish, and then the ranks of both hosts end in order.
    """
    with start() as hosts:
        before = [hosts.engine(number) for number in range(2)]
        streams = [hosts.clients[0].stream(prompt, LONG) for prompt in RUN]
        first = [next(stream).outputs[0].token_ids for stream in streams]
        os.kill(hosts.pid(host), signal.SIGTERM)
        for stream, right, got in zip(streams, hosts.right, first, strict=False):
            assert [*got, *(token for output in stream for token in output.outputs[0].token_ids)] == right
        for number, old in enumerate(before):
            cause = until(lambda number=number, old=old: (now := hosts.engine(number)).epoch == old.epoch and now.cause)  # type: ignore[misc]
            assert (cause.signal, cause.status) == (0, 0)

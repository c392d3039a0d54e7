"""One engine whose ranks lie on two hosts, 127.0.0.2 and 127.0.0.3, each with a supervisor of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_lockstep_hosts import listeners
from tests.e2e.test_tensor_parallel import ASKED, SETTINGS
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.lockstep_hosts import one_engine_settings, started
from tests.support.model_engine import ModelEngine
from tests.support.waiting import two_free_ports

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.cli import status
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import ConfigError, ModelError, WavecoreError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.supervisor import Supervisor

MORE: dict[str, Any] = {**SETTINGS, "kv_cache_memory_gib": 0.01, "check_ranks": True}


def supervisors(folder: Path, ranks: int = 2, **of_other: Any) -> list[Supervisor]:
    """Of two hosts, whose ranks compare what they do in every step; the second may have settings of its own."""
    model = str(save_model(folder / "model", make_config("Qwen3", num_attention_heads=4)))
    common = {"model": model, "tensor_parallel_size": ranks, **MORE}
    one, other = one_engine_settings(folder, 2, two_free_ports())
    return [make_supervisor(EngineConfig(**{**common, **each})) for each in (one, {**other, **of_other})]


def tokens(llm: LLM) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(9, seed=4)]
    outputs = llm.generate(asked, [ASKED[i % 3] for i in range(9)], use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def right_tokens(model: Path) -> list[list[int]]:
    engine = ModelEngine(model, **SETTINGS)
    for i, prompt in enumerate(prompts(9, seed=4)):
        engine.add(prompt, ASKED[i % 3])
    return [output.tokens for output in engine.run().values()]


def test_an_engine_over_two_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens of one rank, for clients of either host; both show all ranks; no process listens anywhere else. The
    model lies under another path on each."""
    (tmp_path / "other").symlink_to("model")
    with started(supervisors(tmp_path, model=str(tmp_path / "other"))) as (one, other):
        assert tokens(one) == tokens(other) == right_tokens(tmp_path / "model")
        for number, llm in enumerate((one, other)):
            [entry] = deployment.read(llm.runtime_dir).engines
            assert [(rank.rank, rank.host) for rank in entry.ranks] == [(0, "127.0.0.2"), (1, "127.0.0.3")]
            pids = [rank.pid for rank in entry.ranks]
            assert pids[number] and not pids[1 - number] and entry.host == "127.0.0.2"
            capsys.readouterr()
            assert status.run([str(llm.runtime_dir)]) == 0
            shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]]
            assert shown == [["0", "127.0.0.2", "0"], ["0", "127.0.0.3", "1"]]
            assert all(ip_address(address).is_loopback for address in listeners(llm))


@pytest.mark.slow
def test_two_ranks_on_each_host(tmp_path: Path) -> None:
    """Four ranks; those of one host do not meet in its memory, but over the link as well."""
    with started(supervisors(tmp_path, ranks=4)) as (one, other):
        assert tokens(one) == tokens(other) == right_tokens(tmp_path / "model")
        [entry] = deployment.read(other.runtime_dir).engines
        assert [(rank.rank, bool(rank.pid)) for rank in entry.ranks] == [(0, False), (1, False), (2, True), (3, True)]


@pytest.mark.parametrize(
    ("given", "kind", "reason", "of_head"),
    [
        ({"model": "/nowhere"}, ModelError, "/nowhere", r"rank 1 on 127\.0\.0\.3: model '/nowhere' is no folder"),
        ({"max_num_seqs": 4}, ConfigError, r"rank 1 on 127\.0\.0\.3 and rank 0 .* max_num_seqs 4", "stopped before"),
        ({"check_ranks": False}, ConfigError, r"check_ranks False.* -- and .*check_ranks True", "stopped before"),
    ],
    ids=["model", "settings", "of_workers"],
)
def test_a_host_that_does_not_fit(
    tmp_path: Path, given: dict[str, Any], kind: type[WavecoreError], reason: str, of_head: str
) -> None:
    """Each host says why: what cannot be loaded ends the start on both; one with other settings is waited for."""
    head, other = supervisors(tmp_path, **given)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(head.start)
        with pytest.raises(kind, match=reason):
            other.start()
        if kind is ConfigError:
            assert not starting.done()
            head.stop()
        with pytest.raises(WavecoreError, match=of_head):
            starting.result(30)


def test_another_model(tmp_path: Path) -> None:
    """Of another shape the ranks would compute nonsense, or wait for each other for ever."""
    wider = save_model(tmp_path / "wider", make_config("Qwen3", num_attention_heads=4, hidden_size=64))
    head, other = supervisors(tmp_path, model=str(wider))
    says = r"wider' on 127\.0\.0\.3 is another model than that of rank 0: hidden_size=64, and there hidden_size=48"
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(head.start)
        with pytest.raises(ModelError, match=says):
            other.start()
        with pytest.raises(WavecoreError, match=says):
            starting.result(30)

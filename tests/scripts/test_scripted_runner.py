"""The scripted model itself: what other tests rely on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_runner import Script, ScriptedRunner
from tests.support.scheduler_driver import SchedulerDriver, make_add

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.startup.factory import make_runner, make_worker
from wavecore.transport.errors import ModelError


def test_scripts_by_first_token_then_eos() -> None:
    driver = SchedulerDriver(Script(eos_token_id=2, scripts={"5": [7, 8, 9], "*": [1]}))
    driver.add(0, [5, 1, 1], max_tokens=10)
    driver.add(1, [6], max_tokens=10)
    driver.run()
    assert driver.outputs == {0: [7, 8, 9, 2], 1: [1, 2]}


def test_reads_through_the_block_table() -> None:
    """Overwriting one cached position changes the next token."""
    tokens = []
    for damage in (False, True):
        driver = SchedulerDriver(Script(eos_token_id=[], num_blocks=8), async_scheduling=False)
        driver.add(0, [5] * 20, max_tokens=3, temperature=0.0)
        driver.step()
        if damage:
            block = driver.core.requests.slots.at(0).blocks[0]
            driver.runner.blocks[block, 3] ^= 1
        driver.run()
        tokens.append(driver.outputs[0])
    assert tokens[0][0] == tokens[1][0] and tokens[0][1:] != tokens[1][1:]


def test_the_made_up_device_takes_its_time() -> None:
    config = EngineConfig(model="scripted:")
    core = EngineCore(config, ScriptedRunner(config, script=Script(step_seconds=0.02)))
    core.add(core.admit(make_add(0, [1, 2], max_tokens=3, ignore_eos=True)))
    start = time.monotonic()
    while core.has_work:
        core.step()
    assert time.monotonic() - start >= 0.06


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab": 3}'])
def test_unreadable_scripts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"script\.json"):
        ScriptedRunner(EngineConfig(model=f"scripted:{path}"))
    with pytest.raises(ModelError, match=r"nowhere\.json"):
        ScriptedRunner(EngineConfig(model="scripted:nowhere.json"))


def test_load_faults_and_progress(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"vocab_size": 9}))
    seen: list[tuple[str, float]] = []
    ScriptedRunner(EngineConfig(model=f"scripted:{path}"), lambda phase, fraction: seen.append((phase, fraction)))
    assert seen == [("load", 0.0), ("load", 1.0), ("kv_cache", 0.0), ("kv_cache", 1.0)]
    with pytest.raises(ModelError, match="bad weights"):
        ScriptedRunner(EngineConfig(), script=Script(faults={"load_error": "bad weights"}))


@pytest.mark.parametrize(("how", "status"), [({"code": 3}, 3), ({"signal": 9}, -9)])
def test_exit_at_a_phase(how: dict[str, int], status: int, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"faults": {"exit_at_phase": {"phase": "kv_cache", **how}}}))
    code = (
        "import sys\nfrom wavecore.engine_core.api.config import EngineConfig\n"
        "from scripted_runner import ScriptedRunner\nassert 'torch' not in sys.modules\n"
        f"ScriptedRunner(EngineConfig(model='scripted:{path}'))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == status


def test_without_the_scripts_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package has no scripted models, and says where they are."""
    monkeypatch.setitem(sys.modules, "scripted_runner", None)
    for start in (make_runner, make_worker):
        with pytest.raises(ModelError, match="put scripts/ of a checkout on PYTHONPATH"):
            start(EngineConfig(model="scripted:"), lambda *_: None, None)  # type: ignore[arg-type]

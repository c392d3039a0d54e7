"""`launch` on CUDA never waits for the device, and a steady step allocates nothing and copies once each way."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.scenarios import SCENARIOS, arrive, chunk_of, launch_ahead, several, sleep
from tests.gpu.steps import make, prompt, recorded
from tests.support.checkpoints import make_config, save_model
from tests.support.environment import environment
from tests.support.model_driver import ModelDriver
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution import step_extras, uploads
from wavecore.engine_core.plan import OutOfMemory, PendingStep, StepPlan

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    "edited": {"logit_bias": {3: 1.0}, "repetition_penalty": 1.2, "bad_words_token_ids": [[1, 2]]},
    "logprobs": {"logprobs": 4},
}


@pytest.fixture(scope="module")
def runner(tiny_llama: Path) -> Any:
    return make(tiny_llama)


def use_small_ring(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads in pieces of 256 bytes, four of them; and changes of the tables that do not fit the step's vector."""
    monkeypatch.setattr(uploads, "PIECE", 256)
    monkeypatch.setattr(uploads, "PIECES", 4)
    monkeypatch.setattr(uploads, "LARGE", 1)  # so that some prompts are packed, and some are not
    ring = uploads.Uploads(runner.device)
    for owner in (runner.state, runner.state.input, runner.state.sampling):
        monkeypatch.setattr(owner, "uploads", ring)
    monkeypatch.setattr(runner.state.input, "room", 8)  # changes


def without_graphs(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.graphs.clear()
    monkeypatch.setattr(runner.graphs, "most", 0)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_launch_waits_for_nothing(runner: Any, name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are launched while the device sleeps, and what the host brings arrives before it is read."""
    if not graphs:
        without_graphs(runner, monkeypatch)
    monkeypatch.setattr(step_extras, "LOGPROB_CHUNK", 8)  # 20 rows with logprobs: three parts
    driver = ModelDriver(runner)
    with recorded(runner) as steps:  # which also takes from the device what the allocator has not got yet
        driver.run(SCENARIOS[name](driver), chunk=chunk_of(name))
    assert len(steps) > 1 or name.startswith("pooling")
    launch_ahead(runner, steps, asleep=True)


@pytest.mark.parametrize("small", [False, True], ids=["large ring", "small ring"])
def test_requests_begin_while_an_older_step_sleeps(runner: Any, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they bring is written at once, as uploads wait for no step, and disturbs none in flight."""
    if small:
        use_small_ring(runner, monkeypatch)
    with recorded(runner) as steps:
        arrive(ModelDriver(runner))
    assert [len(plan.new_requests) for plan, _ in steps[:5]] == [4, 4, 4, 1, 0]
    launch_ahead(runner, steps, asleep=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("dtype", "vocab"), [("float32", 211), ("bfloat16", 12_000), ("bfloat16", 151_936), ("float16", 151_936)]
)
def test_no_request_loads_a_kernel(tmp_path: Path, dtype: str, vocab: int) -> None:
    """The start loaded all of them, whatever a request asks for: see `late_loads`. torch picks kernels by dtype and
    vocabulary, too."""
    folder = save_model(tmp_path / "model", make_config("Llama", vocab_size=vocab), scale=0.1)
    command = [sys.executable, "-m", "tests.gpu.late_loads", str(folder), dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(CUDA_MODULE_LOADING="LAZY")
    )
    assert done.returncode == 0, done.stderr[-3000:]
    late = json.loads(done.stdout)
    assert late.pop("probe"), "the program does not see a kernel that is loaded late"
    assert len(late) == len(SCENARIOS) and not any(late.values()), {
        name: steps for name, steps in late.items() if steps
    }


def test_two_steps_of_a_deep_model_are_launched_while_the_device_sleeps(tmp_path: Path) -> None:
    """As many layers as models of 8B parameters have: the kernels of two steps fit the queue of launches."""
    config = make_config("Llama", num_hidden_layers=36)
    runner = make(save_model(tmp_path / "model", config, scale=0.1))
    driver = ModelDriver(runner)
    with recorded(runner) as steps:
        driver.run(several(8)(driver))
    assert len(steps) == 3
    launch_ahead(runner, steps, asleep=True)


def test_a_step_out_of_memory_waits_for_those_in_flight(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dropped and their slots given away: what is brought for the next owners must come behind them."""
    driver = ModelDriver(runner)
    without_graphs(runner, monkeypatch)
    with recorded(runner) as steps:
        driver.run(several(4)(driver))
    (first, _), (second, _), _ = steps
    awake = sleep()
    event = runner.launch(first).fetched.event
    assert not awake.query() and not event.query()

    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runner.model, "forward", failing)
    with pytest.raises(OutOfMemory):
        runner.launch(second)
    assert event.query()


@contextmanager
def no_waiting(runner: Any) -> Iterator[None]:
    """torch raises where a launch waits for the device."""
    launch = runner.launch

    def launching(plan: StepPlan) -> PendingStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)  # type: ignore[no-any-return]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        patch.setattr(runner, "launch", launching)
        yield


def test_the_debug_mode_sees_a_wait(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ModelDriver(runner)
    without_graphs(runner, monkeypatch)
    [sequence] = several(1)(driver)
    driver.step([sequence])
    forward = runner.model.forward

    def waiting(*args: Any) -> Any:
        args[0].sum().item()
        return forward(*args)

    monkeypatch.setattr(runner.model, "forward", waiting)
    with no_waiting(runner), pytest.raises(RuntimeError, match="synchroniz"):
        driver.step([sequence])


def allocations() -> tuple[int, int]:
    """Made so far on the device and of pinned memory, by the system and not by torch's caches."""
    return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]


@pytest.mark.parametrize("name", OPTIONS)
def test_steady_steps_neither_wait_nor_allocate(runner: Any, name: str) -> None:
    """50 steps of 8 rows, two in flight, which enter new blocks on the way."""
    with recorded(runner) as steps:
        run_long(ModelDriver(runner), name)
    assert len(steps) == 70
    launch_ahead(runner, steps[:20], asleep=False)
    before = allocations()
    with no_waiting(runner):
        launch_ahead(runner, steps[20:], asleep=False)
    assert allocations() == before


def run_long(driver: ModelDriver, name: str) -> None:
    """70 steps of 8 rows."""
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 1000} | OPTIONS[name])
    driver.run([driver.add(prompt(i, 9 + i), 70, i, params) for i in range(8)])


class Crossings(TorchDispatchMode):
    """Operations between host and device.

    Attributes:
        found: the device that each writes to, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        # inference mode hands over compound operations whole
        if "cuda" in devices and func.overloadpacket.__name__ in ("item", "is_nonzero", "_local_scalar_dense"):
            self.found.append("number")
        elif len(devices) > 1:
            self.found.append(result.device.type)
        return result


def test_crossings_are_seen() -> None:
    x, y = torch.zeros(3, device="cuda"), torch.ones(2)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode, Crossings() as crossings:
            x[:2].copy_(y)
            x[:2] = y
            x.cpu()
            float(x[0])
            bool(x[0])
            x[:1].add_(x[1:2]).add_(1)
        assert crossings.found == ["cuda", "cuda", "cpu", "number", "number"]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_steady_step_is_one_copy_in_and_one_out(runner: Any, name: str) -> None:
    with recorded(runner) as steps:
        run_long(ModelDriver(runner), name)
    new_blocks = 0
    for step, (plan, _) in enumerate(steps):
        with Crossings() as crossings:
            pending = runner.launch(plan)
        pending.wait()
        if step:
            assert crossings.found == ["cuda", "cpu"], step
            new_blocks += len(plan.table)
    assert new_blocks > 20

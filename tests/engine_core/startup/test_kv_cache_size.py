"""Sizing the KV cache on made-up GPUs and on the host: what is measured, refused, and starts when it is suggested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st
from tests.support.model_driver import load
from tests.support.suggestions import suggestions

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.models.files import ModelSource
from wavecore.engine_core.models.spec import ModelSpec, Rope
from wavecore.engine_core.plan import OutOfMemory, RunnerInfo
from wavecore.engine_core.startup import kv_cache_size, loader
from wavecore.engine_core.startup.free_memory import host_memory
from wavecore.engine_core.startup.kv_cache_size import allocate_kv_cache, fitting_gib
from wavecore.engine_core.startup.memory_budget import GIB, MARGIN, SLACK, MemoryBudget, refused
from wavecore.parallel.collectives import ALONE
from wavecore.transport.errors import ConfigError, ResourceError, WavecoreError

MIB = 1 << 20
CUDA = torch.device("cuda:0")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LOWER = "lower max_num_batched_tokens and max_num_seqs"


def untold(_phase: str, _fraction: float) -> None:
    """Nobody hears of the start's progress."""


def spec(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, length: int) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_model_len=length,
        rms_norm_eps=1e-5,
        tied=False,
        windows=(0,) * layers,
        ropes=(Rope(theta=1e4, dim=128, settings={}),),
        rope_of_layer=(0,) * layers,
        scale=1.0,
    )


SPECS = {
    "8B": spec(128_256, 4096, 14_336, 32, 32, 8, 131_072),
    "0.6B": spec(151_936, 1024, 3072, 28, 16, 8, 40_960),
    "tiny": spec(32_000, 256, 1024, 4, 8, 2, 4096),
}


# --- a made-up GPU ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU, and what steps really take of it.

    Attributes:
        others: bytes that others hold.
        a_token: bytes that a step takes for each token, besides its logits.
        noise: bytes by which a later start measures more than the first.
        loaded: bytes of kernels that are loaded while steps run.
    """

    total: int
    others: int
    a_token: int
    noise: int = 0
    loaded: int = 300 * MIB

    def activations(self, model: ModelSpec, config: EngineConfig) -> int:
        return 64 * MIB + self.a_token * config.max_num_batched_tokens + 4 * model.vocab_size * config.max_num_seqs

    def tables(self, model: ModelSpec, config: EngineConfig, length: int) -> int:
        rotary = 4 * length * sum(rope.dim for rope in model.ropes)
        a_row = 4 * model.vocab_size + 12 * length + 100_000
        return rotary + a_row * config.max_num_seqs + 600 * config.max_num_batched_tokens


class Device:
    """torch.cuda's view of a GPU while one engine starts; out of memory where there is none."""

    def __init__(self, total: int, others: int, patch: pytest.MonkeyPatch) -> None:
        self.total, self.others, self.reserved, self.peak, self.weights = total, others, 0, 0, 0
        values: dict[str, Any] = {
            "empty_cache": lambda *_: None,
            "synchronize": lambda *_: None,
            "memory_reserved": lambda _device: self.reserved,
            "max_memory_reserved": lambda _device: self.peak,
            "reset_peak_memory_stats": lambda _device: setattr(self, "peak", self.reserved),
            "get_device_properties": lambda _device: SimpleNamespace(total_memory=self.total),
            "mem_get_info": lambda _device: (max(0, self.total - self.others - self.reserved), self.total),
        }
        for name, value in values.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(kv_cache_size, "gc", SimpleNamespace(collect=lambda: None))  # slow, and nothing to collect

    def use(self, size: int) -> None:
        """Take and give back: the peak remains."""
        self.take(size)
        self.reserved -= size

    def take(self, size: int) -> None:
        if size and self.reserved + size > self.total - self.others:
            self.peak = max(self.peak, self.total - self.others)  # some of it was there
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.reserved += size
        self.peak = max(self.peak, self.reserved)


class Runner:
    """What sizing reads of a runner."""

    def __init__(self, on: Device | None, model: ModelSpec, length: int, block_size: int, dtype: str) -> None:
        self.device, self.on, self.kv_cache = CUDA, on, SimpleNamespace(nbytes=0)
        self.block_bytes = model.kv_values_per_token * block_size * DTYPES[dtype].itemsize
        self.state = SimpleNamespace(max_blocks=-(-length // block_size))
        self.model = SimpleNamespace(group=ALONE, least=int, spec=model)
        self.info = RunnerInfo(0, 0, block_size, length, model.vocab_size, model.hidden_size, (), dtype, "cuda:0")

    def memory_stats(self) -> dict[str, int]:
        assert self.on is not None
        return {"weights_bytes": self.on.weights}

    def allocate(self, num_blocks: int) -> None:
        if self.on is not None:
            self.on.reserved -= self.kv_cache.nbytes
            self.kv_cache.nbytes = 0
            self.on.take(num_blocks * self.block_bytes)
        self.kv_cache.nbytes = num_blocks * self.block_bytes
        self.info = replace(self.info, num_blocks=num_blocks)

    def allocate_swap_space(self, num_blocks: int) -> None:
        self.info = replace(self.info, num_host_blocks=num_blocks)


def start(gpu: Gpu, model: ModelSpec, config: EngineConfig, noise: int = 0, crowd: int = 0) -> Runner:
    """Start an engine as the loader does.

    Args:
        noise: bytes that steps take more.
        crowd: bytes that others take between measuring and allocating.
    """
    with pytest.MonkeyPatch.context() as patch:
        device = Device(gpu.total, gpu.others, patch)

        def warm_up(_runner: Any, config: EngineConfig) -> None:
            device.others += gpu.loaded
            device.use(gpu.activations(model, config) + noise)
            device.others += crowd

        def reserve_graphs() -> int:
            graphs = gpu.activations(model, replace(config, max_num_batched_tokens=config.max_num_seqs))
            device.take(graphs)
            return graphs

        patch.setattr(kv_cache_size, "warm_up", warm_up)
        measure = kv_cache_size.measure

        def before_the_crowd(*args: Any) -> tuple[MemoryBudget, str]:
            budget, reason = measure(*args)
            return replace(budget, others=budget.others - crowd), reason

        patch.setattr(kv_cache_size, "measure", before_the_crowd)
        dtype = DTYPES[config.dtype]
        loader.check_weights(ModelSource(Path("model"), model, ()), model, dtype, CUDA)
        device.weights = model.num_parameters * dtype.itemsize
        device.take(device.weights)
        block_size = config.block_size or loader.choose_block_size(model.kv_values_per_token * dtype.itemsize)
        length = loader._max_model_len(config, model, block_size, dtype, CUDA)
        with refused("the tables of all requests do not fit into memory", LOWER):
            device.take(gpu.tables(model, config, length))
        runner = Runner(device, model, length, block_size, config.dtype)
        runner.reserve_graphs = reserve_graphs
        allocate_kv_cache(runner, config, untold)  # type: ignore[arg-type]
        return runner


def refusal(gpu: Gpu, model: ModelSpec, config: EngineConfig, **more: int) -> WavecoreError | None:
    try:
        start(gpu, model, config, **more)
    except (ConfigError, ResourceError) as error:
        return error
    return None


# --- measuring --------------------------------------------------------------------------------------------------------

Measure = Callable[..., tuple[MemoryBudget, str]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """measure(error) loads 15 GiB of weights, 1 GiB of tables, and runs steps that take 2 GiB and keep 1 GiB."""

    def run(error: Exception | None = None, **settings: Any) -> tuple[MemoryBudget, str]:
        device = Device(24 * GIB, 3 * GIB, monkeypatch)
        device.weights = 15 * GIB
        device.take(16 * GIB)

        def warm_up(*_: object) -> None:
            device.use(2 * GIB)
            device.take(GIB)
            if error is not None:
                raise error

        def reserve_graphs() -> int:
            device.take(3 * GIB)  # behind the steps, and no part of what they take
            return 3 * GIB + 100 * MIB

        monkeypatch.setattr(kv_cache_size, "warm_up", warm_up)
        runner: Any = Runner(device, SPECS["tiny"], 4096, 16, "bfloat16")
        runner.reserve_graphs = reserve_graphs
        return kv_cache_size.measure(runner, EngineConfig(**settings), untold)

    return run


def test_what_is_measured(measure: Measure) -> None:
    got = measure(gpu_memory_utilization=0.8)
    assert got == (MemoryBudget(24 * GIB, 0.8, 15 * GIB, GIB, 2 * GIB + SLACK, 3 * GIB + 100 * MIB, 3 * GIB), "")
    assert measure(custom_ops={"silu_mul": "m:f"})[0].graphs == 0  # a user's kernel is not captured
    assert measure(enforce_eager=True)[0].graphs == 0
    assert measure(num_gpu_blocks_override=9)[0].utilization == 1  # which counts for more than the share


def failed_capture() -> Exception:
    """What torch raises where memory runs out while a graph is captured."""
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("the capture failed")
    except RuntimeError as error:
        return error


def test_steps_that_do_not_fit_while_measuring(measure: Measure) -> None:
    budget, reason = measure(OutOfMemory("a step of 9 rows and 9 tokens does not fit: CUDA out of memory"))
    assert reason.startswith("a step of 9 rows") and budget.weights == 15 * GIB
    assert measure(RuntimeError("CUDA error: out of memory\nmore lines"))[1] == "CUDA error: out of memory"
    assert measure(failed_capture())[1] == "CUDA out of memory"
    fault_in_the_code = AssertionError("wrong")
    fault_in_the_code.__context__ = MemoryError()
    for error in (RuntimeError("no kernel image"), fault_in_the_code):
        with pytest.raises(type(error), match=str(error)):
            measure(error)


# --- sizing -----------------------------------------------------------------------------------------------------------

HALF_MIB_A_TOKEN = replace(SPECS["tiny"], num_layers=128, num_kv_heads=2, max_model_len=8192)  # 2 MiB a block of 16


def gib(total: float, utilization: float, weights: float, activations: float, others: float) -> MemoryBudget:
    sizes = {"total": total, "weights": weights, "activations": activations, "others": others}
    whole = {name: int(size * GIB) for name, size in sizes.items()}
    return MemoryBudget(utilization=utilization, tables=0, graphs=0, **whole)


def exactly(blocks: int) -> MemoryBudget:
    """Room for so many blocks of 2 MiB, on a device that has no more."""
    return MemoryBudget(10 * GIB + blocks * 2 * MIB, 1.0, 10 * GIB - SLACK, 0, SLACK, graphs=0, others=0)


Size = Callable[..., tuple[Runner, int]]


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> Size:
    """size(budget, settings) sizes the KV cache with this measurement; returns the runner and its blocks."""

    def run(measured: MemoryBudget, reason: str = "", **settings: Any) -> tuple[Runner, int]:
        config = EngineConfig(**{"max_model_len": 8192, "gpu_memory_utilization": measured.utilization, **settings})
        runner = Runner(None, HALF_MIB_A_TOKEN, config.max_model_len or 8192, 16, "bfloat16")
        assert runner.block_bytes == 2 * MIB
        budget = replace(measured, utilization=1.0) if config.num_gpu_blocks_override else measured
        monkeypatch.setattr(kv_cache_size, "measure", lambda *_: (budget, reason))
        allocate_kv_cache(runner, config, untold)  # type: ignore[arg-type]
        return runner, runner.info.num_blocks

    return run


def refused_size(size: Size, measured: MemoryBudget, kind: type[Exception] = ConfigError, **settings: Any) -> str:
    with pytest.raises(kind) as error:
        size(measured, **settings)
    assert "GPU memory" in str(error.value) and "left free" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("measured", "utilization"),
    [
        (gib(139.8, 0.10, 15.01, 2.28, 0.67), "0.14"),
        (gib(24, 0.5, 15.01, 1.5, 0.7), "0.74"),
        (gib(139.8, 0.1, 15.01, 2.28, 70.0), "0.14"),
        (gib(139.8, 0.45, 15.01, 2.28, 125.0), None),
        (gib(139.8, 0.90, 15.01, 2.28, 125.0), None),
    ],
)
def test_the_share_that_would_fit(measured: MemoryBudget, utilization: str | None, size: Size) -> None:
    if utilization is None:
        message = refused_size(size, measured, ResourceError)
        assert "no setting makes room" in message and "125.00 GiB  others: CUDA context, and other proc" in message
    else:
        assert f"gpu_memory_utilization {utilization}" in refused_size(size, measured)
        runner, blocks = size(replace(measured, utilization=float(utilization)))
        assert blocks >= runner.state.max_blocks + 1


def test_a_shorter_length_that_would_fit(size: Size) -> None:
    measured = gib(24, 0.75, 15.01, 2.5, 0.7)
    share, shorter = suggestions(refused_size(size, measured, max_model_len=8192))
    blocks = (measured.kv_cache - MARGIN) // (2 * MIB)
    assert list(share) == ["gpu_memory_utilization"] and shorter == {"max_model_len": 16 * (blocks - 1)}


def test_steps_are_to_be_lowered_where_nothing_can_be_computed(size: Size) -> None:
    """With what is missing; nobody has measured by how much they must be lower."""
    message = refused_size(size, gib(24, 0.95, 15.01, 3.5, 5.6))  # others leave no larger share
    assert f"would hold 0 blocks of 16 tokens and needs 513: 1.11 GiB are missing; {LOWER}\nGPU" in message
    message = refused_size(size, gib(24, 0.9, 15, 2, 1), reason="a step of 9 rows")
    assert f"the largest step does not fit beside the weights: a step of 9 rows; {LOWER}\n" in message
    no_room = gib(24, 0.9, 15, 2, 8.7)  # not even for the smallest steps
    assert "a step of 9 rows, and no setting makes" in refused_size(
        size, no_room, ResourceError, reason="a step of 9 rows"
    )


def test_the_null_block_comes_on_top_of_a_sequence(size: Size) -> None:
    """The least cache holds both; without a length, sequences fit beside it."""
    assert size(exactly(513))[1] == 513
    refused_size(size, exactly(512))
    runner, blocks = size(exactly(100), max_model_len=None)
    assert blocks == 100 and runner.info.max_model_len == 99 * 16


def test_the_cache_takes_the_whole_share_for_cached_prefixes_and_no_more_than_is_useful_without(size: Size) -> None:
    measured = gib(139.8, 0.9, 1, 2, 0.6)
    _, blocks = size(measured, max_num_seqs=8)
    assert blocks == measured.kv_cache // (2 * MIB)
    _, blocks = size(measured, max_num_seqs=8, enable_prefix_caching=False)
    assert blocks == 8 * 512 + 1


def test_the_cache_of_a_tiny_model_is_bounded(monkeypatch: pytest.MonkeyPatch, size: Size) -> None:
    monkeypatch.setattr(kv_cache_size, "MOST_CACHED", 10_000)
    _, blocks = size(gib(139.8, 0.9, 1, 2, 0.6), max_num_seqs=1)
    assert blocks == 10_000
    _, blocks = size(gib(139.8, 0.9, 1, 2, 0.6), max_num_seqs=32)
    assert blocks == 32 * 512 + 1


def test_an_override_goes_before_the_share_but_not_beyond_the_device(size: Size) -> None:
    measured = gib(24, 0.1, 15, 2, 1)
    _, blocks = size(measured, num_gpu_blocks_override=3000)
    assert blocks == 3000
    message = refused_size(size, measured, num_gpu_blocks_override=4000)
    assert "would hold 3072 blocks of 16 tokens and needs 4000: 1.81 GiB are missing; it would fit with" in message
    [settings] = suggestions(message)
    most = settings["num_gpu_blocks_override"]
    assert 3000 < most < 4000 and size(measured, **settings)[1] == most
    for full in (gib(24, 0.9, 15, 0.25, 8.9), exactly(MARGIN // (2 * MIB) + 1)):  # nothing, and the null block alone
        assert "no setting makes room" in refused_size(size, full, ResourceError, num_gpu_blocks_override=100)


def test_the_start_tells_where_the_memory_is(size: Size, caplog: pytest.LogCaptureFixture) -> None:
    measured = gib(24, 0.9, 15, 2, 1)
    with caplog.at_level("INFO", "wavecore"):
        _, blocks = size(measured)
    assert measured.table(blocks, 2 * MIB) in caplog.messages


# --- what is suggested starts -----------------------------------------------------------------------------------------


def gpu_with(name: str, config: EngineConfig, others: int, spare: int, **more: int) -> Gpu:
    """A GPU with some bytes to spare beside the weights, which may be too few."""
    weights = SPECS[name].num_parameters * DTYPES[config.dtype].itemsize
    return Gpu(total=max(GIB, weights + others + spare), others=others, **more)


lengths = st.none() | st.integers(1, 4096)
steps = st.tuples(st.integers(1, 70_000), st.integers(1, 20_000)).map(lambda pair: (max(pair), min(pair)))
configs = st.builds(
    lambda step, **more: EngineConfig(max_num_batched_tokens=step[0], max_num_seqs=step[1], **more),
    step=st.sampled_from([(8192, 256), (2048, 64)]) | steps,
    dtype=st.sampled_from(["bfloat16", "float32"]),
    max_model_len=lengths,
    gpu_memory_utilization=st.sampled_from([0.005, 0.1, 0.3, 0.5, 0.9, 0.95, 1.0]),
    num_gpu_blocks_override=st.none() | st.integers(2, 100_000),
    enable_prefix_caching=st.booleans(),
)
names = st.sampled_from(sorted(SPECS))
starts = st.tuples(names, configs).flatmap(
    lambda start: st.tuples(
        st.builds(
            partial(gpu_with, *start),
            others=st.sampled_from([GIB, 40 * GIB]) | st.integers(0, 100 * GIB),
            spare=st.integers(-GIB, 5 * GIB) | st.integers(GIB, 40 * GIB),
            a_token=st.integers(1000, 400_000),
            noise=st.integers(0, MARGIN // 2),
            loaded=st.integers(0, GIB // 2),
        ),
        st.just(start[0]),
        st.just(start[1]),
    )
)
LARGE_STEPS = Gpu(24 * GIB, GIB, 200_000)


@settings(max_examples=300)
@given(starts)
@example((replace(LARGE_STEPS, total=40 * GIB), "8B", EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.41)))
@example((LARGE_STEPS, "8B", EngineConfig(dtype="float32")))
def test_every_suggestion_starts(start_: tuple[Gpu, str, EngineConfig]) -> None:
    """Whatever does not fit: settings that are said to fit make a start that works, though it measures a bit more."""
    gpu, name, config = start_
    model = SPECS[name]
    error = refusal(gpu, model, config)
    assume(error is not None)
    found = suggestions(str(error))
    assert isinstance(error, ConfigError if found or LOWER in str(error) else ResourceError)
    event(f"{str(error).split(' do', 1)[0][:24]}: {' | '.join('+'.join(each) for each in found)}")
    for each in found:
        changed = replace(config, **each)
        assert changed != config
        if "dtype" in each:  # known before anything is loaded: that smaller weights fit, no more
            assert "the weights of" not in str(refusal(gpu, model, changed))
            continue
        runner = start(gpu, model, changed, gpu.noise)
        assert runner.info.num_blocks >= 2
        if changed.max_model_len:
            enough = 1 + -(-changed.max_model_len // runner.info.block_size)
            assert changed.num_gpu_blocks_override or runner.info.num_blocks >= enough


SMALLEST: dict[str, Any] = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "gpu_memory_utilization": 1.0}


@settings(max_examples=60)
@given(starts)
def test_no_setting_is_said_to_help_only_where_none_does(start_: tuple[Gpu, str, EngineConfig]) -> None:
    gpu, name, config = start_
    model, least = SPECS[name], replace(config, **SMALLEST)
    if least.max_model_len:
        least = replace(least, max_model_len=1)
    if least.num_gpu_blocks_override:
        least = replace(least, num_gpu_blocks_override=2)
    error = refusal(gpu, model, config)
    crowded = replace(gpu, others=gpu.others + 2 * MARGIN)
    if isinstance(error, ResourceError):
        assert "no setting" in str(error)
        assert refusal(crowded, model, least) is not None


@pytest.mark.parametrize(
    ("changes", "total", "others", "kinds"),
    [
        ({"gpu_memory_utilization": 0.2}, 80, 1, ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 0.73}, 24, 0, ["gpu_memory_utilization", "max_model_len"]),
        ({"max_num_batched_tokens": 65_536}, 24, 1, LOWER),
        ({"max_num_batched_tokens": 32_768}, 24, 1, ["gpu_memory_utilization+max_model_len"]),
        ({"max_num_batched_tokens": 60_000, "max_num_seqs": 60_000}, 24, 1, LOWER),
        ({"max_model_len": 131_072, "gpu_memory_utilization": 0.5}, 24, 1, ["gpu_memory_utilization+max_model_len"]),
        ({"num_gpu_blocks_override": 30_000}, 40, 1, ["num_gpu_blocks_override"]),
        ({"num_gpu_blocks_override": 100, "max_num_batched_tokens": 65_536}, 24, 1, LOWER),
        ({"dtype": "float32"}, 24, 1, ["dtype"]),
        ({"dtype": "float32"}, 24, 12, []),
        ({"gpu_memory_utilization": 0.5}, 24, 8.8, []),
    ],
)
def test_suggestions_of_each_kind_of_refusal(
    changes: dict[str, Any], total: float, others: float, kinds: list[str] | str
) -> None:
    """What would help by itself; together what helps only together; nothing where nothing does."""
    device = Gpu(int(total * GIB), int(others * GIB), 200_000)
    config = EngineConfig(**{"dtype": "bfloat16", "max_model_len": 8192, **changes})
    error = refusal(device, SPECS["8B"], config)
    assert error is not None
    if kinds == LOWER:
        assert f"; {LOWER}" in str(error) and not suggestions(str(error))
    else:
        assert ["+".join(each) for each in suggestions(str(error))] == kinds, str(error)
        assert ("no setting makes room" in str(error)) == (not kinds)


def test_room_for_longer_tables_is_part_of_a_larger_share() -> None:
    """Without a max_model_len the token table grows with the cache that the share allows."""
    config = EngineConfig(dtype="bfloat16", max_num_seqs=20_000, max_num_batched_tokens=20_000)
    device = Gpu(60 * GIB, GIB, 10_000)
    error = refusal(device, SPECS["0.6B"], replace(config, gpu_memory_utilization=0.1))
    [each] = suggestions(str(error))
    start(device, SPECS["0.6B"], replace(config, **each))


def test_the_cache_that_others_took_meanwhile() -> None:
    """Between measuring and allocating somebody took 10 GiB: a new start counts with them."""
    gpu = Gpu(40 * GIB, GIB, 200_000)
    config = EngineConfig(dtype="bfloat16", max_model_len=8192)
    error = refusal(gpu, SPECS["8B"], config, crowd=10 * GIB)
    assert error is not None and "does not fit into memory: CUDA out of memory; start again: others" in str(error)
    assert "the KV cache of" in str(error)
    start(replace(gpu, others=11 * GIB), SPECS["8B"], config)


# --- the host ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(1, 10_000))
def test_a_suggested_size_of_a_cpu_cache_fits(block_bytes: int, need: int) -> None:
    suggested = fitting_gib(block_bytes * need)
    assert int(float(f"{suggested:g}") * GIB) // block_bytes >= need


def test_a_suggested_size_of_a_cpu_cache_starts(tiny_llama: Path) -> None:
    settings: dict[str, Any] = {"num_gpu_blocks_override": None, "max_model_len": 200}
    with pytest.raises(
        ConfigError, match="GiB are missing; it would fit with max_model_len 8, or kv_cache_mem"
    ) as error:
        load(tiny_llama, kv_cache_memory_gib=4e-5, **settings)
    for each in suggestions(str(error.value)):
        load(tiny_llama, **{"kv_cache_memory_gib": 4e-5, **settings, **each})


def test_swap_space_that_no_host_has(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tiny_llama, swap_space_gib=900_000)
    [each] = suggestions(str(error.value))
    assert list(each) == ["swap_space_gib"]
    assert 0 <= each["swap_space_gib"] * GIB < 0.7 * host_memory()[0]  # would take half of the host's memory at once


@pytest.mark.parametrize(("name", "value"), [("kv_cache_memory_gib", 9e9), ("num_gpu_blocks_override", (1 << 31) - 1)])
def test_a_cache_that_no_host_has(tiny_llama: Path, name: str, value: float) -> None:
    asked: dict[str, Any] = {"num_gpu_blocks_override": None, "block_size": 1 << 16, "enable_prefix_caching": False}
    asked |= {"max_num_seqs": 65_536, "max_num_batched_tokens": 65_536, name: value}
    with pytest.raises(ConfigError, match=f"the KV cache of .* does not fit into memory: .*; lower {name}$"):
        load(tiny_llama, **asked)

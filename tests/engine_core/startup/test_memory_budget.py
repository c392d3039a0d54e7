"""What a refusal suggests starts: engines start on made-up GPUs, are refused, and start again as they are told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st
from tests.support.ways_out import ways_out

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.models.spec import ModelSpec, Rope
from wavecore.engine_core.plan import RunnerInfo
from wavecore.engine_core.startup import free_memory, kv_cache_size, loader, measure
from wavecore.engine_core.startup.memory_budget import GIB, MARGIN
from wavecore.transport.errors import ConfigError, ResourceError, WavecoreError

MIB = 1 << 20
CUDA = torch.device("cuda:0")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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

    def __init__(self, gpu: Gpu, patch: pytest.MonkeyPatch) -> None:
        self.total, self.others, self.reserved, self.peak, self.weights = gpu.total, gpu.others, 0, 0, 0
        values: dict[str, Any] = {
            "empty_cache": lambda *_: None,
            "synchronize": lambda *_: None,
            "memory_reserved": lambda _device: self.reserved,
            "max_memory_reserved": lambda _device: self.peak,
            "reset_peak_memory_stats": lambda _device: setattr(self, "peak", self.reserved),
            "mem_get_info": lambda _device: (max(0, self.total - self.others - self.reserved), self.total),
        }
        for name, value in values.items():
            patch.setattr(torch.cuda, name, value)

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
    def __init__(self, gpu: Gpu, config: EngineConfig, model: ModelSpec, device: Device) -> None:
        dtype = DTYPES[config.dtype]
        block_size = config.block_size or loader.choose_block_size(model.kv_values_per_token * dtype.itemsize)
        self.block_bytes = model.kv_values_per_token * block_size * dtype.itemsize
        length = loader._max_model_len(config, model, block_size, dtype, CUDA)
        self.tables = gpu.tables(model, config, length)
        device.take(self.tables)
        self.state = SimpleNamespace(max_blocks=-(-length // block_size))
        self.model = SimpleNamespace(spec=model)
        self.info = RunnerInfo(
            0, 0, block_size, length, model.vocab_size, model.hidden_size, (), config.dtype, "cuda:0"
        )
        self.device, self.kv_cache, self.on = CUDA, SimpleNamespace(nbytes=0), device

    def __del__(self) -> None:
        if hasattr(self, "on"):
            self.on.reserved -= self.tables + self.kv_cache.nbytes

    def memory_stats(self) -> dict[str, int]:
        return {"weights_bytes": self.on.weights}

    def allocate(self, num_blocks: int, _host_blocks: int) -> None:
        self.on.reserved -= self.kv_cache.nbytes
        self.kv_cache.nbytes = 0
        self.on.take(num_blocks * self.block_bytes)
        self.kv_cache.nbytes = num_blocks * self.block_bytes
        self.info = replace(self.info, num_blocks=num_blocks)


def start(gpu: Gpu, model: ModelSpec, config: EngineConfig, noise: int = 0) -> Runner:
    """Start an engine as the loader does."""
    with pytest.MonkeyPatch.context() as patch:
        device = Device(gpu, patch)

        def warm_up(_runner: Any, config: EngineConfig) -> None:
            device.others += gpu.loaded * (device.others == gpu.others)
            device.use(gpu.activations(model, config) + noise)

        def graph_bytes(_runner: Any, config: EngineConfig) -> int:
            graphs = gpu.activations(model, replace(config, max_num_batched_tokens=config.max_num_seqs))
            device.use(graphs)
            return graphs

        patch.setattr(free_memory, "processes", lambda _device: "77 (9 MiB)")
        patch.setattr(kv_cache_size, "processes", lambda _device: "77 (9 MiB)")
        patch.setattr(measure, "gc", SimpleNamespace(collect=lambda: None))  # slow, and there is nothing to collect
        patch.setattr(measure, "warm_up", warm_up)
        patch.setattr(measure, "graph_bytes", graph_bytes)
        patch.setattr(measure, "largest_graph", lambda _runner, config: config)
        free_memory.check_weights(model, Path("model"), DTYPES[config.dtype], CUDA)
        device.weights = free_memory.weight_bytes(model, DTYPES[config.dtype])
        device.take(device.weights)

        def make(bounds: EngineConfig) -> Any:
            return Runner(gpu, bounds, model, device)

        return cast(Runner, kv_cache_size.sized_runner(make, config, config.dtype))


def refusal(gpu: Gpu, model: ModelSpec, config: EngineConfig) -> WavecoreError | None:
    try:
        start(gpu, model, config)
    except (ConfigError, ResourceError) as error:
        return error
    return None


def gpu_with(name: str, config: EngineConfig, others: int, spare: int, **more: int) -> Gpu:
    """A GPU with some bytes to spare beside the weights, which may be too few."""
    weights = free_memory.weight_bytes(SPECS[name], DTYPES[config.dtype])
    return Gpu(total=max(GIB, weights + others + spare), others=others, **more)


lengths = st.none() | st.integers(1, 4096)
shapes = st.tuples(st.integers(1, 70_000), st.integers(1, 20_000)).map(lambda pair: (max(pair), min(pair)))
configs = st.builds(
    lambda size, **more: EngineConfig(max_num_batched_tokens=size[0], max_num_seqs=size[1], **more),
    size=st.sampled_from([(8192, 256), (2048, 64)]) | shapes,
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


@settings(max_examples=400, deadline=None)
@given(starts)
@example((LARGE_STEPS, "8B", EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.5, max_num_batched_tokens=32_768)))
@example((LARGE_STEPS, "8B", EngineConfig(dtype="float32")))
@example((replace(LARGE_STEPS, others=0), "0.6B", EngineConfig(dtype="bfloat16", max_num_seqs=8192)))
@example((replace(LARGE_STEPS, total=40 * GIB), "8B", EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.41)))
def test_every_way_out_starts(start_: tuple[Gpu, str, EngineConfig]) -> None:
    """Whatever fails, every way out that it names is a start that works, though it measures a little more."""
    gpu, name, config = start_
    model = SPECS[name]
    error = refusal(gpu, model, config)
    assume(error is not None)
    ways = ways_out(str(error))
    assert isinstance(error, ConfigError if ways else ResourceError)
    event(f"{str(error).split(' do', 1)[0][:24]}: {' | '.join('+'.join(way) for way in ways)}")
    for way in ways:
        changed = replace(config, **way)
        assert changed != config
        if "dtype" in way:  # known before anything is loaded: that smaller weights fit, no more
            assert "the weights of" not in str(refusal(gpu, model, changed))
            continue
        runner = start(gpu, model, changed, gpu.noise)
        assert runner.info.num_blocks >= 2
        if changed.max_model_len:
            enough = 1 + -(-changed.max_model_len // runner.info.block_size)
            assert changed.num_gpu_blocks_override or runner.info.num_blocks >= enough


SMALLEST: dict[str, Any] = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "gpu_memory_utilization": 1.0}


LARGE_TABLES = EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.005, enable_prefix_caching=False)


@settings(max_examples=60, deadline=None)
@given(starts)
@example((Gpu(3_272_270_280, GIB, 1000, loaded=0), "0.6B", LARGE_TABLES))
def test_a_way_out_is_found_wherever_a_small_start_fits(start_: tuple[Gpu, str, EngineConfig]) -> None:
    gpu, name, config = start_
    model, least = SPECS[name], replace(config, **SMALLEST)
    if least.max_model_len:
        least = replace(least, max_model_len=1)
    if least.num_gpu_blocks_override:
        least = replace(least, num_gpu_blocks_override=2)
    error = refusal(gpu, model, config)
    crowded = replace(gpu, others=gpu.others + 2 * MARGIN)
    if error is not None and not ways_out(str(error)):
        dtypes = {config.dtype} if "perhaps dtype bfloat16" in str(error) else {config.dtype, "bfloat16"}
        assert all(refusal(crowded, model, replace(least, dtype=dtype)) is not None for dtype in dtypes)


STEPS = "max_num_batched_tokens+max_num_seqs"


@pytest.mark.parametrize(
    ("changes", "total", "others", "kinds"),
    [
        ({"gpu_memory_utilization": 0.2}, 80, 1, ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 0.73}, 24, 0, ["gpu_memory_utilization", "max_model_len"]),
        ({"max_num_batched_tokens": 65_536}, 24, 1, [STEPS]),
        ({"max_num_batched_tokens": 65_536, "gpu_memory_utilization": 0.5}, 24, 1, [f"{STEPS}+gpu_memory_utilization"]),
        ({"max_num_batched_tokens": 32_768}, 24, 1, [STEPS]),
        ({"max_num_batched_tokens": 60_000, "max_num_seqs": 60_000}, 24, 1, [STEPS]),
        ({"max_model_len": 131_072, "gpu_memory_utilization": 0.5}, 24, 1, ["gpu_memory_utilization+max_model_len"]),
        ({"num_gpu_blocks_override": 30_000}, 40, 1, ["num_gpu_blocks_override"]),
        ({"num_gpu_blocks_override": 100, "max_num_batched_tokens": 65_536}, 24, 1, [STEPS]),
        ({"dtype": "float32"}, 24, 1, ["dtype"]),
        ({"dtype": "float32"}, 24, 12, []),
        ({"gpu_memory_utilization": 0.5}, 24, 8.8, []),
    ],
)
def test_ways_out_of_each_kind_of_refusal(
    changes: dict[str, Any], total: float, others: float, kinds: list[str]
) -> None:
    """What would help by itself; together what helps only together; nothing where nothing does."""
    device = Gpu(int(total * GIB), int(others * GIB), 200_000)
    config = EngineConfig(**{"dtype": "bfloat16", "max_model_len": 8192, **changes})
    error = refusal(device, SPECS["8B"], config)
    assert error is not None
    assert ["+".join(way) for way in ways_out(str(error))] == kinds, str(error)
    assert ("no setting makes room" in str(error)) == (not kinds)


def test_smaller_steps_are_measured_beside_their_own_tables() -> None:
    """Tables of 4,096 requests leave no room for a step; those of fewer do."""
    config = EngineConfig(dtype="bfloat16", max_model_len=4096, max_num_seqs=4096, gpu_memory_utilization=1.0)
    tables = Gpu(0, 0, 1000).tables(SPECS["0.6B"], config, 4096)
    device = gpu_with("0.6B", config, GIB, tables + 500 * MIB, a_token=1000, loaded=0)
    error = refusal(device, SPECS["0.6B"], config)
    [way] = ways_out(str(error))
    assert "+".join(way) == STEPS and 1 < way["max_num_seqs"] < 4096
    start(device, SPECS["0.6B"], replace(config, **way))


def test_room_for_longer_tables_is_part_of_a_larger_share() -> None:
    """Without a max_model_len the token table grows with the cache that the share allows."""
    config = EngineConfig(dtype="bfloat16", max_num_seqs=20_000, max_num_batched_tokens=20_000)
    device = Gpu(60 * GIB, GIB, 10_000)
    error = refusal(device, SPECS["0.6B"], replace(config, gpu_memory_utilization=0.1))
    [way] = ways_out(str(error))
    start(device, SPECS["0.6B"], replace(config, **way))


def test_the_cache_that_others_took_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between measuring and allocating somebody took 10 GiB: what is suggested counts with them."""
    device = Gpu(40 * GIB, GIB, 200_000)
    config = EngineConfig(dtype="bfloat16", max_model_len=8192)
    crowd = replace(device, others=11 * GIB)
    for changes in ({}, {"num_gpu_blocks_override": 9000}):
        with monkeypatch.context() as patch:
            blocks = kv_cache_size._device_blocks

            def crowding(runner: Any, config: EngineConfig, blocks: Any = blocks) -> Any:
                found = blocks(runner, config)
                runner.on.others += 10 * GIB
                return found

            patch.setattr(kv_cache_size, "_device_blocks", crowding)
            error = refusal(device, SPECS["8B"], replace(config, **changes))
        assert error is not None and "the KV cache of" in str(error)
        [way] = ways_out(str(error))
        assert list(way) == list(changes or {"gpu_memory_utilization": 0})
        start(crowd, SPECS["8B"], replace(config, **way))

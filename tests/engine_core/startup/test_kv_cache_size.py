"""Sizing the KV cache: shares of a GPU, what is refused and with which way out. No GPU needed: numbers are given."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import load
from tests.support.ways_out import ways_out

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.plan import OutOfMemory, RunnerInfo
from wavecore.engine_core.startup import free_memory, kv_cache_size, loader
from wavecore.engine_core.startup import measure as measuring
from wavecore.engine_core.startup.memory_budget import GIB, MARGIN, Shares
from wavecore.transport.errors import ConfigError, ResourceError, WavecoreError

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("memory") / "model", make_config("Llama"))


def gib(total: float, utilization: float, weights: float, activations: float, others: float) -> Shares:
    sizes = {"total": total, "weights": weights, "activations": activations, "others": others}
    whole = {name: int(size * GIB) for name, size in sizes.items()}
    return Shares(utilization=utilization, tables=0, graphs=0, **whole)


def exactly(blocks: int) -> Shares:
    """Room for so many blocks of `FakeRunner`, on a device that has no more."""
    return Shares(10 * GIB + blocks * 2 * MIB, 1.0, weights=10 * GIB, tables=0, activations=0, graphs=0, others=0)


# --- shares -----------------------------------------------------------------------------------------------------------

shares = st.builds(
    Shares,
    total=st.integers(8 * GIB, 200 * GIB),
    utilization=st.integers(1, 100).map(lambda n: n / 100),
    weights=st.integers(0, 60 * GIB),
    tables=st.integers(0, 4 * GIB),
    activations=st.integers(0, 8 * GIB),
    graphs=st.integers(0, GIB),
    others=st.integers(0, 100 * GIB),
)


@given(shares, st.integers(0, 60 * GIB))
@example(Shares(100 * GIB, 0.5, 90 * GIB, 0, 0, 0, 0), 10 * GIB)  # the whole device
def test_a_suggested_share_fits_and_is_suggested_whenever_one_fits(given_: Shares, need: int) -> None:
    def room(hundredths: int) -> int:
        return replace(given_, utilization=hundredths / 100).kv_cache

    fitting = [n for n in range(1, 101) if room(n) >= need]
    suggested = given_.fitting_utilization(need)
    if suggested is None:
        assert not fitting or need == 0
    else:
        assert replace(given_, utilization=suggested).kv_cache >= need
        assert round(100 * suggested) == fitting[0] or need == 0


@given(shares)
def test_no_share_takes_what_others_hold_and_two_shares_do_not_add_up_to_more(given_: Shares) -> None:
    own = given_.weights + given_.tables + given_.activations + given_.graphs
    if given_.kv_cache:
        assert own + given_.kv_cache <= given_.total * given_.utilization
        assert own + given_.kv_cache + given_.others <= given_.total
    assert given_.kv_cache >= replace(given_, others=given_.others + GIB).kv_cache


def test_two_engines_of_one_gpu_have_a_share_each() -> None:
    """The second finds the first's memory taken, and its own share whole."""
    first = gib(139.8, 0.45, 15, 2.3, 0.6)
    own = 15 + 2.3 + first.kv_cache / GIB
    assert own == pytest.approx(0.45 * 139.8)
    second = replace(first, others=int((0.6 + 0.6 + own) * GIB))
    assert second.kv_cache == first.kv_cache


def test_the_memory_table() -> None:
    found = Shares(80 * GIB, 0.9, 16 * GIB, 2 * GIB, 4 * GIB, GIB, GIB // 2)
    assert found.kv_cache == 49 * GIB
    lines = found.table(num_blocks=1000, block_bytes=32 * MIB, processes="12 (100 MiB)").splitlines()
    assert lines[0] == "GPU memory, gpu_memory_utilization 0.9"
    rows = [line.split(" GiB  ") for line in lines[1:]]
    assert [float(size) for size, _ in rows] == [16, 2, 4, 1, 31.25, 0.5, 25.25, 80]
    names = ["weights", "tables", "activations", "graphs", "KV cache, 1000 blocks", "others", "left free", "total"]
    assert all(name.startswith(start) for (_, name), start in zip(rows, names, strict=True))
    assert "processes 12 (100 MiB)" in lines[6]


# --- measuring --------------------------------------------------------------------------------------------------------


class FakeCuda:
    """The numbers of a GPU of 24 GiB that others hold 3 GiB of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = self.peak = 0
        for name in ("empty_cache", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: setattr(self, "peak", self.reserved))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (21 * GIB - self.reserved, 24 * GIB))

    def take(self, size: int, keep: int = 0) -> None:
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        self.reserved += keep - size


Measure = Callable[..., tuple[Shares, str]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """measure(fault) loads 15 GiB of weights, 1 GiB of tables, and runs steps that take 2 GiB and keep 1 GiB."""

    def run(fault: Exception | None = None, **settings: Any) -> tuple[Shares, str]:
        cuda, runner = FakeCuda(monkeypatch), FakeRunner()
        cuda.take(16 * GIB, keep=16 * GIB)
        runner.memory_stats = lambda: {"weights_bytes": 15 * GIB}  # type: ignore[attr-defined]
        runner.kv_cache = SimpleNamespace(nbytes=2 * runner.block_bytes)  # type: ignore[attr-defined]
        runner.allocate = lambda blocks, _: cuda.take(blocks * 2 * MIB, keep=blocks * 2 * MIB)  # type: ignore[method-assign]

        def warm(*_: object) -> None:
            cuda.take(2 * GIB, keep=GIB)
            if fault is not None:
                raise fault

        def graph(_runner: object, plan: object) -> int:
            assert plan == "the largest graph"
            cuda.take(3 * GIB)  # given back: no part of what steps take
            return 100 * MIB

        monkeypatch.setattr(measuring, "warm_up", warm)
        monkeypatch.setattr(measuring, "graph_bytes", graph)
        monkeypatch.setattr(measuring, "largest_graph", lambda *_: "the largest graph")
        return measuring.measure(runner, EngineConfig(**settings))  # type: ignore[arg-type]

    return run


def test_what_is_measured(measure: Measure) -> None:
    got = measure(gpu_memory_utilization=0.8)
    assert got == (Shares(24 * GIB, 0.8, 15 * GIB, GIB, 2 * GIB + measuring.SLACK, 100 * MIB, 3 * GIB), "")
    assert measure(custom_ops={"silu_mul": "m:f"})[0].graphs == 0  # a user's kernel is not captured


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
    shares, fault = measure(OutOfMemory("a step of 9 rows and 9 tokens does not fit: CUDA out of memory"))
    assert fault.startswith("a step of 9 rows") and shares.weights == 15 * GIB
    assert measure(RuntimeError("CUDA error: out of memory\nmore words"))[1] == "CUDA error: out of memory"
    assert measure(failed_capture())[1] == "CUDA out of memory"
    fault_in_the_code = AssertionError("wrong")
    fault_in_the_code.__context__ = MemoryError()
    for error in (RuntimeError("no kernel image"), fault_in_the_code):
        with pytest.raises(type(error), match=str(error)):
            measure(error)


# --- refusals ---------------------------------------------------------------------------------------------------------


class FakeRunner:
    """What sizing reads of a runner."""

    def __init__(self, block_bytes: int = 2 * MIB, max_blocks: int = 512) -> None:
        self.block_bytes = block_bytes
        self.state = SimpleNamespace(max_blocks=max_blocks)
        self.device = torch.device("cuda:0")
        rope = SimpleNamespace(dim=128)
        self.model = SimpleNamespace(spec=SimpleNamespace(ropes=(rope,), max_model_len=16 * max_blocks))
        self.info = RunnerInfo(0, 0, 16, 16 * max_blocks, 1000, 64, (), "bfloat16", "cuda:0")
        self.allocated: tuple[int, int] | None = None

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        self.allocated = num_blocks, num_host_blocks


Size = Callable[..., tuple[FakeRunner, int]]


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> Size:
    """size(shares, settings) runs `sized_runner` with this measurement; returns the runner and its blocks.

    With smaller steps activations are in proportion, or steps fail while they have more tokens than `fail_above`.
    """

    def run(measured: Shares, fail_above: int = 1 << 30, **settings: Any) -> tuple[FakeRunner, int]:
        runner = FakeRunner()

        def measure(now: EngineConfig) -> tuple[Shares, str]:
            part = now.max_num_batched_tokens * measured.activations // config.max_num_batched_tokens
            fault = "a step of 9 rows" if now.max_num_batched_tokens > fail_above else ""
            return replace(measured, activations=part), fault

        config = EngineConfig(**{"max_model_len": 8192, "gpu_memory_utilization": measured.utilization, **settings})
        monkeypatch.setattr(kv_cache_size, "measure", lambda _runner, config: measure(config))
        monkeypatch.setattr(kv_cache_size, "processes", lambda _device: "77 (9 MiB)")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, measured.total))
        kv_cache_size.sized_runner(lambda _: runner, config, "bfloat16")  # type: ignore[arg-type,return-value]
        assert runner.allocated is not None
        return runner, runner.allocated[0]

    return run


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
def test_the_share_that_would_fit(measured: Shares, utilization: str | None, size: Size) -> None:
    if utilization is None:
        with pytest.raises(ResourceError, match="no setting makes room") as refused:
            size(measured)
        assert "processes 77 (9 MiB)" in str(refused.value)
    else:
        with pytest.raises(ConfigError, match=f"gpu_memory_utilization {utilization}") as refused:
            size(measured)
        runner, blocks = size(replace(measured, utilization=float(utilization)))
        assert blocks >= runner.state.max_blocks + 1
    assert "GPU memory" in str(refused.value) and "left free" in str(refused.value)


def refused(size: Size, measured: Shares, kind: type[WavecoreError] = ConfigError, **settings: Any) -> str:
    with pytest.raises(kind) as refusal:
        size(measured, **settings)
    return str(refusal.value)


def test_smaller_steps_are_named_where_nothing_else_makes_room(size: Size) -> None:
    """With the numbers of the first that fit, and what must change besides."""
    crowded = gib(24, 0.95, 15.01, 3.5, 5.6)  # others leave no larger share
    [way] = ways_out(refused(size, crowded))
    assert way == {"max_num_batched_tokens": 4096, "max_num_seqs": 128}
    assert size(replace(crowded, activations=crowded.activations // 2), **way)[1] >= 513
    [way] = ways_out(refused(size, replace(crowded, utilization=0.6)))
    assert way == {"max_num_batched_tokens": 4096, "max_num_seqs": 128, "gpu_memory_utilization": 0.75}


def test_a_shorter_length_that_would_fit(size: Size) -> None:
    measured = gib(24, 0.75, 15.01, 2.5, 0.7)
    share, shorter = ways_out(refused(size, measured, max_model_len=8192))
    blocks = (measured.kv_cache - MARGIN) // (2 * MIB)
    assert list(share) == ["gpu_memory_utilization"] and shorter == {"max_model_len": 16 * (blocks - 1)}


def test_the_null_block_comes_on_top_of_a_sequence(size: Size) -> None:
    """The least cache holds both; without a length, sequences fit beside it."""
    assert size(exactly(513))[1] == 513
    refused(size, exactly(512))
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
    words = refused(size, measured, num_gpu_blocks_override=4000)
    assert "num_gpu_blocks_override 4000 takes 7.81 GiB" in words
    [way] = ways_out(words)
    most = way["num_gpu_blocks_override"]
    assert 3000 < most < 4000 and size(measured, **way)[1] == most
    for full in (gib(24, 0.9, 15, 2, 8.9), exactly(MARGIN // (2 * MIB) + 1)):  # nothing, and the null block alone
        assert "no setting makes room" in refused(size, full, ResourceError, num_gpu_blocks_override=100)


def test_largest_steps_that_do_not_fit(size: Size) -> None:
    measured = gib(24, 0.9, 15, 2, 1)
    words = refused(size, measured, fail_above=3000)
    assert "a step of 9 rows" in words and "GPU memory" in words
    assert ways_out(words) == [{"max_num_batched_tokens": 2048, "max_num_seqs": 64}]
    assert "no setting makes room" in refused(size, measured, ResourceError, fail_above=0)


def test_the_start_tells_where_the_memory_is(size: Size, caplog: pytest.LogCaptureFixture) -> None:
    measured = gib(24, 0.9, 15, 2, 1)
    with caplog.at_level("INFO", "wavecore"):
        _, blocks = size(measured)
    assert measured.table(blocks, 2 * MIB, "77 (9 MiB)") in caplog.messages


def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=64 * GIB))
    monkeypatch.setattr("wavecore.engine_core.models.weights.partial", lambda *_: None)  # nothing can be read
    with pytest.raises(ResourceError, match=r"weights of .*model take .* GiB as float32, and of cpu's 64 GiB only"):
        load(folder)
    half = sum(t.numel() for t in load_file(folder / "model.safetensors").values()) * 2
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=half, total=64 * GIB))
    with pytest.raises(ConfigError, match=r"as float32, .* would fit with dtype bfloat16"):
        load(folder)
    monkeypatch.undo()
    assert load(folder, dtype="bfloat16").info.dtype == "bfloat16"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=half - 1, total=64 * GIB))
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ResourceError, match="no setting makes room"):
            load(folder, dtype=dtype)


def test_weights_that_do_not_fit_after_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "load_folder", short)
    with pytest.raises(ConfigError, match=r"model do not fit into memory: CUDA out of memory; .* dtype bfloat16"):
        load(folder)
    with pytest.raises(ResourceError, match="no setting makes room"):
        load(folder, dtype="bfloat16")


def test_tables_that_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bounds of steps that fit are named, and start."""
    make = loader.ModelRunner

    def limited(model: Any, info: RunnerInfo, rows: int, tokens: int) -> Any:
        if rows * tokens > 64 * 1024:
            raise MemoryError("no room")
        return make(model, info, rows, tokens)

    monkeypatch.setattr(loader, "ModelRunner", limited)
    with pytest.raises(ConfigError, match="the tables of all requests do not fit into memory: no room") as refusal:
        load(folder, max_num_batched_tokens=5000, max_num_seqs=100)
    [way] = ways_out(str(refusal.value))
    assert way == {"max_num_batched_tokens": 2048, "max_num_seqs": 32}
    load(folder, **way)


def test_bytes_of_the_weights_are_those_of_the_parameters(folder: Path) -> None:
    runner: Any = load(folder)
    spec, rotary = runner.model.spec, sum(table.nbytes for table in runner.model.tables)
    assert free_memory.weight_bytes(spec, torch.float32) == runner.memory_stats()["weights_bytes"] - rotary


@given(st.integers(1, 1 << 20), st.integers(1, 10_000))
def test_a_suggested_size_of_a_cpu_cache_fits(block_bytes: int, need: int) -> None:
    suggested = free_memory.fitting_gib(block_bytes * need)
    assert int(float(f"{suggested:g}") * GIB) // block_bytes >= need


def test_a_suggested_size_of_a_cpu_cache_starts(folder: Path) -> None:
    settings: dict[str, Any] = {"num_gpu_blocks_override": None, "max_model_len": 200}
    with pytest.raises(ConfigError, match="max_model_len 8, or kv_cache_memory_gib") as refused:
        load(folder, kv_cache_memory_gib=4e-5, **settings)
    for way in ways_out(str(refused.value)):
        load(folder, **{"kv_cache_memory_gib": 4e-5, **settings, **way})


def test_swap_space_and_blocks_that_no_host_has(folder: Path) -> None:
    for asked in ({"swap_space_gib": 900_000}, {"num_gpu_blocks_override": (1 << 31) - 1, "block_size": 1 << 16}):
        with pytest.raises(ConfigError) as refusal:
            load(folder, **asked)
        [way] = ways_out(str(refusal.value))
        assert list(way) == list(asked)[:1]
        if "num_gpu_blocks_override" in way:
            load(folder, **asked | way)
        else:  # would take half of the host's memory at once
            assert 0 <= way["swap_space_gib"] * GIB < 0.7 * free_memory.host_memory()[0]
    cache: dict[str, Any] = {"num_gpu_blocks_override": None, "block_size": 1 << 16, "enable_prefix_caching": False}
    with pytest.raises(ConfigError, match="kv_cache_memory_gib") as refusal:
        load(folder, max_num_seqs=65_536, max_num_batched_tokens=65_536, kv_cache_memory_gib=9e9, **cache)
    [way] = ways_out(str(refusal.value))
    load(folder, **cache | way)


def test_blocks_to_swap_to_count_with_those_of_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_size, "host_memory", lambda: (GIB, GIB))
    with pytest.raises(ConfigError) as refusal:
        load(folder, num_gpu_blocks_override=(1 << 31) - 1, block_size=1 << 16, swap_space_gib=0.5)
    # Blocks of 192 MiB: four in nine tenths of the memory, two to swap to among them.
    assert ways_out(str(refusal.value)) == [{"num_gpu_blocks_override": 2}]


# --- who the others are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("7, 600 MiB\n12, 70000 MiB\n", "12 (70000 MiB)"),
        ("7, 600 MiB\n", "(none)"),
        ("", "(none listed)"),
        ("No running processes found\n", "(none listed)"),
        ("31, [N/A]\n7, [N/A]\n32, 5 MiB", "31 ([N/A]), 32 (5 MiB)"),
        ("99, 5 MiB\n", "99 (5 MiB), this one among them by its pid outside of the container"),
    ],
)
def test_other_processes_in_words(output: str, words: str) -> None:
    assert free_memory.listed(output, own=7) == words


def test_only_the_engines_own_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID: numbers of devices are the driver's, not those that CUDA_VISIBLE_DEVICES leaves."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        if len(asked) > 1:
            raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout=f"{os.getpid()}, 600 MiB\n12, 70000 MiB\n")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="4a-b1"))
    monkeypatch.setattr(subprocess, "run", run)
    assert free_memory.processes(torch.device("cuda:0")) == "12 (70000 MiB)"
    assert asked[0][:3] == ["nvidia-smi", "-i", "GPU-4a-b1"]
    assert free_memory.processes(torch.device("cuda:0")) == "(unknown)"


@pytest.mark.parametrize(("folder", "names"), [(".", free_memory.CGROUPS[0]), ("memory", free_memory.CGROUPS[1])])
def test_a_container_limits_the_hosts_memory(tmp_path: Path, folder: str, names: tuple[str, str]) -> None:
    free, total = free_memory.host_memory(tmp_path)
    assert 0 < free < total
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in zip(names, ("5000000\n", "3000000\n"), strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / folder / "memory.stat").write_text("anon 2000000\nactive_file 300000\ninactive_file 700000\n")
    assert free_memory.host_memory(tmp_path) == (3_000_000, 5_000_000)
    (tmp_path / names[0]).write_text("max\n")
    assert free_memory.host_memory(tmp_path)[1] == total

"""Which GPUs engines get, on made-up machines: by the driver's files, and what CUDA_VISIBLE_DEVICES leaves of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import Placement, cuda_number, places, stage_places, visible_gpus
from wavecore.transport.errors import ConfigError

UUIDS = [
    "GPU-8f3a2c1e-0000-4000-8000-000000000000",
    "GPU-8f3b0000-0000-4000-8000-000000000001",
    "GPU-11110000-0000-4000-8000-000000000002",
    "GPU-22220000-0000-4000-8000-000000000003",
]
MIG = ["MIG-7089d0f3-293f-58c9-8f8c-5ea666eedbde", "MIG-GPU-8f3a2c1e-0000-4000-8000-000000000000/1/0"]
INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 1{minor}
GPU UUID: \t {uuid}
Video BIOS: \t ??.??.??.??.??
Bus Location: \t 0000:{bus}:00.0
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def machine(root: Path, uuids: list[str], devices: int | None = None) -> Path:
    """The driver's files of these GPUs; `devices` of them have a device file. The bus counts the other way round."""
    (root / "dev").mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (root / "dev" / name).touch()
    for minor, uuid in enumerate(uuids):
        folder = root / "proc/driver/nvidia/gpus" / f"0000:{90 - minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(uuid=uuid, minor=minor, bus=90 - minor))
    for minor in range(len(uuids) if devices is None else devices):
        (root / "dev" / f"nvidia{minor}").touch()
    return root


@pytest.fixture
def four(tmp_path: Path) -> Path:
    return machine(tmp_path, UUIDS)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": "m", "data_parallel_size": 2, **settings})


def environment(visible: str | None, **others: str) -> dict[str, str]:
    return others if visible is None else {"CUDA_VISIBLE_DEVICES": visible, **others}


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        (" 3 , 1 ", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,4,2", ["1"]),  # CUDA reads up to the first that is none
        ("0,-1,2", ["0"]),
        ("1,1", []),
        (f"{UUIDS[3]},{UUIDS[0]}", [UUIDS[3], UUIDS[0]]),
        ("GPU-1111,GPU-8f3b", ["GPU-1111", "GPU-8f3b"]),
        ("GPU-2222,GPU-8f3,GPU-1111", ["GPU-2222"]),  # two begin so
        ("GPU-1111,GPU-9999,GPU-2222", ["GPU-1111"]),
        (f"GPU-1111,{UUIDS[2]}", []),  # the same
        (MIG[0], MIG[:1]),
        (",".join(MIG), MIG),
        (f"{MIG[0]},{MIG[0]}", []),
    ],
)
def test_what_cuda_shows_a_process(four: Path, visible: str | None, gpus: list[str]) -> None:
    assert visible_gpus(environment(visible), four) == gpus


def test_machines(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    assert visible_gpus({}, bare) is None
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, bare) is None
    container = machine(tmp_path / "container", UUIDS, devices=2)  # the driver tells of all, two were given to it
    assert visible_gpus({}, container) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": UUIDS[2]}, container) == []
    unnamed = machine(tmp_path / "unnamed", ["GPU-????????-????-????-????-????????????"] * 2)
    assert visible_gpus({}, unnamed) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, unnamed) == ["1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": UUIDS[0]}, unnamed) is None  # nobody knows which it is
    eleven = machine(tmp_path / "eleven", [f"GPU-{number:08x}" for number in range(11)])
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-0000000a"}, eleven) == ["GPU-0000000a"]
    assert len(visible_gpus({}, eleven) or ()) == 11


@pytest.mark.parametrize(
    ("settings", "ranks", "visible", "expected"),
    [
        ({}, 1, None, ["0", "1"]),
        ({"device": "cuda"}, 1, "3,1,0", ["3", "1"]),
        ({"device": "cuda"}, 2, None, ["0,1", "2,3"]),
        ({"device": "cuda", "data_parallel_size": 1}, 4, "3,2,1,0", ["3,2,1,0"]),
        ({"data_parallel_size": 1, "device": "cuda:1"}, 1, None, ["1"]),
        ({"data_parallel_size": 1, "device": "cuda:1"}, 1, "3,2", ["2"]),
        ({"data_parallel_size": 1}, 1, None, ["0"]),
        ({"data_parallel_size": 1}, 2, "2,0", ["2,0"]),
        ({}, 1, ",".join(MIG), MIG),
        ({}, 1, "GPU-2222,GPU-1111", ["GPU-2222", "GPU-1111"]),
    ],
)
def test_each_engine_sees_its_own_gpus_alone(
    four: Path, settings: dict[str, Any], ranks: int, visible: str | None, expected: list[str]
) -> None:
    engines = places(config(tensor_parallel_size=ranks, **settings), environment(visible), four)
    for engine, gpus in zip(engines, expected, strict=True):
        assert [place.env for place in engine] == [{"CUDA_VISIBLE_DEVICES": gpus}] * ranks
        assert [place.name.removeprefix("GPU ") for place in engine] == gpus.split(",")
        # Within the engine its GPUs count from 0 again; "auto" still asks torch whether the GPU is of use.
        left_open = "device" not in settings and ranks == 1
        assert [place.device for place in engine] == (["auto"] if left_open else [f"cuda:{i}" for i in range(ranks)])


@pytest.mark.parametrize("settings", [{"dp_lockstep": True}, {"enable_expert_parallel": True, "device": "cuda"}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_in_lockstep_see_all_their_gpus(four: Path, settings: dict[str, Any], ranks: int) -> None:
    engines = places(config(tensor_parallel_size=ranks, **settings), environment("3,2,1,0"), four)
    found = [place for engine in engines for place in engine]
    visible = ["3", "2", "1", "0"][: 2 * ranks]
    assert [len(engine) for engine in engines] == [ranks] * 2
    assert [place.name for place in found] == [f"GPU {gpu}" for gpu in visible]
    assert [place.device for place in found] == [f"cuda:{number}" for number in range(2 * ranks)]
    assert all(place.env == {"CUDA_VISIBLE_DEVICES": ",".join(visible)} for place in found)


@pytest.mark.parametrize(
    ("settings", "ranks", "visible", "numbers"),
    [
        ({"data_parallel_size": 5}, 1, None, "5 GPUs are asked for .* 4 of 4 visible ones .CUDA_VISIBLE_DEVICES: not"),
        (
            {"device": "cuda"},
            2,
            "0,1,2",
            "4 GPUs are asked for .*_size 2 x tensor_parallel_size 2.* 3 of 3 .*: 0,1,2.*lower either size",
        ),
        ({"device": "cuda"}, 1, "", "2 GPUs are asked for .* 0 of 0"),
        ({"device": "cuda:1"}, 1, None, "2 GPUs are asked for .* 'cuda:1' has 1 of 4"),
        ({"device": "cuda:4", "data_parallel_size": 1}, 1, None, "1 GPUs are asked for .* 'cuda:4' has 0 of 4"),
        ({"device": "cuda:1", "data_parallel_size": 1}, 1, "3", "1 GPUs are asked for .* 'cuda:1' has 0 of 1"),
        ({}, 1, "GPU-1111,GPU-9999", "2 GPUs are asked for .* 1 of 1 .*: GPU-1111,GPU-9999"),
    ],
)
def test_too_few_gpus(four: Path, settings: dict[str, Any], ranks: int, visible: str | None, numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers):
        places(config(tensor_parallel_size=ranks, **settings), environment(visible), four)


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 GPUs are asked for .* 0 of 0 visible"):
        places(config(device="cuda"), {}, tmp_path)
    # One is left to CUDA: on WSL the driver has no files, and yet there may be a GPU.
    alone = places(config(device="cuda", data_parallel_size=1), {}, tmp_path)
    assert alone == [[Placement("cuda", "cuda", {})]]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_threads_are_shared_out_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))

    def threads(ranks: int, **others: str) -> list[dict[str, str]]:
        found = places(config(device=device, data_parallel_size=ranks), others, tmp_path)
        assert {(place.device, place.name) for [place] in found} == {(device, "cpu")}
        return [dict(place.env) for [place] in found]

    assert threads(3) == [{"OMP_NUM_THREADS": "3"}] * 3
    assert threads(16) == [{"OMP_NUM_THREADS": "1"}] * 16
    [engine] = places(config(device=device, data_parallel_size=1, tensor_parallel_size=4), {}, tmp_path)
    assert [place.env for place in engine] == [{"OMP_NUM_THREADS": "2"}] * 4
    assert threads(1) == [{}]  # all of them: torch's own choice
    with pytest.raises(ConfigError, match=r"161 processes .*_size 161 x tensor_.* 10 cores take 160 at most"):
        threads(161)
    assert threads(2, OMP_NUM_THREADS="7") == [{}, {}]  # the user's word


def test_a_gpu_is_no_place_for_a_scripted_model(four: Path) -> None:
    found = places(config(model="scripted:x", data_parallel_size=9), {"OMP_NUM_THREADS": "1"}, four)
    assert found == [[Placement("cpu", "cpu", {})]] * 9
    [[place]] = places(config(model="scripted:x", device="cuda", data_parallel_size=1), {}, four)
    assert place.env == {"CUDA_VISIBLE_DEVICES": "0"}  # where it is told to


def test_names_of_devices() -> None:
    assert [cuda_number(name) for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:15")] == [None, None, None, 0, 15]
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:1000", "cpu:0", "CUDA"):
        with pytest.raises(ConfigError, match='give "auto", "cpu"'):
            cuda_number(wrong)


def stage(*gpus: int, share: float = 0.5, **settings: Any) -> tuple[EngineConfig, tuple[int, ...]]:
    return config(**{"data_parallel_size": 1, "gpu_memory_utilization": share, **settings}), gpus


def test_stages_of_a_pipeline_get_the_gpus_that_they_name(four: Path) -> None:
    stages = {
        "a": stage(0),
        "b": stage(2, 0, data_parallel_size=2),
        "c": stage(3, 1, tensor_parallel_size=2, share=1.0),
        "scripted": stage(0, model="scripted:x", share=1.0),
        "cpu": stage(0, device="cpu", share=1.0),
    }
    found = stage_places(stages, environment("3,2,1,0", OMP_NUM_THREADS="1"), four)
    assert {name: config for name, (config, _) in found.items()} == {
        name: config for name, (config, _) in stages.items()
    }
    names = {name: [[place.name for place in ranks] for ranks in engines] for name, (_, engines) in found.items()}
    assert names == {
        "a": [["GPU 3"]],
        "b": [["GPU 1"], ["GPU 3"]],
        "c": [["GPU 0", "GPU 2"]],
        "scripted": [["cpu"]],
        "cpu": [["cpu"]],
    }
    assert [place.env for place in found["c"][1][0]] == [{"CUDA_VISIBLE_DEVICES": "0,2"}] * 2


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"a": stage(0, share=0.9), "b": stage(0, share=0.9)}, r"^GPU 0: .* 0.9 \(a\) \+ 0.9 \(b\); lower"),
        ({"a": stage(0, 1, data_parallel_size=2), "b": stage(1, share=0.51)}, r"^GPU 1: .* 0.5 \(a\) \+ 0.51 \(b\)"),
        ({"a": stage(0), "b": stage(4)}, r"^stage b: gpus are \[4\]; name 1 of the 4 visible ones"),
        ({"a": stage(0, 1)}, r"^stage a: gpus are \[0, 1\]; name 1 of"),
        ({"a": stage(0, 0, data_parallel_size=2)}, "2 GPUs are asked for"),
        ({"a": stage(0, tensor_parallel_size=2)}, "2 GPUs are asked for"),
        ({"a": stage()}, r"^stage a: gpus are \[\]"),
    ],
)
def test_stages_that_cannot_be_placed(four: Path, stages: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage_places(stages, {}, four)


def test_stages_share_a_gpu_exactly(four: Path, tmp_path: Path) -> None:
    """0.3 + 0.3 + 0.4 is more than 1 in floats."""
    thirds = {name: stage(0, share=share) for name, share in (("a", 0.4), ("b", 0.3), ("c", 0.3))}
    assert len(stage_places(thirds, {}, four)) == 3
    bare = tmp_path / "bare"
    assert stage_places({"a": stage(0, device="cuda")}, {}, bare)["a"][1] == [[Placement("cuda", "cuda", {})]]


def test_stages_share_the_cores_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    found = stage_places({"a": stage(0), "b": stage(7, data_parallel_size=4)}, {}, tmp_path)
    env = {"OMP_NUM_THREADS": "2"}
    assert [[place.env for [place] in engines] for _, engines in found.values()] == [[env], [env] * 4]

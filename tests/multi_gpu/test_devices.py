"""Which GPU an engine uses: by number, and through CUDA_VISIBLE_DEVICES as a subset, in another order, and by UUID."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from wavecore import LLM, ConfigError, SamplingParams
from wavecore.transport.processes.deployment import read

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SETTINGS = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 64}
pytestmark = pytest.mark.usefixtures("two_gpus")


def query(what: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [[field.strip() for field in line.split(",")] for line in lines]


def show(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set CUDA_VISIBLE_DEVICES, with UUIDs in place of "UUID 0". Returns those of all GPUs, by number."""
    uuids = [uuid for (uuid,) in query("gpu=uuid")]
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.replace("UUID 1", uuids[1]).replace("UUID 0", uuids[0]))
    return uuids


def gpus_of_engines(llm: LLM) -> list[list[str]]:
    """UUIDs of the GPUs on which each engine has a context."""
    users = query("compute-apps=gpu_uuid,pid")
    return [[uuid for uuid, pid in users if int(pid) == engine.pid] for engine in read(llm.runtime_dir).engines]


@pytest.mark.parametrize(
    ("visible", "device", "gpu"),
    [
        (None, "cuda:1", 1),
        (None, "cuda", 0),
        ("1", "cuda:0", 1),
        ("1", "auto", 1),
        ("1,0", "cuda:0", 1),
        ("1,0", "cuda:1", 0),
        ("UUID 1", "cuda:0", 1),
        ("UUID 1,UUID 0", "cuda:1", 0),
    ],
)
def test_an_engine_uses_the_gpu_that_is_named_and_no_other(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, gpu: int
) -> None:
    uuids = show(visible, monkeypatch)
    with LLM(str(tiny_llama), device=device, **SETTINGS) as llm:
        [output] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        assert gpus_of_engines(llm) == [[uuids[gpu]]]


@pytest.mark.parametrize(
    ("visible", "order"),
    [(None, [0, 1]), ("0,1", [0, 1]), ("1,0", [1, 0]), ("UUID 1,UUID 0", [1, 0])],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_engine_has_a_gpu_of_its_own(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, order: list[int], device: str
) -> None:
    uuids = show(visible, monkeypatch)
    with LLM(str(tiny_llama), device=device, data_parallel_size=2, **SETTINGS) as llm:
        outputs = llm.generate([[i, 2, 3] for i in range(1, 9)], GREEDY, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
        assert gpus_of_engines(llm) == [[uuids[gpu]] for gpu in order]


@pytest.mark.parametrize("visible", ["1", "UUID 0", "0,0", "1,NoDevFiles,0"])
def test_more_engines_than_gpus_are_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    show(visible, monkeypatch)
    with pytest.raises(ConfigError, match="2 GPUs are asked for"):
        LLM(str(tiny_llama), data_parallel_size=2, device="cuda", **SETTINGS)


@pytest.mark.parametrize(("visible", "device"), [("1", "cuda:1"), ("0,1", "cuda:2"), ("", "cuda:0")])
def test_a_gpu_that_is_not_visible_is_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, visible: str, device: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        LLM(str(tiny_llama), device=device, **SETTINGS)


def test_two_engines_on_two_gpus(tiny_llama: Path) -> None:
    """Side by side they give the same greedy tokens."""
    prompts = [[i, 2, 3] for i in range(1, 6)]
    with (
        LLM(str(tiny_llama), device="cuda:0", **SETTINGS) as left,
        LLM(str(tiny_llama), device="cuda:1", **SETTINGS) as right,
    ):
        answers = [
            [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
            for llm in (left, right)
        ]
    assert answers[0] == answers[1]

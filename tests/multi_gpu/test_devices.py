"""Which GPU an engine uses: by number, and through CUDA_VISIBLE_DEVICES as a subset, in another order, and by UUID."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from wavecore import LLM, ConfigError, SamplingParams
from wavecore.transport.processes.deployment import read

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SETTINGS = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 64}


def query(what: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [[field.strip() for field in line.split(",")] for line in lines]


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
    uuids = [uuid for (uuid,) in query("gpu=uuid")]
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.replace("UUID 1", uuids[1]).replace("UUID 0", uuids[0]))
    with LLM(str(tiny_llama), device=device, **SETTINGS) as llm:
        [output] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        pid = read(llm.runtime_dir).engines[0].pid
        assert [uuid for uuid, other in query("compute-apps=gpu_uuid,pid") if int(other) == pid] == [uuids[gpu]]


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

"""Pipelines of scripted models, as a program uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_model import ids_of, write_model
from tests.support.tokenizers_for_tests import sentencepiece, write_folder
from tests.support.waiting import until

from wavecore import LLM, ModelPipeline, SamplingParams, connect
from wavecore.frontend.cli.main import main
from wavecore.frontend.pipeline import StageOutput
from wavecore.transport.errors import (
    ConfigError,
    EngineDead,
    ModelError,
    RequestError,
    StartError,
    ValidationError,
    WavecoreError,
)
from wavecore.transport.processes.deployment import read

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 12}
DRAFT = "First one. Second!\nThird"


def model(folder: Path, **script: Any) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return write_model(folder, step_seconds=0.003, **script)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[ModelPipeline]:
    """Two models that answer by a rule, so each other prompt has another answer; their tokenizers differ."""
    other = model(folder / "other", vocab_size=len(sentencepiece().get_vocab()))
    write_folder(Path(other["tokenizer"]), sentencepiece())
    pipeline = ModelPipeline(runtime_dir=str(folder / "run"))
    pipeline.add_stage("draft", **model(folder / "first"), prompt="Write: {prompt}")
    with pipeline.add_stage("rewrite", **other, prompt="Better than {draft}, to {prompt}"):
        yield pipeline


@pytest.fixture(scope="module")
def overlapping(folder: Path) -> Iterator[tuple[ModelPipeline, list[dict[str, str]]]]:
    """Three sentences, each rewritten, and a third stage that reads all. Also what the second one was asked."""
    asked: list[dict[str, str]] = []

    def note(texts: Mapping[str, str]) -> str:
        asked.append(dict(texts))
        return texts["draft"]

    answers = {"First": "<First, at length>", "Second": "<Second>", "Third": "<Third>"}  # the second is ready first
    second = {ids_of(start)[0]: ids_of(answer) for start, answer in answers.items()}
    draft = model(folder / "draft", scripts={ids_of("go")[0]: ids_of(DRAFT)})
    pipeline = ModelPipeline().add_stage("draft", **draft)
    pipeline.add_stage("rewrite", **model(folder / "rewrite", scripts=second), prompt=note, overlap=True)
    last = model(folder / "last", scripts={ids_of("<First")[0]: ids_of("done")})
    with pipeline.add_stage("check", **last):
        yield pipeline, asked


def joined(outputs: Iterator[StageOutput] | list[StageOutput]) -> dict[str, StageOutput]:
    whole: dict[str, StageOutput] = {}
    for output in outputs:
        assert output.text or output.token_ids or output.finish_reason
        whole.setdefault(output.stage, StageOutput(output.stage)).add(output)
    return whole


def by_hand(pipeline: ModelPipeline, prompts: list[str]) -> list[dict[str, StageOutput]]:
    """The same with two `LLM`s, one after the other."""
    assert pipeline.runtime_dir
    params = SamplingParams(**GREEDY)
    with connect(pipeline.runtime_dir, stage="draft") as draft, connect(pipeline.runtime_dir, stage="rewrite") as other:
        first = draft.generate([f"Write: {prompt}" for prompt in prompts], params, use_tqdm=False)
        texts = [output.outputs[0].text for output in first]
        asked = [f"Better than {text}, to {prompt}" for text, prompt in zip(texts, prompts, strict=True)]
        second = other.generate(asked, params, use_tqdm=False, data_parallel_rank=0)
    stages = {"draft": first, "rewrite": second}
    return [
        {
            name: StageOutput(name, choice.text, choice.token_ids, choice.finish_reason)
            for name, outputs in stages.items()
            for choice in outputs[i].outputs
        }
        for i in range(len(prompts))
    ]


def running(llm: LLM) -> int:
    [stats] = llm.step_stats()
    return int(stats["running"] + stats["waiting"])


def test_runs_of_many_threads_and_tasks(pair: ModelPipeline) -> None:
    """All at once, and each gives what calls one after the other give. The engines batch them."""
    prompts = [f"story {number}" for number in range(24)]
    expected = by_hand(pair, prompts)
    assert pair.runtime_dir
    with connect(pair.runtime_dir, stage="draft") as llm:
        before = llm.step_stats()[0]["steps"]
        with ThreadPoolExecutor(24) as threads:
            assert [*threads.map(lambda prompt: pair.run(prompt, **GREEDY), prompts)] == expected
        assert llm.step_stats()[0]["steps"] - before < 24 * 12 / 3

    async def at_once() -> list[dict[str, StageOutput]]:
        return await asyncio.gather(*(pair.arun(prompt, **GREEDY) for prompt in prompts))

    assert asyncio.run(at_once()) == expected
    assert asyncio.run(at_once()) == expected  # in another loop


def test_streams(pair: ModelPipeline) -> None:
    async def beside_loop() -> list[StageOutput]:
        return [output async for output in pair.astream("a tale", **GREEDY)]

    whole = pair.run("a tale", **GREEDY)
    for outputs in ([*pair.stream("a tale", **GREEDY)], asyncio.run(beside_loop())):
        assert joined(outputs) == whole
        assert len(outputs) > 6
        stages = [output.stage for output in outputs]
        assert stages == sorted(stages) == ["draft"] * stages.count("draft") + ["rewrite"] * stages.count("rewrite")
        assert [output.stage for output in outputs if output.finish_reason] == ["draft", "rewrite"]


def test_each_sentence_as_soon_as_it_is_there(overlapping: tuple[ModelPipeline, list[dict[str, str]]]) -> None:
    pipeline, asked = overlapping
    asked.clear()
    outputs = [*pipeline.stream("go", max_tokens=64)]
    assert {name: output.text for name, output in joined(outputs).items()} == {
        "draft": DRAFT,
        "rewrite": "<First, at length> <Second>\n<Third>",
        "check": "done",
    }
    assert [texts["draft"] for texts in asked] == ["First one.", "Second!", "Third"]
    assert {texts["prompt"] for texts in asked} == {"go"}
    stages = [output.stage for output in outputs]
    draft_ended = next(i for i, output in enumerate(outputs) if output.stage == "draft" and output.finish_reason)
    assert stages.index("rewrite") < draft_ended < stages.index("check")
    assert joined(outputs) == pipeline.run("go", max_tokens=64) == asyncio.run(pipeline.arun("go", max_tokens=64))


async def test_prompts_of_any_form(folder: Path) -> None:
    """Messages through the chat template, token ids, and what a function raises."""
    ids = ids_of("go")
    chat = model(folder / "chat", scripts={ids_of("<|im_start|>")[0]: ids_of("chatted")})
    pipeline = ModelPipeline()
    pipeline.add_stage("chat", **chat, prompt=lambda texts: [{"role": "user", "content": texts["prompt"]}])
    last = model(folder / "ids", scripts={ids[0]: ids_of("counted")})
    pipeline.add_stage("ids", **last, prompt=lambda texts: {"go": ids}[texts["prompt"]])
    async with pipeline:
        for outputs in (pipeline.run("go"), await pipeline.arun("go")):
            assert {name: output.text for name, output in outputs.items()} == {"chat": "chatted", "ids": "counted"}
        with pytest.raises(KeyError, match="'other'"):
            pipeline.run("other")
        with pytest.raises(KeyError, match="'other'"):
            await pipeline.arun("other")


@pytest.mark.parametrize("error", [StopIteration, TimeoutError])
def test_what_a_prompt_function_raises_is_told(folder: Path, error: type[Exception]) -> None:
    """In a thread and in a task alike, though generators and deadlines have a use of their own for it."""

    def fails(_texts: Mapping[str, str]) -> str:
        raise error("not found")

    with ModelPipeline().add_stage("only", **model(folder / "fails"), prompt=fails) as pipeline:
        for run in (lambda: pipeline.run("go"), lambda: asyncio.run(pipeline.arun("go"))):
            with pytest.raises(WavecoreError, match=rf"^stage only: {error.__name__}\('not found'\) while the prompt"):
                run()


def test_a_deadline_is_of_all_stages(folder: Path) -> None:
    endless = model(folder / "slow", eos_token_id=[], max_model_len=4096)
    with (
        ModelPipeline()
        .add_stage("quick", **model(folder / "q", scripts={"*": ids_of("quick")}))
        .add_stage("slow", **endless)
        .add_stage("last", **endless) as slow
    ):
        outputs = joined(slow.stream("go", timeout=1.0, max_tokens=4000))
        assert [(name, output.finish_reason) for name, output in outputs.items()] == [
            ("quick", "stop"),
            ("slow", "timeout"),
        ]
        assert outputs["slow"].text
        with pytest.raises(ValidationError, match="timeout: must be"):
            slow.run("go", timeout=0)
        assert slow.runtime_dir
        with connect(slow.runtime_dir, stage="slow") as llm:
            check_abandoned_runs(slow, llm)


def check_abandoned_runs(pipeline: ModelPipeline, llm: LLM) -> None:
    """Leaving a stream and cancelling a task end their requests in the engine."""
    for output in pipeline.stream("go", max_tokens=4000):
        if output.stage == "slow":
            assert running(llm) == 1
            break
    until(lambda: running(llm) == 0)

    async def cancelled() -> None:
        task = asyncio.create_task(pipeline.arun("go", max_tokens=4000))
        while not await asyncio.to_thread(running, llm):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: running(llm) == 0)


def test_errors_name_their_stage(pair: ModelPipeline, folder: Path) -> None:
    with pytest.raises(ValidationError, match=r"^stage draft: prompt: has \d+ tokens") as raised:
        pair.run("many words " * 60)
    assert raised.value.field == "prompt"
    with pytest.raises(ValidationError, match="temperature: must be"):
        pair.run("go", temperature=-1)
    for unread in ({"n": 2}, {"detokenize": False}):
        with pytest.raises(ValidationError, match="sampling: must be of one choice, with detokenize"):
            pair.run("go", **unread)
    for wrong in ("", 7, ["go"]):
        with pytest.raises(ValidationError, match=r"^prompt: must be text"):
            pair.run(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_token"):
        pair.run("go", max_token=2)
    with pytest.raises(ConfigError, match="starts once"):
        pair.__enter__()


def test_its_deployment(pair: ModelPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    """Has the engines of several models, so nobody may take them for one."""
    assert pair.runtime_dir
    where = str(pair.runtime_dir)
    for stage in ("", "check"):
        with pytest.raises(StartError, match=f"no stage '{stage}' in .*; connect with stage=: draft, rewrite"):
            connect(where, stage=stage)
    assert main(["status", where]) == 0
    _, names, *engines = capsys.readouterr().out.splitlines()
    assert names.split()[:3] == ["engine", "stage", "rank"]
    assert [line.split()[:6:5] for line in engines] == [["0", "ready"], ["1", "ready"]]
    assert [line.split()[1] for line in engines] == ["draft", "rewrite"]
    assert main(["status", where, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["deployments"]
    assert [(engine["stage"], engine["load"]["running"]) for engine in found["engines"]] == [
        ("draft", 0),
        ("rewrite", 0),
    ]
    assert main(["top", where, "--once", "--interval", "0.1", "--json"]) == 0


def test_a_start_that_fails(folder: Path, tmp_path: Path) -> None:
    """Says whose it was, and leaves nothing; so does one that is cancelled."""
    pipeline = ModelPipeline(runtime_dir=str(tmp_path / "run")).add_stage("good", **model(folder / "first"))
    pipeline.add_stage("bad", f"scripted:{tmp_path / 'nowhere'}")
    with pytest.raises(ModelError, match=r"stage bad\): .*nowhere"):
        pipeline.__enter__()
    assert not (tmp_path / "run" / "deployment.json").exists()

    async def cancelled() -> None:
        slow = ModelPipeline().add_stage("slow", **model(folder / "load", load_seconds=30.0))
        starting = asyncio.create_task(slow.__aenter__())
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(cancelled())


@pytest.mark.slow
def test_stages_of_several_engines(folder: Path) -> None:
    """Also of groups, and in lockstep; and an end under way, which every run hears of."""
    endless = {"eos_token_id": [], "max_model_len": 4096}
    ways: dict[str, dict[str, Any]] = {
        "copies": {"data_parallel_size": 2},
        "ranks": {"tensor_parallel_size": 2},
        "lockstep": {"data_parallel_size": 2, "dp_lockstep": True},
    }
    pipeline = ModelPipeline()
    for name, settings in ways.items():
        pipeline.add_stage(name, **model(folder / name, **endless), **settings)
    with pipeline:
        assert pipeline.runtime_dir
        entries = read(pipeline.runtime_dir).engines
        assert [(entry.index, entry.stage, len(entry.ranks)) for entry in entries] == [
            (0, "copies", 1),
            (1, "copies", 1),
            (2, "ranks", 2),
            (3, "lockstep", 1),
            (4, "lockstep", 1),
        ]
        with connect(pipeline.runtime_dir, stage="lockstep") as llm:
            llm.generate(["go"] * 2, SamplingParams(max_tokens=4), use_tqdm=False, data_parallel_rank=1)
            assert [(stats["engine"], stats["finished"]) for stats in llm.step_stats()] == [(3, 0), (4, 2)]
            with pytest.raises(ValidationError, match="there are 2 engines"):
                llm.generate("go", data_parallel_rank=2)
        with ThreadPoolExecutor(3) as threads:
            assert {len(output.token_ids) for output in pipeline.run("go", max_tokens=8).values()} == {8}
            runs = [threads.submit(pipeline.run, f"{number}", max_tokens=3000) for number in range(3)]
            with connect(pipeline.runtime_dir, stage="copies") as llm:
                until(lambda: sum(stats["running"] for stats in llm.step_stats()) == 3)
            pipeline.shutdown()
            for run in runs:
                with pytest.raises(RequestError, match=r"^stage copies: .* this client was closed"):
                    run.result(30)
        with pytest.raises(EngineDead, match="stage copies: this client was closed"):
            pipeline.run("go")

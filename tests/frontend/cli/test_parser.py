"""Command lines: vLLM's spelling, YAML, environment, --print_config, and errors with exit codes."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.cli.main import main
from wavecore.frontend.cli.parser import CommandParser, settings
from wavecore.frontend.compat import engine_config
from wavecore.transport.errors import ConfigError, NotSupportedError


def parse(*args: str) -> EngineConfig:
    return settings(CommandParser("engine", "", "").parse(args))


@pytest.mark.parametrize(
    "args",
    [
        ["--max-model-len", "77"],
        ["--max_model_len", "77"],
        ["--max-model-len=77"],
        ["--context-length", "77"],
    ],
)
def test_spellings(args: list[str]) -> None:
    assert parse(*args).max_model_len == 77


def test_switches() -> None:
    assert parse("--disable-tqdm").disable_tqdm
    assert parse("--disable-tqdm", "--max-num-seqs", "3").disable_tqdm
    assert not parse("--disable-tqdm=false").disable_tqdm
    assert not parse("--no-disable-tqdm").disable_tqdm
    assert not parse("--no-enable-prefix-caching").enable_prefix_caching
    assert not parse("--enable-prefix-caching", "false").enable_prefix_caching
    assert parse("--enable-prefix-caching").enable_prefix_caching


def test_short_names() -> None:
    """vLLM's, also of what is refused by its long name."""
    config = parse("-tp", "2", "-dp=3", "-ep")
    assert (config.tensor_parallel_size, config.data_parallel_size, config.enable_expert_parallel) == (2, 3, True)
    with pytest.raises(NotSupportedError, match="quantization"):
        parse("-q", "awq")
    with pytest.raises(ConfigError, match="'-x': no such option"):
        parse("-x", "3")


def test_yaml_environment_and_flags_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max_num_seqs: 5\nmax_model_len: 50\ndisable_tqdm: true\n")
    monkeypatch.setenv("WAVECORE_MAX_MODEL_LEN", "60")
    monkeypatch.setenv("WAVECORE_DTYPE", "")
    config = parse("--config", str(file), "--block-size", "8")
    assert (config.max_num_seqs, config.disable_tqdm, config.block_size, config.dtype) == (5, True, 8, "auto")
    assert parse("--block-size", "8").max_model_len == 60
    assert parse("--max-model-len", "70").max_model_len == 70


def test_typo_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WAVECORE_MAX_MODEL_LENN", "5")
    parse()
    assert "did you mean WAVECORE_MAX_MODEL_LEN?" in capsys.readouterr().err


def test_print_config_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--max-num-seqs", "9", "--print_config")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["max_num_seqs"] == 9
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert parse("--config", str(file)) == EngineConfig(max_num_seqs=9)


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "token budget of one step" in text
    assert "WAVECORE_MAX_MODEL_LEN" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-num-sec", "1"], "--max-num-sec: no such option; did you mean --max-num-seqs?"),
        (["--max-num-se", "1"], "no such option"),  # no unique prefixes
        (["--max-num-seqs", "many"], "--max-num-seqs must be a whole number from 1 to 65536, not 'many'"),
        (["--max-num-seqs", "1.5"], "--max-num-seqs must be a whole number from 1 to 65536, not 1.5"),
        (["--max-num-seqs"], "--max-num-seqs needs a value"),
        (["--max-num-seqs", "-5"], "--max-num-seqs must be a whole number from 1 to 65536, not -5"),
        (["--gpu-memory-utilization", "much"], "--gpu-memory-utilization must be a number"),
        (["--disable-tqdm=maybe"], "--disable-tqdm must be true or false"),
        (["--dtype", "int3"], "--dtype must be one of auto, float32"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: .*No such file"),
        (["--config", "/dev/zero"], "--config /dev/zero: .*not a regular file"),
        (["one", "two"], "'one' is one argument too many"),
    ],
)
def test_bad_command_lines(args: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        parse(*args)


def test_forms_of_values() -> None:
    config = parse(
        "--kv-cache-memory-gib", "1e-1", "--max-model-len", "null", "--model", "7", "--custom-ops", "{a: b:c}"
    )
    assert (config.kv_cache_memory_gib, config.max_model_len, config.model) == (0.1, None, "7")
    assert config.custom_ops == {"a": "b:c"}
    assert (parse("--dtype", "half").dtype, parse("--dtype=float").dtype) == ("float16", "float32")


def test_a_files_keys_have_the_spellings_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max-model-len: 50\nswap-space: 2\ndtype: half\nenforce-eager: true\n")
    config = parse("--config", str(file))
    assert (config.max_model_len, config.swap_space_gib, config.dtype) == (50, 2.0, "float16")
    for text, words in (
        ("max-model-lem: 5", r"unknown setting max-model-lem in .*config.yaml; did you mean max_model_len"),
        ("max-num-seqs: many", "max-num-seqs in .*config.yaml must be a whole number"),
        ("[1]", "must hold lines"),
        ("a: [", "config.yaml: "),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            parse("--config", str(file))
    file.write_text("quantization: awq")
    with pytest.raises(NotSupportedError, match="GGUF"):
        parse("--config", str(file))


def test_headings_of_other_systems_files(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "max_seq_len: 50\n"
        "scheduler: {policy: priority, max_seqs: 7, block_size: 8}\n"
        "memory:\n  gpu_utilization: 0.5\n  swap_space: 1\n"
    )
    assert parse("--config", str(file)) == EngineConfig(
        max_model_len=50,
        scheduling_policy="priority",
        max_num_seqs=7,
        block_size=8,
        gpu_memory_utilization=0.5,
        swap_space_gib=1.0,
    )
    for text, words in (
        ("scheduler: {max_seq: 5}", "unknown setting max_seq of scheduler in .*; did you mean max_num_seqs"),
        ("scheduler: {max_seqs: many}", "max_seqs of scheduler in .*config.yaml must be a whole number"),
        ("scheduler: fcfs", "unknown setting scheduler"),
        ("memory: {memory: {memory: 1}}", "unknown setting memory of memory of memory"),
        ("scheduler: {max_seqs: 5}\nmax-num-seqs: 6", "max-num-seqs in .*config.yaml is given twice"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            parse("--config", str(file))


BOMB = ", ".join(["&a [1]", *(f"&{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghi"))])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"max_num_seqs: 5\nmax_num_seqs: 6", "a name is given twice"),
        (f"max_num_seqs: [{BOMB}]".encode(), "max_num_seqs in .* must be a whole number"),
        (f"custom_ops: {{a: [{BOMB}]}}".encode(), "custom_ops in .* must be a mapping of texts"),
        (b"custom_ops: " + b"[" * 1_000, "nested too deeply"),
        (b"{" * 1_000, "nested too deeply"),
        (b"max_num_seqs: 2024-99-99", "month must be in"),
        (b"max_num_seqs: " + b"9" * 5000, "Exceeds the limit"),
        (b"\xff\xfe", "can't decode byte"),
        (b"\x00", "control characters are not allowed|unacceptable character"),
        (b"- max_num_seqs", "must hold lines of the form"),
        (b"max_num_seqs", "must hold lines of the form"),
        (b"5", "must hold lines of the form"),
        (b"a: b\n---\nc: d", "expected a single document"),
        (b"!!python/object:os.system {}", "could not determine a constructor"),
        (b"? [a]\n: b", "unhashable key"),
        (b"1: 2", "unknown setting 1 in"),
    ],
)
def test_files_that_are_no_settings(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        parse("--config", str(file))


@pytest.mark.parametrize("text", ["9" * 5000, "2024-99-99", "[" * 1_000, "{a: 1, a: 2}", "&a [*a]", "\x00"])
def test_texts_that_yaml_cannot_read_are_texts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs must be a whole number"):
        parse("--max-num-seqs", text)
    with pytest.raises(ConfigError, match="--custom-ops must be a mapping of texts"):
        parse("--custom-ops", text)


def test_a_list_that_is_too_deep() -> None:
    parser = CommandParser("generate", "", "", options=["sampling"])
    with pytest.raises(ConfigError, match="--stop must be a JSON list of texts"):
        parser.parse(["--stop", "[" * 1_000])


def test_a_file_of_one_command_serves_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--top-p", "0.5", "--max-num-seqs", "9", "--print_config"]) == 0
    text = capsys.readouterr().out
    assert set(yaml.safe_load(text)) == {f.name for f in fields(EngineConfig)}
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert parse("--config", str(file)) == EngineConfig(max_num_seqs=9)


def test_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WAVECORE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("WAVECORE_DTYPE", "half")
    monkeypatch.setenv("WAVECORE_SEED", "")
    assert engine_config({"model": "m"}) == EngineConfig(model="m", max_num_seqs=7, dtype="float16")
    assert engine_config({"max_num_seqs": 8}).max_num_seqs == parse("--max-num-seqs", "8").max_num_seqs == 8
    monkeypatch.setenv("WAVECORE_PROMPT", "hi")
    parse()
    assert "WAVECORE_PROMPT in the environment is no setting" in capsys.readouterr().err
    monkeypatch.setenv("WAVECORE_MAX_NUM_SEQS", "many")
    for make in (parse, lambda: engine_config({})):
        with pytest.raises(ConfigError, match="WAVECORE_MAX_NUM_SEQS in the environment must be a whole number"):
            make()


def test_words_are_options_or_settings() -> None:
    parser = CommandParser("engine", "", "", words=["model"])
    for args in (["folder"], ["--max-num-seqs", "3", "folder"], ["--model", "folder"]):
        assert settings(parser.parse(args)).model == "folder"
    assert settings(parser.parse([])).model == "default"
    with pytest.raises(ConfigError, match="'b' is one argument too many"):
        parser.parse(["a", "b"])


def test_the_prompt_and_a_commands_own_options() -> None:
    parser = CommandParser("generate", "", "", ["prompt"], ["generate", "sampling"])
    values = parser.parse(["--raw", "a prompt", "--stop", '["x"]', "--top-k", "-1", "--max-num-seqs", "3"])
    assert (values.prompt, values.raw, values.stop, values.top_k, values.max_num_seqs) == (
        "a prompt",
        True,
        ["x"],
        -1,
        3,
    )
    assert parser.parse(["--", "--help"]).prompt == "--help"
    assert parser.parse(["a", "--stop", '["a: b: c"]', "--config="]).stop == ["a: b: c"]
    assert parser.parse(["-"]).prompt == "-"
    assert parser.parse([]).prompt == ""
    for args, words in (
        (["--max-tokens", "x"], "--max-tokens must be a whole number, not 'x'"),
        (["--max-tokens"], "--max-tokens needs a value"),
        (["--raw=maybe"], "--raw must be true or false"),
        (["--stop", "x"], "--stop must be a JSON list of texts"),
    ):
        with pytest.raises(ConfigError, match=words):
            parser.parse(args)


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_refused_before_an_engine_is_started(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wavecore.frontend.llm.LLM.from_config", lambda config: pytest.fail("started"))
    assert main([*command, "--top-p", "3"]) == 2
    assert "top_p" in capsys.readouterr().err
    assert main([*command, "--attach", "/tmp", "--max-num-seqs", "3"]) == 2
    assert "--max-num-seqs is for an engine that is started" in capsys.readouterr().err


def test_flags_of_vllm_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match=r"enable_lora.*merge the adapter"):
        parse("--enable-lora")
    with pytest.raises(NotSupportedError, match=r"quantization.*GGUF"):
        parse("--quantization", "awq")
    with pytest.raises(NotSupportedError, match="hf_overrides"):
        parse("--hf-overrides", '{"a": 1}')


def test_flags_of_vllm_that_ask_for_nothing() -> None:
    plain = [
        "--disable-log-stats",
        "--no-trust-remote-code",
        "--quantization",
        "gguf",
        "--pipeline-parallel-size=1",
    ]
    assert parse(*plain, "--tokenizer-mode", "auto", "--max-num-seqs", "3") == EngineConfig(max_num_seqs=3)
    parser = CommandParser("generate", "", "", ["prompt"], ["generate"])
    assert parser.parse(["--disable-log-stats", "a prompt"]).prompt == "a prompt"


def test_sizes_of_graphs_are_a_list_of_numbers() -> None:
    assert parse("--cudagraph-capture-sizes", "[1, 2, 8]", "--enforce-eager").cudagraph_capture_sizes == [1, 2, 8]
    for wrong in ("[0]", "8", "[a]"):
        with pytest.raises(ConfigError, match=r"cudagraph.capture.sizes"):
            parse("--cudagraph-capture-sizes", wrong)


def test_a_model_with_several_names() -> None:
    assert parse("--served-model-name", "a", "b", "--nvtx").served_model_name == ["a", "b"]
    assert parse("--served-model-name=a", "--nvtx").served_model_name == "a"
    config = engine_config({"served_model_name": ("a", "b")})
    assert EngineConfig.from_json(config.to_json()) == config
    for wrong in (5, ["a", 5], ["a", ""], ["a"] * 65):
        with pytest.raises(ConfigError, match="served_model_name"):
            EngineConfig(served_model_name=wrong)  # type: ignore[arg-type]


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        parse("--max-num-batched-tokens", "4", "--max-num-seqs", "8")


def test_main_names_commands_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 0
    assert main(["--version"]) == 0
    assert "`wavecore engine --help` explains" in capsys.readouterr().out
    assert main(["run-batch"]) == 2
    assert "LLM.generate" in capsys.readouterr().err
    assert main(["generat"]) == 2
    assert "did you mean generate?" in capsys.readouterr().err
    assert main(["bench", "online"]) == 2
    assert main(["generate"]) == 2
    assert "is empty" in capsys.readouterr().err
    assert main(["generate", "hi", "-tp", "2"]) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--attach", ""], "--attach needs a value"),  # "$UNSET" in a shell
        (["--config", ""], "--config needs a value"),
        (["--max-model-len", ""], "--max-model-len needs a value"),
        (["x", "--model", "y"], "one argument too many: --model"),
        (["--model", "y", "x"], "one argument too many: --model"),
        (["-x"], "'-x': no such option"),
        (["--xyzzy"], "no such option; see --help"),
        (["--stop", '"a"'], "must be a JSON list of texts"),
        (["--stop", "[1]"], "must be a JSON list of texts"),
        (["--kv-cache-memory-gib", "1" + "0" * 400], "kv-cache-memory-gib must be a number above 0"),
        (["-tp=0"], "tensor-parallel-size must be"),
    ],
)
def test_what_a_command_does_not_swallow(args: list[str], words: str) -> None:
    parser = CommandParser("chat", "[MODEL]", "", ["model"], ["attach", "sampling"])
    with pytest.raises((ConfigError, NotSupportedError), match=re.escape(words)):
        settings(parser.parse(args))

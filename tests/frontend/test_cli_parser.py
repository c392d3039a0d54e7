"""Command lines: vLLM's spelling, YAML, environment, --print_config, and errors with exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from wavecore.engine_core.config import EngineConfig
from wavecore.frontend import cli
from wavecore.frontend.cli_parser import CommandParser, settings
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
    assert parse("-tp", "1", "-dp", "1").tensor_parallel_size == 1
    with pytest.raises(NotSupportedError, match="tensor_parallel_size"):
        parse("-tp", "2")


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


@pytest.mark.parametrize("args", [["--no-such-setting", "1"], ["--max-num-seqs", "many"], ["--dtype", "int3"]])
def test_bad_command_lines(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*args)
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err


def test_flags_of_vllm_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match=r"trust_remote_code.*never run"):
        parse("--trust-remote-code")
    with pytest.raises(NotSupportedError, match=r"quantization.*GGUF"):
        parse("--quantization", "awq")
    with pytest.raises(NotSupportedError, match="hf_overrides"):
        parse("--hf-overrides", "{}")


def test_flags_of_vllm_that_ask_for_nothing() -> None:
    plain = ["--enforce-eager", "--no-trust-remote-code", "--quantization", "gguf", "--pipeline-parallel-size=1"]
    assert parse(*plain, "--tokenizer-mode", "auto", "--max-num-seqs", "3") == EngineConfig(max_num_seqs=3)
    parser = CommandParser("generate", "", "")
    parser.options.add_argument("prompt", type=str)
    assert parser.parse(["--enforce-eager", "a prompt"]).prompt == "a prompt"


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        parse("--max-num-batched-tokens", "4", "--max-num-seqs", "8")


def test_main_names_commands_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 0
    assert cli.main(["--version"]) == 0
    assert "generate" in capsys.readouterr().out
    assert cli.main(["serve"]) == 2
    assert "HTTP" in capsys.readouterr().err
    assert cli.main(["nonsense"]) == 2
    assert cli.main(["bench", "online"]) == 2
    assert cli.main(["generate"]) == 2
    assert "is empty" in capsys.readouterr().err
    assert cli.main(["generate", "hi", "-tp", "2"]) == 2

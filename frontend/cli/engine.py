"""`wavecore engine [MODEL]`: engines that other processes attach to, until a signal ends them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.cli.parser import CommandParser, settings
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.progress_bars import StartBar


def run(args: Sequence[str]) -> int:
    return serve(settings(make_parser("wavecore engine").parse(args)))


def make_parser(name: str) -> CommandParser:
    """The parser of all programs that run engines for others; `name` is the program's."""
    about = "Runs engines. SIGTERM or Ctrl-C drains them; a second one ends them at once."
    return CommandParser(name, "[MODEL]", about, words=["model"])


def serve(config: EngineConfig, on_output: Callable[[str, str], None] | None = None) -> int:
    """Run the engines of a deployment until a signal ends them. Main thread only.

    Args:
        on_output: see `Supervisor`.

    Returns:
        The program's exit code.

    Raises:
        WavecoreError: they did not start, or stay down.
    """
    with StartBar(config.disable_tqdm) as bar:
        supervisor = make_supervisor(config, on_output=on_output)
        return supervisor.serve(bar, on_ready=lambda folder: _tell(bar, folder, config.address))


def _tell(bar: StartBar, folder: Path, address: str | None) -> None:
    bar.close()
    print(f"ready; runtime directory: {folder}")
    print(f'attach: wavecore chat --attach {folder}    or from Python: wavecore.connect("{folder}")', flush=True)
    if address:
        print(f"from other hosts: wavecore access {folder} > access.json, and there attach to that file", flush=True)

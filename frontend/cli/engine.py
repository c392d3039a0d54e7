"""`wavecore engine [MODEL]`: an engine that other processes attach to, until a signal ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wavecore.frontend.cli.parser import CommandParser, settings
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.progress_bars import StartBar
from wavecore.transport.addresses import engine_ports


def run(args: Sequence[str]) -> int:
    about = "Runs an engine. SIGTERM or Ctrl-C drains it; a second one ends it at once."
    config = settings(CommandParser("engine", "[MODEL]", about, words=["model"]).parse(args))
    with StartBar(config.disable_tqdm) as bar:
        return make_supervisor(config).serve(bar, on_ready=lambda folder: _tell(bar, folder, config.address))


def _tell(bar: StartBar, folder: Path, address: str | None) -> None:
    bar.close()
    print(f"ready; runtime directory: {folder}")
    print(f'attach: wavecore chat --attach {folder}    or from Python: wavecore.connect("{folder}")', flush=True)
    if address and not engine_ports(address)[0].endswith(":0"):
        print(f"from other hosts: wavecore chat --attach {address} --key-file COPY_OF_keys/client.key", flush=True)

"""A picture of a load test, drawn by matplotlib (extra `bench`): which part of the requests was as fast as that."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from wavecore.frontend.load.load_run import Sample
from wavecore.transport.errors import ConfigError

PANELS = {"ttft": "time to first token", "tpot": "time a token after the first", "e2e": "whole request"}
SUFFIXES = (".svg", ".png", ".pdf")


def plotter(path: str) -> Callable[[Sequence[Sample]], None]:
    """What draws the samples that were answered into a file; to be asked for before the work is done.

    Raises:
        ConfigError: no matplotlib is there, or it writes no such file.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(f"--plot must end in {', '.join(SUFFIXES)}, not {path!r:.80}")
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(12, 4), layout="constrained")
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'wavecore[bench]'") from error

    def draw(samples: Sequence[Sample]) -> None:
        each = [sample.latencies() for sample in samples if not sample.error]
        for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            axes.set(title=title, xlabel="ms", ylabel="part of the requests")
            if values := [1e3 * found[name] for found in each if name in found]:
                axes.ecdf(values)
        figure.savefig(path)

    return draw

"""Chooses the runner for a model. Imports torch only for a model that needs it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Never

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.plan import Runner
from wavecore.engine_core.startup.beginning import Beginning, begin
from wavecore.transport.addresses import interface_of
from wavecore.transport.errors import ModelError
from wavecore.transport.io.host_link import HostLink
from wavecore.transport.io.step_link import StepLink
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.step_ring import StepChannel, StepRing

if TYPE_CHECKING:
    import torch

    from wavecore.engine_core.execution.runner import ModelRunner
    from wavecore.engine_core.models.spec import ModelSpec
    from wavecore.parallel.ranks import Ranks


def make_runner(
    config: EngineConfig,
    progress: Callable[[str, float], None],
    group: GroupMemory | None = None,
    link: HostLink | None = None,
    begun: Beginning | None = None,
) -> Runner:
    """Load `config.model` for the first rank of an engine, or its only one.

    Args:
        progress: called as progress(phase, fraction) with the phases of `frontend.progress_bars`.
        group: shared with the other ranks of this host, if there are any.
        link: to those of other hosts.
        begun: see `begin`; without it this begins here.

    Raises:
        ModelError, ConfigError, NotSupportedError: what does not fit, and the way out.
    """
    if config.is_scripted:
        scripted: Runner = _scripted().ScriptedRunner(config, progress, group=group)
        return scripted
    runner = _load(config, progress, group, link, begun)
    if group is None or config.tensor_parallel_size == 1:
        return runner
    from wavecore.engine_core.tensor_parallel.group_runner import GroupRunner

    return GroupRunner(runner, _channel(config, group, link), config.check_ranks)


def make_worker(
    config: EngineConfig,
    progress: Callable[[str, float], None],
    group: GroupMemory,
    link: HostLink | None = None,
    begun: Beginning | None = None,
) -> tuple[Callable[[], Never], str]:
    """Load `config.model` for another rank of an engine.

    Args:
        progress, group, link, begun: as for `make_runner`.

    Returns:
        What follows the steps of the engine's first rank, and the device that it does them on.

    Raises:
        ModelError, ConfigError: what does not fit, and the way out.
    """
    if config.is_scripted:
        return _scripted().ScriptedWorker(config, progress, group).run, "cpu"
    runner = _load(config, progress, group, link, begun)
    from wavecore.engine_core.tensor_parallel.worker import Worker

    return Worker(runner, _channel(config, group, link), config.check_ranks).run, runner.info.device


def _channel(config: EngineConfig, group: GroupMemory, link: HostLink | None) -> StepChannel:
    """Between the ranks of an engine."""
    return link if isinstance(link, StepLink) else StepRing(group.part(config.tensor_parallel_size))


def _scripted() -> ModuleType:
    """What runs a scripted model: for tests, and so no part of the package."""
    try:
        return import_module("scripted_runner")
    except ModuleNotFoundError as error:
        raise ModelError('model="scripted:PATH" is for tests: put scripts/ of a checkout on PYTHONPATH') from error


def _load(
    config: EngineConfig,
    progress: Callable[[str, float], None],
    group: GroupMemory | None,
    link: HostLink | None,
    begun: Beginning | None,
) -> ModelRunner:
    """This rank's share of a real model."""
    # OpenMP reads this when torch is first imported. A worker thread that spins while it waits takes the core that the
    # frontend needs: on two busy cores steps then took five to ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    source, compiling = begun or begin(config, progress, group.rank if group else 0)
    with compiling as compiler:
        progress("import", 0.0)
        load_runner = _import_loader()
        if config.tensor_parallel_size == 1 and not config.enable_expert_parallel:
            return load_runner(config, source, progress, compiler=compiler)

        def meet(device: torch.device) -> Ranks:
            return _meet(config, source.spec, device, group, link)

        return load_runner(config, source, progress, meet, compiler)


@cache
def _import_loader() -> Callable[..., ModelRunner]:
    """`loader.load_runner`. To look for garbage while torch is imported takes a sixth of that time, and finds none; nor
    does any later look at what was imported, which takes 0.1 s each."""
    gc.disable()
    from wavecore.engine_core.startup.loader import load_runner

    gc.freeze()
    gc.enable()
    return load_runner


def _meet(
    config: EngineConfig, spec: ModelSpec, device: torch.device, group: GroupMemory | None, link: HostLink | None
) -> Ranks:
    """Meet the other ranks, on one host or several."""
    import torch

    from wavecore.parallel.ranks import check_graphs, join
    from wavecore.parallel.store import LinkStore

    sizes = config.tensor_parallel_size, config.enable_expert_parallel
    if link is None:
        assert group is not None
        kernel = not config.disable_custom_all_reduce
        return join(group.store_fd, group.rank, group.ranks, *sizes, device, group.wait_for, kernel)
    if device.type == "cuda" and not config.enforce_eager:
        check_graphs(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    place, store, interface = link.place, LinkStore(link.ask), interface_of(link.place.host)
    if place.rank == 0:
        store.set("model", repr(spec))
    elif (theirs := store.get("model").decode()) != repr(spec):
        both = zip(repr(spec).split(", "), theirs.split(", "), strict=False)
        differ = next((f": {ours}, and there {other}" for ours, other in both if ours != other), "")
        raise ModelError(f"{config.model!r} on {place.host} is another model than that of rank 0{differ}")
    return join(store, place.rank, place.ranks, *sizes, device, link.wait_for, False, interface)

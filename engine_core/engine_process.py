"""What a process of an engine runs: the core that clients talk to, or a worker of its group."""

import argparse
import atexit
import logging
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Never

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.loop.dp_proc import DPEngineCore, DPEngineCoreProc
from wavecore.engine_core.loop.proc import EngineCoreProc
from wavecore.engine_core.plan import RunnerInfo
from wavecore.engine_core.startup.beginning import Beginning
from wavecore.engine_core.startup.factory import make_runner, make_worker
from wavecore.transport.addresses import host_of
from wavecore.transport.curve import CurveServer
from wavecore.transport.io.host_link import HostLink, RankPlace
from wavecore.transport.io.step_link import StepLink
from wavecore.transport.io.vote_link import VoteLink
from wavecore.transport.processes.child import SupervisedChild
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.votes import VoteBoard
from wavecore.transport.version import VERSION

ALIKE: tuple[str, ...] = (
    *("data_parallel_size", "tensor_parallel_size", "enable_expert_parallel", "dtype", "max_model_len", "block_size"),
    *("max_num_seqs", "max_num_batched_tokens", "enforce_eager", "cudagraph_capture_sizes", "nnodes"),
)
"""Settings that ranks of several hosts must share: they shape what all compute together."""
ALIKE_IN_ENGINE = "check_ranks", "load_format", "max_logprobs", "swap_space_gib"
"""... and those of one engine, whose workers follow rank 0's plans."""

logger = logging.getLogger("wavecore.engine_core")


def build(
    args: argparse.Namespace, config: EngineConfig, child: SupervisedChild, begun: Beginning | None
) -> Callable[[], None]:
    """Load the model; returns what serves it until the process is to end.

    Args:
        begun: what was begun of that already.

    Raises:
        WavecoreError: settings, a model, ports or memory that do not do; a rank of the group that is gone.
    """
    memory, link = child.group, None
    if config.spans_hosts:
        memory = memory or GroupMemory.alone(child.progress)
        link = _link(config, args.keys, child, memory)
    if memory and child.rank % config.tensor_parallel_size:
        return partial(_run_worker, *make_worker(config, child.report_phase, memory, link, begun), child)
    if memory and config.dp_lockstep:
        assert link is None or isinstance(link, VoteLink)
        engines = memory.heads(config.tensor_parallel_size)
        runner = make_runner(config, child.report_phase, child.group, link, begun)
        dp_core = DPEngineCore(config, runner, link or VoteBoard(engines), expect=child.progress.expect)
        life = int.from_bytes(link.life[:8]) if link else memory.life
        bound = _bound(args, child, dp_core, lockstep=life)
        return DPEngineCoreProc(dp_core, child, engines, **bound).run
    core = EngineCore(
        config, make_runner(config, child.report_phase, memory, link, begun), expect=child.progress.expect
    )
    return EngineCoreProc(core, child, **_bound(args, child, core)).run


def _run_worker(follow: Callable[[], Never], device: str, child: SupervisedChild) -> Never:
    """Follow until the supervisor ends this process, or an error does.

    Args:
        follow: does rank 0's steps.
        device: that it does them on, as torch names it.
        child: this process's tie to its supervisor.

    Raises:
        Exception: whatever broke this rank, after the supervisor was told.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a service, say: rank 0 drains first
        signal.signal(number, lambda got, _frame: child.pass_on(got))
    child.report_ready({"resolved": {"device": device}})
    try:
        follow()
    except Exception as error:
        cause = child.report_failure(error)
        logger.exception("the engine ends: %s", cause.message)
        raise


def _link(config: EngineConfig, keys: Path, child: SupervisedChild, memory: GroupMemory) -> HostLink:
    """To the ranks of all hosts, when they have met: those of this engine, or of all engines in lockstep."""
    assert config.data_parallel_address is not None and config.address is not None
    size, here = config.tensor_parallel_size, config.engines_here
    engines, local, alike = config.data_parallel_size, range(here.start * size, here.stop * size), ALIKE
    if config.nnodes > 1:
        engines, local, alike = 1, config.ranks_here, ALIKE + ALIKE_IN_ENGINE
    place = RankPlace(
        address=config.data_parallel_address,
        host=host_of(config.address),
        rank=local[memory.rank],
        ranks=engines * size,
        engine_ranks=size,
        kind=", ".join([f"version {VERSION}", *(f"{name} {getattr(config, name)}" for name in alike)]),
    )
    link = (StepLink if config.nnodes > 1 else VoteLink)(place, keys, memory, local, child.report_failure)
    atexit.register(link.close)  # however this ends, the others hear of it
    child.conclude, child.introduce, child.pass_on = link.conclude, link.introduce, link.pass_on
    child.report_phase("meet", 0.0)
    link.meet(config.ready_timeout)
    return link


def _bound(args: argparse.Namespace, child: SupervisedChild, core: EngineCore, **more: Any) -> dict[str, Any]:
    """Where an engine listens, and what it tells clients."""
    child.report_phase("bind", 0.0)
    return {
        "resolved": _resolved(core.config, core.runner.info) | more,
        "input_address": args.input,
        "output_address": args.output,
        "curve": CurveServer.load(args.keys) if args.input.startswith("tcp:") else None,
    }


def _resolved(config: EngineConfig, info: RunnerInfo) -> dict[str, Any]:
    """What an attached client needs to know: it has no config of its own."""
    told = (
        "model",
        "tokenizer",
        "skip_tokenizer_init",
        "served_model_name",
        "generation_config",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_queued_reqs",
        "enable_prefix_caching",
        "tensor_parallel_size",
    )
    return {name: getattr(config, name) for name in told} | asdict(info)

"""`torchrun --nproc-per-node N -m wavecore engine ...`: N ranks on this host, under one supervisor; likewise on others.

torchrun starts a process a rank; here a supervisor starts them, watches them and starts them again. So the first of
torchrun's processes runs the engines, and the others hold their places: they sleep until the first ends, and end with
its exit code. It tells them over a socket in Linux's abstract namespace, which leaves no file, whoever is killed.

With `--nnodes` each host has a deployment of its own: engines with the numbers that follow from torchrun's ranks.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence

import setproctitle

from wavecore.frontend.cli.main import own_process, told
from wavecore.transport.errors import ConfigError, EngineDead
from wavecore.transport.processes.child import die_with_parent

COMMAND = "torchrun --standalone --nproc-per-node {} -m wavecore engine"
HOLDERS_SECONDS = 5.0  # that the first process waits at its end for those that have not even asked yet
ASK_SECONDS = 0.05
MAX_ADDRESS = 100  # bytes; Linux takes 108


def started_this() -> bool:
    """Whether this process is one of torchrun's."""
    return {"TORCHELASTIC_RUN_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys()


def main(args: Sequence[str]) -> int:
    """One of torchrun's processes. Returns its exit code; it is killed when torchrun ends before it."""
    die_with_parent()
    # torchrun's own names for a start: two of them on this host, or in containers that share its network, differ.
    names = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
    address = " ".join(["\0wavecore", str(os.getppid()), *(os.environ.get(name, "") for name in names)])[:MAX_ADDRESS]
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    with socket.socket(socket.AF_UNIX) as ours:
        if rank:
            setproctitle.setproctitle(f"wavecore place of rank {rank}")
            return _hold(ours, address)
        ours.bind(address)
        ours.listen(ranks)
        own_process()
        code = told("torchrun -m wavecore", lambda: run(args, ranks))
        ours.settimeout(HOLDERS_SECONDS)
        with contextlib.suppress(OSError):  # they are gone: torchrun ends all of its processes when one fails
            for _ in range(1, ranks):
                ours.accept()[0].send(bytes([code]))
        return code


def _hold(ours: socket.socket, address: str) -> int:
    while ours.connect_ex(address):  # the first process listens first thing
        time.sleep(ASK_SECONDS)
    with contextlib.suppress(ConnectionResetError):  # killed before it accepted us
        if code := ours.recv(1):
            return code[0]
    return EngineDead.exit_code


def run(args: Sequence[str], ranks: int) -> int:
    """As `wavecore engine`, with so many ranks on this host.

    Raises:
        ConfigError: the sizes that are given make another number of ranks, or hosts whose parts of an engine differ;
            or no address, on several hosts.
    """
    # Slow to import, and not for those that hold a place.
    from wavecore.frontend.cli.engine import make_parser, serve
    from wavecore.frontend.cli.parser import settings
    from wavecore.frontend.compat import SETTINGS

    command, world = COMMAND.format(ranks), int(os.environ["WORLD_SIZE"])
    if args[:1] != ["engine"]:
        raise ConfigError(f"torchrun starts engines alone: {command}; run other commands without it")
    values = make_parser(command).parse(args[1:], {**SETTINGS, "data_parallel_size": None})
    engines, each = values.data_parallel_size, values.tensor_parallel_size
    if ranks < each and each % ranks == 0:  # this host has a part of an engine
        values.nnodes, values.node_rank = each // ranks, int(os.environ["RANK"]) % each // ranks
    if engines is None:
        engines = values.data_parallel_size = max(1, world // each)
        if world > 1:
            why = f"torchrun started {world} processes, and an engine has {each} (tensor_parallel_size)"
            print(f"wavecore: data_parallel_size {engines}: {why}", file=sys.stderr)
    if engines * each != world or (ranks % each and each % ranks):
        sizes = f"--data-parallel-size {engines} --tensor-parallel-size {each}"
        raise ConfigError(
            f"torchrun started {world} processes, {ranks} here, and {sizes} make {engines * each} ranks, an equal "
            f"part on each host; run {COMMAND.format(engines * each)} {sizes}, or without torchrun: "
            f"wavecore engine {sizes}"
        )
    if world > ranks:
        if values.address is None:
            raise ConfigError(f"torchrun started {ranks} of {world} processes here: give address tcp://THIS_HOST")
        values.data_parallel_rank = int(os.environ["RANK"]) // each
        values.data_parallel_size_local = max(1, ranks // each)
    return serve(settings(values))

"""Which GPUs each engine of a deployment gets, or which share of the CPU; decided before it starts, without torch.

An engine's processes see exactly its own GPUs, through CUDA_VISIBLE_DEVICES: rank r computes on "cuda:r", and no
context, library or fault of theirs touches a neighbour's. All ranks of an engine see the same list: what maps memory of
one GPU into another's process (torch's symmetric memory) wants each rank to have a number of its own. Engines in
lockstep are one in this respect.

How CUDA reads that variable, and so how it is read here: CUDA C++ Programming Guide, "CUDA Environment Variables", and
torch.cuda, which counts by the same rules. Which GPUs there are stands in the driver's files: it is not started.
"""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from wavecore.engine_core.api.config import EngineConfig
from wavecore.transport.errors import ConfigError

VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
MOST_A_CORE = 16  # processes of a deployment on a CPU; more would wait for each other, if they had the memory
_INFORMATION = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)$(?:\n.+)*\nDevice Minor:\s*(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank runs.

    Attributes:
        name: of what it computes on, for people: "GPU 1", "GPU-8f3a2c1e", "MIG-...", "cpu".
        device: what its setting `device` becomes.
        env: of its process: its engine's GPUs, or its CPU threads.
    """

    name: str
    device: str
    env: Mapping[str, str]


Stages = Mapping[str, tuple[EngineConfig, list[list[Placement]]]]
"""Stage of a pipeline -> its settings, and the ranks of each of its engines."""


def places(
    config: EngineConfig, environ: Mapping[str, str] = os.environ, root: Path = Path("/"), sharing: int | None = None
) -> list[list[Placement]]:
    """The ranks of each engine of a deployment: neighbours over the GPUs, or equal shares of the CPU's cores.

    "auto" takes GPUs where there are any, except for a scripted model, which has no use for them.

    Args:
        environ, root: of this program; tests give others.
        sharing: ranks of a pipeline, which may share the CPU's cores; None: these alone.

    Raises:
        ConfigError: too few GPUs or CPU cores, or no such device; with both numbers.
    """
    engines, ranks, device = len(config.engines_here), len(config.ranks_here), config.device
    if device == "auto" and config.is_scripted:
        device = "cpu"
    count, number, visible = engines * ranks, cuda_number(device), visible_gpus(environ, root)
    if device == "cpu" or (device == "auto" and not visible):
        sharing, cores = sharing or count, len(os.sched_getaffinity(0))
        if count > MOST_A_CORE * cores:
            raise ConfigError(
                f"{count} processes are asked for (data_parallel_size {engines} x tensor_parallel_size {ranks}), and "
                f"this CPU's {cores} cores take {MOST_A_CORE * cores} at most; lower either size"
            )
        share = {THREADS: str(max(1, cores // sharing))}
        return [[Placement("cpu", device, {} if sharing == 1 or THREADS in environ else share)] * ranks] * engines
    if count == 1 and visible is None:  # CUDA may know of one
        return [[Placement(device, device, {})]]
    visible = visible or []
    gpus = visible if number is None else visible[number : number + 1]
    if count > len(gpus):
        raise ConfigError(
            f"{count} GPUs are asked for (data_parallel_size {engines} x tensor_parallel_size {ranks}), and device "
            f"{device!r} has {len(gpus)} of {len(visible)} visible ones ({VISIBLE}: {environ.get(VISIBLE, 'not set')})"
            f"; look at nvidia-smi and {VISIBLE}, lower either size, or set device cpu"
        )
    size = count if config.dp_lockstep else ranks
    found = [place for first in range(0, count, size) for place in _neighbours(gpus[first : first + size], device)]
    return [found[first : first + ranks] for first in range(0, count, ranks)]


def stage_places(
    stages: Mapping[str, tuple[EngineConfig, Sequence[int]]],
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Stages:
    """The ranks of each engine of each stage of a pipeline. Stages may share a GPU, and share the CPU's cores.

    Args:
        stages: by name the settings, and the numbers of visible GPUs, one a rank; on a CPU these are not read.

    Raises:
        ConfigError: no such GPUs, too few or too many, or shares of one GPU's memory that add up to more than 1.
    """
    visible = visible_gpus(environ, root) or []
    ranks = sum(config.data_parallel_size * config.tensor_parallel_size for config, _ in stages.values())
    found, shares = {}, defaultdict[str, dict[str, float]](dict)
    for name, (config, gpus) in stages.items():
        own = [visible[gpu] for gpu in dict.fromkeys(gpus) if gpu < len(visible)]
        engines = places(config, {**environ, VISIBLE: ",".join(own)} if own else environ, root, ranks)
        used = {place.name for place in chain(*engines)} - {"cpu"}
        if visible and used and not len(used) == len(own) == len(gpus):
            way_out = f"name {len(used)} of the {len(visible)} visible ones, one a rank"
            raise ConfigError(f"stage {name}: gpus are {list(gpus)}; {way_out}")
        found[name] = config, engines
        for gpu in used:
            shares[gpu][name] = config.gpu_memory_utilization
    for gpu, share in shares.items():
        if sum(share.values()) > 1.0 + 1e-9:  # of floats: 0.3, 0.3 and 0.4 are more than 1
            each = " + ".join(f"{part:g} ({stage})" for stage, part in share.items())
            raise ConfigError(f"{gpu}: gpu_memory_utilization of its stages is {each}; lower them to 1 in all")
    return found


def _neighbours(gpus: Sequence[str], device: str) -> list[Placement]:
    names = [f"GPU {gpu}" if gpu.isdecimal() else gpu for gpu in gpus]
    if device == "auto" and len(gpus) == 1:  # the rank asks torch whether it can use the GPU at all
        return [Placement(names[0], device, {VISIBLE: gpus[0]})]
    return [Placement(name, f"cuda:{rank}", {VISIBLE: ",".join(gpus)}) for rank, name in enumerate(names)]


def cuda_number(device: str) -> int | None:
    """N of "cuda:N"; None for "auto", "cpu" and "cuda".

    Raises:
        ConfigError: any other text.
    """
    found = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,3}))?", device)
    if not found:
        raise ConfigError(f'device {device!r}: give "auto", "cpu", "cuda" or "cuda:N"')
    return None if found[1] is None else int(found[1])


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> list[str] | None:
    """The GPUs that CUDA shows a process in this environment, in its order, each as CUDA_VISIBLE_DEVICES names it.

    As for CUDA: the list ends at the first entry that is no GPU here, and one that names a GPU twice is no list at all.
    A UUID may be cut short as long as one GPU alone begins so. MIG instances are taken at their word, since no file
    names them.

    Args:
        root: of the file system.

    Returns:
        None where no file says: there is no GPU, or no way to see it from here (WSL).
    """
    uuids, given = _uuids(root), environ.get(VISIBLE)
    if not uuids or (given and "GPU-" in given and not all(uuids)):
        return None
    if given is None:
        return [str(number) for number in range(len(uuids))]
    numbers = range(len(uuids))
    found: dict[Any, str] = {}
    for entry in (text.strip() for text in given.split(",")):
        gpus: list[Any] = [entry] if entry.startswith("MIG-") else []
        gpus += [n for n in numbers if entry == str(n) or (entry.startswith("GPU-") and uuids[n].startswith(entry))]
        if len(gpus) != 1:
            break
        if gpus[0] in found:
            return []
        found[gpus[0]] = entry
    return list(found.values())


def _uuids(root: Path) -> list[str]:
    """UUIDs of the GPUs whose device files are here, "" for unknown; a container may have fewer than its driver."""
    found = [path.read_text(errors="replace") for path in (root / "proc/driver/nvidia/gpus").glob("*/information")]
    uuids = {minor: uuid for uuid, minor in _INFORMATION.findall("\n\n".join(found))}
    names = (path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia*"))
    return [uuids.get(minor, "") for minor in sorted(filter(str.isdecimal, names), key=int)]

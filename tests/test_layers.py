"""The layers and rooms of ARCHITECTURE.md, enforced: an import points down, between folders and between rooms.

A room is a folder inside one of the five top-level folders; a file that lies at such a folder's top is a room of its
own. `TIERS` gives each its place.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from documents import FOLDERS, ROOT, package_files

MAX_FILES = 14
MAY_IMPORT = {
    "frontend": ("transport", "engine_core.api", "engine_core.ray_groups"),
    "engine_core": ("transport", "parallel", "kernels"),
    "parallel": ("transport", "kernels"),
    "kernels": (),
    "transport": (),
}
TORCH_FREE = ("frontend", "transport")

# Of each folder its rooms from top to bottom; an import goes to the room itself or to a lower line. Rooms of one line
# do not import each other.
TIERS = {
    "frontend": (
        ("cli", "fixtures"),
        ("load", "serve"),
        ("vllm",),
        ("llm", "pipeline"),
        ("async_llm",),
        ("base",),
        ("client",),
        ("text",),
        ("compat", "progress_bars"),
        ("outputs", "prompts"),
    ),
    "engine_core": (
        ("__main__", "ray_groups"),
        ("engine_process",),
        ("loop", "ray_actor"),
        ("scheduling",),
        ("kv_cache",),
        ("startup",),
        ("tensor_parallel",),
        ("execution",),
        ("models",),
        ("request",),
        ("plan",),
        ("api",),
    ),
    "parallel": (
        ("sampler",),
        ("experts", "ranks", "store"),
        ("layers",),
        ("collectives", "peer_memory", "wave"),
    ),
    "kernels": (
        ("ops",),
        ("check",),
        ("examples",),
        (
            *("attention", "moe", "sampling"),
            *("activation", "all_reduce", "copies", "kv_write", "linear", "norm", "prepare"),
        ),
        ("reference",),
        ("batch", "chain", "device"),
    ),
    "transport": (
        ("io",),
        ("processes",),
        ("wire",),
        ("addresses", "curve", "forks", "headroom", "waker"),
        ("errors", "small_files", "version"),
    ),
}
# The host's side of a step and its device's side meet in a plan alone.
APART = (
    ("engine_core.loop", "engine_core.startup"),
    ("engine_core.loop", "engine_core.execution"),
    ("engine_core.loop", "engine_core.models"),
    ("engine_core.scheduling", "engine_core.startup"),
    ("engine_core.scheduling", "engine_core.execution"),
    ("engine_core.scheduling", "engine_core.models"),
    ("engine_core.kv_cache", "engine_core.startup"),
    ("engine_core.kv_cache", "engine_core.execution"),
    ("engine_core.kv_cache", "engine_core.models"),
)
# Data alone, which every room of its folder may import.
PLAIN_DATA = {"kernels.sampling.rows"}
# Names that several rooms use for their own kind of one thing: the room says which.
SAME_FILE_NAMES = {
    "__init__",
    "__main__",
    "admission",
    "chat",
    "experts",
    "layers",
    "messages",
    "request",
}
SAME_FILE_NAMES |= {"utilities"}

FILES = package_files()
# A room that stands in for vLLM calls things as vLLM does.
FILES_BUT_THE_STAND_IN = [path for path in FILES if "vllm" not in path.parent.parts]


def module_of(path: Path) -> str:
    """As it is imported, without the package's name: "engine_core.loop.core", "engine_core.loop", or "" for the top."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[2:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


MODULES = {module_of(path): path for path in FILES}
PLACE = {
    f"{folder}.{room}": (folder, tier)
    for folder, tiers in TIERS.items()
    for tier, rooms in enumerate(tiers)
    for room in rooms
}


def imports(path: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, `from a import b` as a.b."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """The package's own modules among them."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        while parts[0] == "wavecore" and len(parts) > 1:
            if ".".join(parts[1:]) in MODULES:
                found.add(".".join(parts[1:]))
                break
            parts.pop()
    return found


def room_of(module: str) -> str:
    """ "engine_core.loop.core" lies in room "engine_core.loop", "engine_core.plan" is one."""
    return ".".join(module.split(".")[:2])


def crosses_layers(folder: str, name: str) -> bool:
    """Whether a file of this folder must not import this name."""
    top, _, rest = name.partition(".")
    if top in FOLDERS or (top in ("torch", "triton") and folder in TORCH_FREE):
        return True
    if top != "wavecore" or not rest:
        return False
    allowed = (folder, *MAY_IMPORT[folder])
    return not any(rest == a or rest.startswith(a + ".") for a in allowed)


def goes_up(room: str, other: str) -> bool:
    """Whether the first room must not import the second, of the same folder."""
    if room == other or PLACE[room][0] != PLACE[other][0]:
        return False
    return (room, other) in APART or PLACE[room][1] >= PLACE[other][1]


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in arrows:
        seen: set[str] = set()
        todo = list(arrows[start])
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += arrows.get(node, ())
        reach[start] = seen
    groups = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in reach if a in reach[a]}
    return [list(group) for group in sorted(groups)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down_between_folders(folder: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports(path)
        if crosses_layers(folder, name)
    ]
    assert not bad, "\n".join(bad)


def test_every_file_has_a_room_with_a_place() -> None:
    rooms = {room_of(module) for module in MODULES if module.split(".")[0] in FOLDERS and "." in module}
    assert not sorted(rooms - PLACE.keys()), "give these rooms a place in TIERS"
    assert not sorted(PLACE.keys() - rooms), "these rooms of TIERS are gone"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down_between_rooms(folder: str) -> None:
    bad = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in sorted(imported_modules(path))
        if {room_of(module), room_of(other)} <= PLACE.keys()
        and module.startswith(f"{folder}.")
        and other not in PLAIN_DATA
        and goes_up(room_of(module), room_of(other))
    ]
    assert not bad, "\n".join(bad)


def test_plain_data_imports_nothing_of_the_package() -> None:
    assert not {module: others for module in PLAIN_DATA if (others := imported_modules(MODULES[module]))}


def test_no_import_circle() -> None:
    modules = {module: imported_modules(path) - {module} for module, path in MODULES.items() if module}
    assert not circles(modules)
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, others in modules.items():
        rooms[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    assert not circles(rooms)


def test_a_room_is_small() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in FILES if path.name != "__init__.py")
    assert not {room: count for room, count in files.items() if count > MAX_FILES}


def test_a_room_says_what_it_knows() -> None:
    """Its `__init__.py` is one docstring, what it knows and what it leaves to whom, and no code."""
    folders = {path.parent for path in FILES if path.is_relative_to(ROOT / "src") is False}
    bad = []
    for folder in sorted(folders):
        if folder.is_relative_to(ROOT / "kernels"):
            assert not (folder / "__init__.py").exists(), "a package `kernels` would hide Hugging Face's"
            continue
        tree = tree_of(folder / "__init__.py")
        text = (ast.get_docstring(tree) or "").lower()
        if len(tree.body) != 1 or "know" not in text or "leave" not in text:
            bad.append(folder.relative_to(ROOT).as_posix())
    assert not bad


def test_no_class_name_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES_BUT_THE_STAND_IN:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_no_file_name_twice() -> None:
    names = Counter(path.stem for path in FILES_BUT_THE_STAND_IN)
    assert not sorted(name for name, count in names.items() if count > 1 and name not in SAME_FILE_NAMES)
    assert not sorted(name for name in SAME_FILE_NAMES if names[name] < 2 and not name.startswith("__"))


def test_loggers_have_one_name() -> None:
    bad = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assign) and "logging.getLogger(" in ast.unparse(node.value):
                bad += [
                    f"{path.relative_to(ROOT)}: {ast.unparse(t)}" for t in node.targets if ast.unparse(t) != "logger"
                ]
    assert not bad, "\n".join(bad)


def test_the_rules_see_a_violation() -> None:
    assert crosses_layers("transport", "wavecore.frontend.llm")
    assert crosses_layers("frontend", "wavecore.engine_core.scheduling.scheduler.Scheduler")
    assert crosses_layers("frontend", "torch")
    assert crosses_layers("engine_core", "kernels")
    assert not crosses_layers("frontend", "wavecore.engine_core.api.config.EngineConfig")
    assert goes_up("engine_core.kv_cache", "engine_core.scheduling")
    assert goes_up("engine_core.scheduling", "engine_core.execution")
    assert goes_up("transport.processes", "transport.io")
    assert not goes_up("engine_core.scheduling", "engine_core.kv_cache")
    assert not goes_up("engine_core.execution", "engine_core.plan")
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"]}) == [["b", "c"]]
    assert len(MODULES) > 100 and "engine_core.loop.core" in MODULES and "" in MODULES

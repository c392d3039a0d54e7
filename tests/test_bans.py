"""What may not appear in the package or its scripts: anything that turns bytes into code, and sockets of one's own."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ALIASES, ROOT, package_files

FILES = [*package_files(), *sorted((ROOT / "scripts").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]

# Modules that turn bytes into objects by running what the bytes say; multiprocessing's queues and pipes pickle.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
CALLS = {"eval", "exec", "__import__"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("np", "load"),
    ("numpy", "load"),
}
# Socket and collective helpers that pickle, on whatever object they are called.
METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def offences(source: str, allows_zmq: bool) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            top = name.split(".")[0]
            if top in MODULES or name in {".".join(pair) for pair in ATTRIBUTES}:
                yield f"line {node.lineno}: import of {name}"
            if top == "zmq" and not allows_zmq:
                yield f"line {node.lineno}: zmq outside of transport"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield f"line {node.lineno}: call of {node.func.id}"
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in METHODS or (owner, node.attr) in ATTRIBUTES:
                yield f"line {node.lineno}: {owner}.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            constant = isinstance(node.value, ast.Constant) and node.value.value is False
            if not constant:
                yield f"line {node.value.lineno}: {node.arg} must be False"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_banned_name(path: Path) -> None:
    inside_transport = path.is_relative_to(ROOT / "transport")
    assert not list(offences(path.read_text(), allows_zmq=inside_transport))


def test_no_file_is_overlooked() -> None:
    """Every module that can be imported, found as Python does: through the links of the import package."""
    walk = os.walk(ROOT / ALIASES, followlinks=True)
    found = {Path(folder, name).resolve() for folder, _, names in walk for name in names if name.endswith(".py")}
    assert found == {path.resolve() for path in package_files()}
    assert len(found) > 100 and found < {path.resolve() for path in FILES}
    assert {ROOT / ALIASES / "__init__.py", ROOT / "scripts" / "soak.py"} <= set(FILES)


def test_sockets_are_made_in_one_place() -> None:
    """`Context(` and `.socket(` of zmq stand in transport/sockets.py only."""
    makers = set()
    for path in (ROOT / "transport").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if (owner, node.func.attr) == ("zmq", "Context") or (owner, node.func.attr) == ("context", "socket"):
                    makers.add(path.name)
    assert makers == {"sockets.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "import zmq",
        "from zmq.utils import monitor",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "socket.recv_pyobj()",
        "import numpy as np\nnp.load('x')",
        "read('x', allow_pickle=True)",
        "make(trust_remote_code=flag)",
        "dist.broadcast_object_list([1])",
    ],
)
def test_the_ban_itself(source: str) -> None:
    assert list(offences(source, allows_zmq=False))


def test_innocent_names_pass() -> None:
    assert not list(offences("model.eval()\nimport json\njson.load(f)\nf(trust_remote_code=False)", allows_zmq=False))


def test_a_client_has_no_lock() -> None:
    """The collector, a signal handler or a fork may come upon whoever holds one. What its threads share goes through
    deques, `SimpleQueue` and descriptors, for which nobody has to wait."""
    locks = (
        "Lock",
        "RLock",
        "Condition",
        "Event",
        "Semaphore",
        "BoundedSemaphore",
        "Timer",
        "allocate_lock",
    )
    transport = (
        "waker.py",
        "forks.py",
        "io/client_pump.py",
        "io/connection.py",
        "io/io_thread.py",
        "processes/logs.py",
    )
    files = [*(ROOT / "frontend" / "client").glob("*.py"), *(ROOT / "frontend").glob("*.py")]
    for path in [*files, *(ROOT / "transport" / name for name in transport)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                banned = {"threading": locks, "_thread": locks, "queue": ("Queue", "LifoQueue", "PriorityQueue")}
                assert node.attr not in banned.get(node.value.id, ()), f"{path}, line {node.lineno}: {node.attr}"

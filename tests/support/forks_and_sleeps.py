"""The process that compiles kernels, with two forks, none of which end by themselves."""

import time
from types import SimpleNamespace

from wavecore.engine_core.startup.kernel_compiler import Forks
from wavecore.transport.processes.child import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    forks = Forks(2)
    kernel = SimpleNamespace(jit_function=SimpleNamespace(cache_key="", device_caches=[[{}]]))
    while forks.before(fn=kernel, compile={"key": "k"}) and forks._running < 2:
        pass
    time.sleep(600)

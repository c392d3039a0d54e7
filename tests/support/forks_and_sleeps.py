"""The process that compiles kernels, with two forks, none of which end by themselves."""

import time

from wavecore.engine_core.startup.kernel_compiler import Forks
from wavecore.transport.processes.child import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    forks = Forks(2, object)
    _ = forks.begin() or forks.begin()
    time.sleep(600)

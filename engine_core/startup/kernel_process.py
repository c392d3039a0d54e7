"""`python -m wavecore.engine_core.startup.kernel_process`: the process of `kernel_compiler`. While it imports torch, it
reads all of Triton, 400 MB, for a part of every kernel's key."""

import gc
import sys
from threading import Thread

from triton.runtime.cache import triton_key

from wavecore.transport.processes.child import die_with_parent


def main() -> int:
    die_with_parent()
    gc.disable()  # as in `factory`: there is no garbage in what it imports
    hashing = Thread(target=triton_key)
    hashing.start()
    from wavecore.engine_core.startup import kernel_compiler

    hashing.join()  # what forks has best no threads
    return kernel_compiler.main()


if __name__ == "__main__":
    sys.exit(main())

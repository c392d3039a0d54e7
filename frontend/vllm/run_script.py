"""`wavecore run-vllm SCRIPT [ARGUMENTS]`: a program written for vLLM, unchanged; its `import vllm` finds us."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from wavecore.frontend.vllm.modules import stand_in
from wavecore.transport.errors import ConfigError

USAGE = "usage: wavecore run-vllm SCRIPT [ARGUMENTS], or wavecore run-vllm -m MODULE [ARGUMENTS]"


def run(args: Sequence[str]) -> int:
    """Run the script, or with -m the module, as Python itself would: as `__main__`, with its folder on the path.

    Raises:
        ConfigError: no script.
    """
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(f"{USAGE}\n")
        return 0 if args else ConfigError.exit_code
    module = args[0] == "-m"
    if module and len(args) < 2:
        raise ConfigError(USAGE)
    if not module and not Path(args[0]).exists():
        raise ConfigError(f"{args[0]!r:.80} does not exist; {USAGE}")
    sys.argv = list(args[1:] if module else args)
    stand_in()
    if module:
        sys.path.insert(0, "")
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(args[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    return 0

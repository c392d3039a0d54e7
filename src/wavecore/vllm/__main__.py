"""`python -m wavecore.vllm SCRIPT [ARGUMENTS]`: as `wavecore run-vllm`."""

import sys

from wavecore.frontend.vllm.run_script import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

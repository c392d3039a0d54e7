"""`python -m wavecore COMMAND ...`: the `wavecore` command; `torchrun ... -m wavecore engine ...` runs engines."""

import sys

from wavecore.frontend.cli import torchrun
from wavecore.frontend.cli.main import main

if __name__ == "__main__":
    sys.exit(torchrun.main(sys.argv[1:]) if torchrun.started_this() else main())

"""A program that says what the compiling process says, and ends once there is a file of the name in $GATE."""

import os
import sys
from pathlib import Path

from tests.support.waiting import until

from wavecore.engine_core.startup.compilation import FIRST_DONE

if __name__ == "__main__":
    sys.stdout.write(f"more\n{FIRST_DONE}")
    sys.stdout.flush()
    until(Path(os.environ["GATE"]).exists)

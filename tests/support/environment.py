"""The environment of programs that tests start."""

from __future__ import annotations

import os
import sys

from documents import ROOT


def environment(**more: str) -> dict[str, str]:
    """This one; a program imports what can be imported here, wherever that lies, and the tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **more}

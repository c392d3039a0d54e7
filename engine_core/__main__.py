"""`python -m wavecore.engine_core`: one process of an engine, started by a supervisor
(`transport/processes/supervisor.py`): rank 0 of its group, which clients talk to, or a worker.

Exit codes: 0 stopped, 2 settings, 3 port or other resource, 4 model, 5 died.
"""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from wavecore.engine_core.api.config import MEMORY_ADVICE, EngineConfig
from wavecore.engine_core.startup.beginning import begin
from wavecore.transport.errors import EngineDead, WavecoreError, from_code
from wavecore.transport.headroom import raise_descriptor_limit
from wavecore.transport.processes import logs
from wavecore.transport.processes.child import SupervisedChild, parser

logger = logging.getLogger("wavecore.engine_core")


def main() -> int:
    arguments = parser("wavecore.engine_core")
    arguments.add_argument("--index", type=int, required=True)
    arguments.add_argument("--keys", type=Path, required=True)
    arguments.add_argument("--input", required=True)
    arguments.add_argument("--output", required=True)
    args = arguments.parse_args()
    raise_descriptor_limit()
    child = SupervisedChild(args, MEMORY_ADVICE)
    logs.set_up(args.name)
    try:
        run = _build(args, child)
    except Exception as error:
        cause = child.report_failure(error)
        if not isinstance(error, WavecoreError):  # a known one is raised where the engine was started
            logger.exception("%s did not start: %s", args.name, cause.message)
        return from_code(cause.code, cause.message).exit_code
    try:
        run()
    except Exception:  # told by it to everybody who needs to know
        return EngineDead.exit_code
    return 0


def _build(args: argparse.Namespace, child: SupervisedChild) -> Callable[[], None]:
    config = EngineConfig.from_json(child.config)
    logging.getLogger().setLevel(config.log_level.upper())
    child.rank += config.ranks_here.start
    begun = None
    if not config.is_scripted and not config.spans_hosts:  # whose ranks have to hear of each other's errors
        begun = begin(config, child.report_phase, child.group.rank if child.group else 0)
    from wavecore.engine_core.engine_process import build  # while kernels begin to compile: it takes most of a second

    return build(args, config, child, begun)


if __name__ == "__main__":
    sys.exit(main())

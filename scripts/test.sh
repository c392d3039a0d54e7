#!/usr/bin/env bash
# Run the test suite.     test.sh [--slow] [pytest arguments]
#   default   the fast tier that CI runs: under 8 minutes on 2 cores without a GPU
#   --slow    the full-size tests too
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh dev
select="not slow"
processes=2 # a file's tests stay in one process, so that they share what they start
if [[ ${1:-} == --slow ]]; then
    select=""
    processes=0
    shift
fi
if [[ -e /dev/nvidiactl ]]; then processes=0; fi # tests of a GPU's memory want it alone
exec .venv/bin/python -m pytest -m "$select" --numprocesses "$processes" --dist loadfile "$@"

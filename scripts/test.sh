#!/usr/bin/env bash
# Run the test suite.     test.sh [--slow] [pytest arguments]
#   default   the fast tier that CI runs: no GPU, 2 cores, under 15 minutes
#   --slow    the full-size tests too
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh dev
select="not slow"
if [[ ${1:-} == --slow ]]; then
    select=""
    shift
fi
exec .venv/bin/python -m pytest -m "$select" "$@"

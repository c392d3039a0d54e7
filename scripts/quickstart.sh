#!/usr/bin/env bash
# From a fresh machine to an answer: set up .venv, fetch the default model, start an engine, stream a reply.
# usage: quickstart.sh [QUESTION]
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
exec .venv/bin/wavecore generate "${1:-What is the capital of France?}" --temperature 0

#!/usr/bin/env bash
# From a fresh machine to an answer: set up .venv, fetch the default model, start an engine, stream a reply.
# usage: quickstart.sh [QUESTION]
set -euo pipefail
cd "$(dirname "$0")/.."
question=${1:-What is the capital of France?}
./scripts/setup.sh
echo "starting SmolLM2-135M-Instruct (fetched once: 94 MB, kept in ${WAVECORE_CACHE:-~/.cache/wavecore}) ..."
printf '\n> %s\n' "$question"
.venv/bin/wavecore generate "$question" --temperature 0
printf '\nNext:  source .venv/bin/activate;  wavecore chat\n'

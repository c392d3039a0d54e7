#!/usr/bin/env bash
# Make .venv and install the project with pinned versions; a second run returns at once.
# usage: setup.sh [EXTRA]     EXTRA is an optional-dependencies group of pyproject.toml, e.g. "dev"
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-}

stamp=.venv/wavecore-setup${extra:+-$extra}
want=$(cat pyproject.toml constraints.txt | sha256sum)
if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then exit 0; fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "wavecore needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON=..." >&2
    exit 2
}
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt)

# Without an NVIDIA GPU the CPU build of torch saves gigabytes. It lives on PyTorch's own index, which may be out of
# reach: ask it briefly, and let the default index serve torch otherwise.
cpu_index=https://download.pytorch.org/whl/cpu
if ! command -v nvidia-smi >/dev/null && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    if .venv/bin/python - "$cpu_index/torch/" 2>/dev/null <<'PY'; then
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=4).read(64)
PY
        echo "installing torch (CPU build) ..."
        "${pip[@]}" --index-url "$cpu_index" --no-deps torch || true  # the next line brings its dependencies
    fi
fi
echo "installing wavecore and its dependencies into .venv (2 GB with torch; a minute or more) ..."
"${pip[@]}" --editable ".${extra:+[$extra]}"
printf '%s' "$want" >"$stamp"

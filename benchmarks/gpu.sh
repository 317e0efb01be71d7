#!/usr/bin/env bash
# What only a GPU can tell, in one call under five minutes: benchmarks/gpu.sh [--out FILE] [--tiny]. See docs/measured.md.
#
# Runs under the first Python whose PyTorch sees a GPU: that of .venv, which ./run makes, or the system's. Nothing is
# installed into either. What Fourfold needs besides PyTorch, and that Python lacks, goes into a folder that is removed
# afterwards: from wheels in .whl, if there are any (a machine may have no internet), else from the package index.
set -euo pipefail
cd "$(dirname "$0")/.."

tiny=false
for argument in "$@"; do
    if [ "$argument" = --tiny ]; then tiny=true; fi
done

sees='import sys, torch; sys.exit(not (sys.argv[1] == "true" or torch.cuda.is_available()))'
chosen=
for python in .venv/bin/python python3; do
    if "$python" -c "$sees" "$tiny" 2>/dev/null; then
        chosen=$python
        break
    fi
done
if [ -z "$chosen" ]; then
    echo "gpu.sh: no PyTorch sees a CUDA GPU here, neither that of .venv nor that of python3; --tiny needs no GPU" >&2
    exit 1
fi

lacks='
import importlib.util
print(*(name for name in ("numpy", "msgspec", "rich", "safetensors", "fsspec") if not importlib.util.find_spec(name)))'
missing=$("$chosen" -c "$lacks")
site=
if [ -n "$missing" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    from=
    if compgen -G '.whl/*.whl' >/dev/null; then from="--no-index --find-links .whl"; fi
    # Words: options, and names of packages.
    # shellcheck disable=SC2086
    if ! "$chosen" -m pip install --quiet --no-deps --target "$site" $from $missing >&2; then
        echo "gpu.sh: $chosen lacks $missing; put their wheels into .whl" >&2
        exit 1
    fi
fi

export PYTHONPATH="src:benchmarks${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
"$chosen" -m gpu ${OUT:+--out "$OUT/gpu.json"} "$@"

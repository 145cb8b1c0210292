#!/usr/bin/env bash
# Builds the wheel and the sdist, and checks what an index would refuse.
#   scripts/build_dist.sh [FOLDER]        default: dist
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

out=${1:-dist}
make_environment dist
"$venv/bin/python" -m build --no-isolation --outdir "$out"
"$venv/bin/python" -m twine check --strict "$out"/*.whl "$out"/*.tar.gz

#!/usr/bin/env bash
# Installs a wheel or an sdist into an environment of its own, and plans the first run with it, away from the checkout:
# what the package lacks shows here. Needs no GPU.
#   scripts/check_dist.sh FILE
set -euo pipefail
file=$(realpath "$1")
config=$(realpath "$(dirname "$0")/../configs/tiny.yaml")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

${PYTHON:-python3} -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$file"
cd "$place"
export XDG_RUNTIME_DIR=$place LORAWGPU_CACHE=$place/cache
venv/bin/lorawgpu --version
venv/bin/lorawgpu train "$config" --set "output_dir=$place/out" --dry-run

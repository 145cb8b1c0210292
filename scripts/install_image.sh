#!/usr/bin/env bash
# What the Dockerfile runs: Mesa's Vulkan drivers and the package, with `lorawgpu` on the PATH. As root, on Debian.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

apt_install $ADAPTER_PACKAGES
make_environment hub,parquet,report,zstd
has_adapter || { echo "error: no Vulkan adapter, although $ADAPTER_PACKAGES are installed" >&2; exit 1; }
ln -sf "$(realpath "$venv")/bin/lorawgpu" "${BIN:-/usr/local/bin}/lorawgpu"

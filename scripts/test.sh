#!/usr/bin/env bash
# Sets up a virtual environment with the package and its test tools, and a GPU adapter, then runs ruff and the tests, in
# two processes: a test uses one core for the most part, to compile shaders.
#   scripts/test.sh                                      every test that is neither `long` nor `reference`
#   scripts/test.sh tests/test_config.py -k unknown      arguments go to pytest; a later -m or -n replaces ours
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

make_environment dev
has_adapter || apt_install $ADAPTER_PACKAGES || true
has_adapter || echo "no Vulkan, Metal or DX12 adapter: the GPU tests will fail (Debian and Ubuntu: apt-get install $ADAPTER_PACKAGES)" >&2

lint=0 tests=0
"$venv/bin/ruff" check . || lint=$?  # still run the tests
"$venv/bin/python" -m pytest -n 2 --dist loadfile -m "not long and not reference" "$@" || tests=$?
# People look at the last line, and ruff's output is far above it by now.
[ "$lint" = 0 ] || echo "ruff: failed (see the top of this output)" >&2
exit $((tests ? tests : lint))

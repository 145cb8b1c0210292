#!/usr/bin/env bash
# From a bare machine to a tested one: a virtual environment, the package with its test tools, an adapter, the tests.
#   scripts/test.sh                      ruff, then every test that is neither `long` nor `reference`
#   scripts/test.sh tests/test_config.py -k unknown      further arguments go to pytest; a later -m replaces ours
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

make_environment dev
has_adapter || apt_install $ADAPTER_PACKAGES || true
has_adapter || echo "no Vulkan, Metal or DX12 adapter: the GPU tests will fail (Debian and Ubuntu: apt-get install $ADAPTER_PACKAGES)" >&2

lint=0 tests=0
"$venv/bin/ruff" check . || lint=$?  # the tests run anyway
"$venv/bin/python" -m pytest -m "not long and not reference" "$@" || tests=$?
# A reader looks at the last line, and what ruff said is far above it by now.
[ "$lint" = 0 ] || echo "ruff: failed (what it found is at the top of this output)" >&2
exit $((tests ? tests : lint))

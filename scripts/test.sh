#!/usr/bin/env bash
# From a bare machine to a tested one: a virtual environment, the package with its test tools, an adapter, the tests.
#   scripts/test.sh                      ruff, then every test that is neither `long` nor `reference`
#   scripts/test.sh tests/test_config.py -k unknown      further arguments go to pytest; a later -m replaces ours
# PYTHON names another interpreter (3.11 or newer), VENV another folder for the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

# Vulkan's loader wants a private folder and complains on every start without one.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi

apt_install() {  # package... : true when installed; only as root on Debian and its relatives
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    echo "installing $*"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

find_python() {  # prints the first interpreter that is new enough and can make an environment
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$python" && return
    done
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python) || { apt_install python3 python3-venv && python=$(find_python); } || {
        echo "error: needs Python 3.11 or newer with venv (Debian and Ubuntu: apt-get install python3-venv)" >&2
        exit 2
    }
    "$python" -m venv "$venv"
fi

# Installed again only when the dependencies change, so that later runs need no network.
if ! cmp -s pyproject.toml "$venv/installed-pyproject.toml"; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[dev]'
    cp pyproject.toml "$venv/installed-pyproject.toml"
fi

has_adapter() { "$venv/bin/python" -c 'import sys; from lorawgpu.gpu.device import list_adapters; sys.exit(not list_adapters())' 2>/dev/null; }
has_adapter || apt_install libvulkan1 mesa-vulkan-drivers || true
has_adapter || echo "no Vulkan, Metal or DX12 adapter: the GPU tests will fail (Debian and Ubuntu: apt-get install libvulkan1 mesa-vulkan-drivers)" >&2

lint=0
"$venv/bin/ruff" check . || lint=$?  # the tests run anyway: their closing line is the last thing a reader looks for
"$venv/bin/python" -m pytest -m "not long and not reference" "$@"
exit "$lint"

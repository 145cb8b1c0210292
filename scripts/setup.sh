# Sourced by quickstart.sh and test.sh: sets up a virtual environment with the package, and a GPU adapter.
# PYTHON overrides the interpreter (3.11 or newer), VENV the environment's folder.
venv=${VENV:-.venv}

# Vulkan's loader wants a private folder, and warns on every start without one.
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi

apt_install() {  # package... : succeeds if installed; only on Debian-like systems, as root or with SUDO=sudo
    [ "$(id -u)" = 0 ] || [ -n "${SUDO:-}" ] || return 1
    command -v apt-get >/dev/null || return 1
    echo "installing $*"
    ${SUDO:-} apt-get update -qq &&
        ${SUDO:-} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

find_python() {  # prints the first interpreter that is new enough and can create an environment
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$python" && return
    done
    return 1
}

make_environment() {  # extras : creates $venv and installs the package; needs no network if already done
    if [ ! -x "$venv/bin/python" ]; then
        local python
        python=$(find_python) || { apt_install python3 python3-venv && python=$(find_python); } || {
            echo "error: needs Python 3.11 or newer with venv (Debian and Ubuntu: apt-get install python3-venv)" >&2
            exit 2
        }
        "$python" -m venv "$venv"
    fi
    local stamp="$venv/installed-$1.toml"
    if ! cmp -s pyproject.toml "$stamp"; then
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$1]"
        cp pyproject.toml "$stamp"
    fi
}

ADAPTER_PACKAGES="libvulkan1 mesa-vulkan-drivers"

has_adapter() {
    "$venv/bin/python" -c 'import sys; from lorawgpu.gpu.device import list_adapters; sys.exit(not list_adapters())' 2>/dev/null
}

#!/usr/bin/env bash
# The first hour in minutes: installs lorawgpu into .venv, trains the built-in model of 3 million parameters as
# configs/tiny.yaml says, lets it write with and without the adapter, and makes the report. Needs no GPU.
#   scripts/quickstart.sh [--yes]        --yes: install a software adapter without asking where there is no GPU
# A second run needs no network and goes into a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

yes=
case "${1:-}" in
    "") ;;
    --yes) yes=1 ;;
    *) echo "error: $1? usage: scripts/quickstart.sh [--yes]" >&2; exit 2 ;;
esac

step() { printf '\n== %s\n' "$*"; }

may_install() {  # whether the user wants the software adapter: root does, --yes does, else we ask
    [ "$(id -u)" = 0 ] || [ -n "$yes" ] && return
    [ -t 0 ] || return 1
    read -r -p "No GPU adapter was found. Install a software one (sudo apt-get install $ADAPTER_PACKAGES)? [y/N] " answer
    [ "$answer" = y ] || [ "$answer" = Y ]
}

provide_adapter() {
    has_adapter && return
    if command -v apt-get >/dev/null && may_install; then
        [ "$(id -u)" = 0 ] || SUDO=sudo
        apt_install $ADAPTER_PACKAGES || true
    fi
    has_adapter && return
    echo "error: no Vulkan, Metal or DX12 adapter. Debian and Ubuntu: sudo apt-get install $ADAPTER_PACKAGES;" \
        "Fedora: sudo dnf install mesa-vulkan-drivers vulkan-loader; Arch: sudo pacman -S vulkan-swrast;" \
        "or your GPU's Vulkan driver" >&2
    exit 2  # as lorawgpu's own commands without an adapter
}

step "Installing into $venv"
make_environment report,hub
provide_adapter
python="$venv/bin/python"

out=out/tiny
for ((n = 2; ; n++)); do
    [ -e "$out" ] || break
    out=out/tiny-$n
done
step "Training: configs/tiny.yaml into $out"
"$python" -m lorawgpu.train configs/tiny.yaml --set "output_dir=$out"

prompt="What does shutil.copyfile(src, dst) do?"
step "Asking: $prompt"
"$python" -m lorawgpu.generate --model builtin:tiny-bitnet --adapter "$out" --compare --max-new-tokens 48 --prompt "$prompt"

step "Done: open $out/report.html in a browser"
cat <<END
Next:
  . $venv/bin/activate
  lorawgpu generate --model builtin:tiny-bitnet --adapter $out --chat
  lorawgpu doctor                       # what this machine's GPU can do
  configs/                              # real models; the head of each file says how to get its own
  lorawgpu train configs/bitnet-2b-8gb.yaml --dry-run      # fetches the model, says what training needs
END

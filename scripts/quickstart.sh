#!/usr/bin/env bash
# Installs lorawgpu into .venv, trains the built-in model of 3 million parameters with configs/tiny.yaml, generates with
# and without the adapter, and writes the report. Takes minutes and needs no GPU.
#   scripts/quickstart.sh [--yes]        --yes: without a GPU, install a software adapter without asking
# A second run needs no network and writes to a new folder.
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

may_install() {  # whether to install the software adapter: yes for root or --yes, otherwise ask
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
    exit 2  # the exit code of lorawgpu's commands without an adapter
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
step "Generating: $prompt"
"$python" -m lorawgpu.generate --model builtin:tiny-bitnet --adapter "$out" --compare --max-new-tokens 48 --prompt "$prompt"

step "Done: open $out/report.html in a browser"
cat <<END
Next:
  . $venv/bin/activate
  lorawgpu generate --model builtin:tiny-bitnet --adapter $out --chat
  lorawgpu doctor                       # checks this machine's GPU
  configs/                              # real models; see the top of each file
  lorawgpu train configs/bitnet-2b-8gb.yaml --dry-run      # downloads the model and shows what training needs
END

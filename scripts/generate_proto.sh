#!/usr/bin/env bash
# Generates the code for proto/ into the tree beside it: proto/kvstore/rpc/v1/x.proto -> kvstore/rpc/v1/x_pb2.py, .pyi, _pb2_grpc.py.
# With --check it writes nothing and fails if the committed code is not what the proto files give.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

# Old on purpose: generated code runs with this protobuf and newer ones, and engines still ship 5.29. The stubs need grpcio >= this.
TOOLCHAIN=(grpcio-tools==1.71.2 grpcio==1.71.2 protobuf==5.29.6 setuptools==75.8.0)

generate_into() {
    local out=$1 protos
    mapfile -t protos < <(cd proto && find . -name '*.proto' -printf '%P\n' | LC_ALL=C sort)
    [ "${#protos[@]}" -gt 0 ] || { say "error: no .proto file under proto/"; exit 1; }
    "$(cached_venv proto "${TOOLCHAIN[@]}")/bin/python" -m grpc_tools.protoc \
        --proto_path=proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" "${protos[@]}"
}

generated_in() {
    (cd "$1" && find kvstore/rpc -name '*_pb2*.py' -o -name '*_pb2*.pyi' | LC_ALL=C sort)
}

check() {
    fresh=$(mktemp -d) # global: the trap runs after this function
    trap 'rm -rf "$fresh"' EXIT
    generate_into "$fresh"
    local stale=0 name
    while read -r name; do
        diff -u "$name" "$fresh/$name" >&2 || stale=1 # a missing side is a difference too
    done < <({ generated_in .; generated_in "$fresh"; } | LC_ALL=C sort -u)
    if [ "$stale" = 1 ]; then
        say "error: the generated code is not current: run 'make proto' and commit the result"
        exit 1
    fi
    say "generated code is current"
}

case "${1:-}" in
    "") generate_into . ;;
    --check) check ;;
    *) say "usage: $0 [--check]"; exit 2 ;;
esac

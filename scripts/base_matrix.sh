#!/usr/bin/env bash
# Installs the package as a user would, in environments that hold the base dependencies alone, with each generation of protobuf that
# engines ship, and lets scripts/check_base_install.py look at it there. The oldest row is the floor that pyproject.toml promises.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

MATRIX=(
    "protobuf==5.29.6 grpcio==1.71.2 numpy==1.26.4 xxhash==3.2.0"
    "protobuf==6.33.6 grpcio==1.76.0 numpy==2.2.6 xxhash==3.5.0"
    "protobuf==7.36.2 grpcio==1.85.3 numpy==2.4.6 xxhash==4.1.0"
)

site=$(mktemp -d)
trap 'rm -rf "$site" build' EXIT
rm -rf build # setuptools would pack what an older build left here
.venv/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation --target "$site" .

check=$PWD/scripts/check_base_install.py
for row in "${MATRIX[@]}"; do
    read -ra packages <<<"$row"
    venv=$(cached_venv base "${packages[@]}")
    line=$(cd "$site" && PYTHONSAFEPATH=1 PYTHONPATH=$site "$venv/bin/python" -W error "$check")
    say "$row: $line"
    digest=${line##* }
    if [ "${first:=$digest}" != "$digest" ]; then
        say "error: this protobuf writes other bytes than that of the first row"
        exit 1
    fi
done

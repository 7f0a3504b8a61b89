#!/usr/bin/env bash
# Measures a peer beside kvstore: the same bytes, the same machine, the same run. docs/benchmarks.md says what is compared.
#
#     scripts/peers.sh redis|lmcache|mooncake [--rounds N] [--json FILE]
#     scripts/peers.sh vllm [--quick] [--json FILE]
#
# Each peer is installed once, in an environment of its own outside the checkout: 0.1 GB redis, 0.3 GB mooncake, 1.5 GB lmcache
# (its server needs torch), 3.4 GB vllm. Remove ~/.cache/kvstore when you are done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

# debian_files NAME PACKAGE...: prints a folder with the files of these packages (Debian or Ubuntu), not installed.
debian_files() {
    local name=$1 folder
    shift
    folder=$(cache_root)/$name
    if [ ! -e "$folder/.complete" ]; then
        say "fetching $*"
        rm -rf "$folder"
        mkdir -p "$folder/packages"
        (cd "$folder/packages" && apt-get download -qq "$@" >&2)
        for package in "$folder"/packages/*.deb; do
            dpkg-deb -x "$package" "$folder"
        done
        touch "$folder/.complete"
    fi
    echo "$folder"
}

# with_libraries FOLDER: lets programs find the shared libraries of debian_files.
with_libraries() {
    local system
    system=$(uname -m)-linux-gnu
    export LD_LIBRARY_PATH=$1/usr/lib/$system:$1/lib/$system
}

peer=${1:?"usage: scripts/peers.sh redis|lmcache|mooncake|vllm [options]"}
shift
case $peer in
redis)
    venv=$(cached_venv peer-redis "redis[hiredis]==6.4.0" numpy==2.2.6)
    files=$(debian_files peer-redis-files redis-server redis-tools libjemalloc2 liblzf1 liblua5.1-0 lua-cjson lua-bitop)
    with_libraries "$files"
    export PEER_PROGRAM=$files/usr/bin/redis-server
    ;;
mooncake)
    venv=$(cached_venv peer-mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.2.6)
    files=$(debian_files peer-mooncake-files libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1)
    with_libraries "$files"
    export PEER_PROGRAM=$venv/bin/mooncake_master
    ;;
lmcache)
    # Without what its engines and cloud storages need: CUDA packages among it. Its server imports the rest.
    mapfile -t pins < <(grep -v '^#' scripts/peers/lmcache_requirements.txt)
    venv=$(cached_venv peer-lmcache --no-deps "${pins[@]}")
    export LMCACHE_TRACK_USAGE=false
    ;;
vllm) exec make vllm-bench BENCH_ARGS="$*" ;;
*)
    say "no peer '$peer': redis, lmcache, mooncake, vllm"
    exit 2
    ;;
esac
make -s env
exec .venv/bin/python -m kvstore.bench.peers "$peer" --python "$venv/bin/python" "$@"

# Shared by the scripts here and by .ci/run; sourced, never run. Expects `set -euo pipefail` in the caller.
shopt -s inherit_errexit # a failure inside $(...) must not pass for an answer

# Old toolchains and test matrices live in environments of their own, outside the checkout, named by what is in them.
cache_root() {
    echo "${KVSTORE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/kvstore}"
}

say() {
    echo "$*" >&2
}

# cached_venv NAME REQUIREMENT...: prints the folder of an environment that holds exactly these requirements, made on first use.
cached_venv() {
    local name=$1
    shift
    local version digest folder
    version=$("${PYTHON:-python3}" -c 'import sys; print(*sys.version_info[:3], sep=".")')
    digest=$(printf '%s\n' "$version" "$@" | sha256sum | cut -c1-16)
    folder=$(cache_root)/$name-$digest
    mkdir -p "$(cache_root)"
    (
        flock 9 # two runs at once share one environment
        if [ ! -e "$folder/.complete" ]; then
            say "making $folder: $*"
            rm -rf "$folder"
            "${PYTHON:-python3}" -m venv "$folder"
            "$folder/bin/pip" install -qq --disable-pip-version-check --only-binary :all: "$@" >&2
            touch "$folder/.complete"
        fi
    ) 9>"$folder.lock"
    echo "$folder"
}

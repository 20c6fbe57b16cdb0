#!/usr/bin/env bash
# Set up a virtual environment with everything that the demo and the tests need.
# Says in a sentence what it could not install, and stops before any large download if no sandbox can run.
set -euo pipefail
venv=${1:?usage: setup.sh VENV}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "Python 3.11 or newer is needed; '$python' is not. Install it, or say which with PYTHON=/path/to/python3."

missing=()
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v g++ >/dev/null || missing+=(g++)
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${missing[*]} with apt"
        (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}") >/dev/null ||
            say "apt could not install ${missing[*]}"
    else
        say "not installed, and not root with apt to install: ${missing[*]}"
    fi
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "python3-venv is needed: apt-get install python3-venv"

"$python" -m sandbox.probe || fail "no sandbox can run here, so no tool could; the line above says what to do."

if [ ! -x "$venv/bin/python" ]; then
    say "creating $venv"
    "$python" -m venv "$venv"
fi
say "installing Python packages (torch is the largest, about 200 MB)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    -e runtime/sdk -e '.[dev]' 2> >(grep -v "^WARNING: Location" >&2)
if command -v npm >/dev/null; then
    say "installing the Node client that the tests drive"
    npm ci --prefix tests/clients/node --no-audit --no-fund --silent || say "npm could not install it"
fi
models=$("$venv/bin/python" -c 'from runtime.settings import Settings; print(Settings.load().models_dir)')
"$venv/bin/python" -m engine.native "$models/cache/native"
say "done"

#!/usr/bin/env bash
# Put the oldest Triton that the kernels support into a directory of its own, for `make test-kernels`.
# It needs a numpy from before 2.4: with a later one its interpreter fails at loops whose bounds are read.
set -euo pipefail
venv=${1:?usage: old_triton.sh VENV DIRECTORY}
directory=${2:?usage: old_triton.sh VENV DIRECTORY}
[ ! -e "$directory/complete" ] || exit 0
rm -rf "$directory"
echo "setup: installing Triton 3.6.0 into $directory (about 190 MB)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --target "$directory" 'triton==3.6.0' 'numpy==2.3.5' 2> >(grep -v "^WARNING: Location" >&2)
touch "$directory/complete"

#!/usr/bin/env bash
# The tests with another Python and another jax than the lock file names:
#   tests/other_versions.sh PYTHON JAX [words for pytest]
#   tests/other_versions.sh python3.13 0.11.2 tests/bert_jax/model
# JAX "newest" takes the newest release. Every other library is the newest that fits. VENV names a folder that keeps
# the environment; without it a temporary one is made.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
fi
python=$1 jax=$2
shift 2
cd "$(dirname "$0")/.."
environment=${VENV:-$(mktemp -d)}
[ -n "${VENV:-}" ] || trap 'rm -rf "$environment"' EXIT
wanted=jax
[ "$jax" = newest ] || wanted="jax==$jax"
"$python" -m venv "$environment"
"$environment/bin/pip" install -q -e '.[quickstart,chinese,test]' "$wanted"
"$environment/bin/python" -c 'import sys, jax; print("Python", sys.version.split()[0], "jax", jax.__version__)'
"$environment/bin/python" -m pytest "$@"

#!/bin/sh
# Sets up and tests on several TensorFlows, each in a copy of the working tree under build/matrix: an op library fits
# one TensorFlow, and lies beside the package.
#
#   tools/test_matrix.sh [--smoke] [VERSION]...      default: 2.15 2.18 2.21
#
# --smoke: a file of each folder of tests, the parallel ones with 2 workers. Goes on after a failure; the status tells.
# PYTHON: by default python3.11, where it is there: the one that all of them run on.
set -euf

cd "$(dirname "$0")/.."
tests="tests/unit tests/structure tests/parallel"
if [ "${1:-}" = --smoke ]; then
    tests="tests/unit/test_ops.py tests/structure/test_layers.py
        tests/parallel/test_compressor.py::test_horovods_calls_and_our_wrappers[2]
        tests/parallel/test_keras2.py::test_horovods_keras_optimizer[2]"
    shift
fi
[ $# -gt 0 ] || set -- 2.15 2.18 2.21
python=${PYTHON:-$(command -v python3.11 || command -v python3)}

# What a commit of everything here would hold, and what it no longer holds.
copy_tree() {
    mkdir -p "$1"
    touch "$1/.files"
    mv "$1/.files" "$1/.files-before"
    git ls-files --cached --others --exclude-standard --deduplicate | LC_ALL=C sort >"$1/.files"
    LC_ALL=C comm -23 "$1/.files-before" "$1/.files" | (cd "$1" && xargs -r -d '\n' rm -f)
    tar -c --ignore-failed-read -T "$1/.files" 2>/dev/null | tar -x -C "$1"
}

failed=
for version in "$@"; do
    copy=build/matrix/$version
    copy_tree "$copy"
    echo "==> TensorFlow $version in $copy"
    # shellcheck disable=SC2086
    if make -C "$copy" setup TF="$version" PYTHON="$python" && (cd "$copy" && .venv/bin/python -m pytest $tests); then
        echo "==> TensorFlow $version: passed"
    else
        echo "==> TensorFlow $version: FAILED"
        failed="$failed $version"
    fi
done
[ -z "$failed" ] || { echo "failed on TensorFlow$failed" >&2; exit 1; }

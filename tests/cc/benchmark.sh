#!/usr/bin/env bash
# Builds and runs the micro-benchmarks of the CPU kernels (codec_benchmark.cc) with the library's own flags.
# Takes g++ and Google Benchmark (Debian and Ubuntu: libbenchmark-dev). Arguments go to the benchmark.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
read -ra compiler <<<"${CXX:-g++}"
read -ra more <<<"${CXXFLAGS:-}"
if ! "${compiler[@]}" "${more[@]}" -x c++ -E -include benchmark/benchmark.h /dev/null >/dev/null 2>&1; then
  echo "Google Benchmark is missing: sudo apt-get install libbenchmark-dev" >&2
  exit 3
fi
out=${OUT:-build/benchmark}
mkdir -p "$out"
"$PYTHON" tf_ops/codec/generate_codebooks.py "$out/codebooks.inc"
readarray -t words < <("$PYTHON" -c '
lists = {}
exec(open("tf_ops/sources.bzl").read(), lists)
print("\n".join(lists["COPTS"]))
print("\n".join("tf_ops/" + name for name in lists["SOURCES"] if name.startswith("codec/")))')
"${compiler[@]}" -std=c++17 "${words[@]}" "${more[@]}" tests/cc/codec_benchmark.cc -I. "-I$out" -pthread \
  ${LDFLAGS:-} -lbenchmark -o "$out/codec_benchmark"
exec "$out/codec_benchmark" "$@"

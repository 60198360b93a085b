#!/usr/bin/env bash
# Checks and measures the CUDA back end on a machine with an NVIDIA GPU: builds the codec with nvcc and g++, without
# TensorFlow, compares every case of the table with the CPU's bytes, then measures. Under 4 minutes.
#
#   tests/gpu/check.sh [arguments of check.py, e.g. --json gpu.json]
#
# Takes nvcc (see tools/cuda_toolkit.py), g++, and a Python with NumPy and PyTorch or CuPy: PYTHON, default python3.
# Exit status: that of check.py; 3 where there is no GPU, 2 where something that the build takes is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "no GPU here: nvidia-smi finds none, so the CUDA back end cannot be checked on this machine"
  exit 3
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

# The GPU at hand alone, unless told otherwise: that builds in seconds.
export HVD8BIT_CUDA_ARCHS=${HVD8BIT_CUDA_ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)}
library=build/gpu/libhvd8bit_codec.so
HVD8BIT_CUDA=1 "$PYTHON" tests/gpu/build.py "$library" || exit 2
status=0
"$PYTHON" tests/gpu/check.py --library "$library" "$@" || status=$?
# Where this Python has TensorFlow with GPU support and the op library, the ops themselves.
if "$PYTHON" -c 'import importlib.util as u; raise SystemExit(u.find_spec("tensorflow") is None)'; then
  timeout 100 "$PYTHON" tests/gpu/with_tensorflow.py || [ $? -eq 3 ] || status=1
fi
exit "$status"

"""The one list of the op library's sources and flags: read by setup.py (as Python) and by BUILD."""

SOURCES = [
    "codec/c_api.cc",
    "codec/codebook.cc",
    "codec/cpu/avx2.cc",
    "codec/cpu/avx512.cc",
    "codec/cpu/dispatch.cc",
    "codec/cpu/scalar.cc",
    "codec/layout.cc",
    "codec/payload.cc",
    "kernels/codec_kernels.cc",
    "kernels/count_op.cc",
    "ops/codec_ops.cc",
]

# Beside those where nvcc is found; HVD8BIT_CUDA is defined then.
CUDA_SOURCES = [
    "codec/cuda/kernels.cu",
    "codec/cuda/lists.cc",
    "kernels/cuda_kernels.cc",
]

# Compute capabilities that are built unless HVD8BIT_CUDA_ARCHS names others; those of them that nvcc knows.
CUDA_CAPABILITIES = ["75", "80", "86", "89", "90", "100", "120"]

# What codec/cpu/dispatch.cc chooses from on x86-64, fastest first.
BACKENDS = ["avx512", "avx2", "scalar"]

HEADERS = [
    "codec/c_api.h",
    "codec/codebook.h",
    "codec/cpu/backend.h",
    "codec/cpu/float_environment.h",
    "codec/cpu/kernels.inc",
    "codec/cpu/portable.inc",
    "codec/cuda/arguments.h",
    "codec/cuda/kernels.h",
    "codec/cuda/lists.h",
    "codec/cuda/tiles.h",
    "codec/dither.h",
    "codec/float_types.h",
    "codec/format.h",
    "codec/layout.h",
    "codec/payload.h",
    "kernels/huge_pages.h",
    "kernels/list_ops.h",
]

# Written when the library is built, by codec/generate_codebooks.py from hvd8bit/datatypes.py.
GENERATED_HEADER = "codebooks.inc"

# -ffp-contract=off: the arithmetic is specified; a multiply and an add must not become an fma.
COPTS = [
    "-O3",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
]

# The same for nvcc. Divisions are IEEE's and subnormals kept by default; said here, since the format needs it.
NVCC_OPTS = [
    "-O3",
    "-std=c++17",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-Xcompiler=-fPIC,-Wall,-Wextra,-ffp-contract=off,-fvisibility=hidden",
]

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
    "ops/codec_ops.cc",
]

# What codec/cpu/dispatch.cc chooses from on x86-64, fastest first.
BACKENDS = ["avx512", "avx2", "scalar"]

HEADERS = [
    "codec/c_api.h",
    "codec/codebook.h",
    "codec/cpu/backend.h",
    "codec/cpu/float_environment.h",
    "codec/cpu/kernels.inc",
    "codec/cpu/portable.inc",
    "codec/float_types.h",
    "codec/format.h",
    "codec/layout.h",
    "codec/payload.h",
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

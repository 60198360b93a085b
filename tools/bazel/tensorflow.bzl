"""Makes a repository of the TensorFlow that a Python has installed, and of the CUDA toolkit at hand, if there is one."""

_ASK = """
import json, sys, tensorflow as tf
print("\\n" + json.dumps([tf.sysconfig.get_include(), tf.sysconfig.get_lib(), tf.sysconfig.get_compile_flags()]))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# A script, not a link: a virtual environment's Python finds its packages by its own path.
exports_files(["python"])

cc_library(
    name = "tensorflow",
    srcs = ["libtensorflow_framework.so.2"],
    # The folder as one input: a sandbox with a link for each of its 14,000 files takes half a minute to make.
    hdrs = ["include"],
    includes = ["include"],
)

# CUDA's runtime, empty without CUDA.
cc_library(
    name = "cudart",
    srcs = glob(["libcudart_static.a"]),
)
"""

def _tensorflow_configure(repository):
    python = repository.os.environ.get("PYTHON_BIN_PATH") or "python3"
    if "/" not in python:
        found = repository.which(python)
        if found == None:
            fail("PYTHON_BIN_PATH names %s, which is not on PATH: set it to a Python that has TensorFlow" % python)
        python = str(found)
    asked = repository.execute([python, "-c", _ASK], environment = {"TF_CPP_MIN_LOG_LEVEL": "3"})
    if asked.return_code != 0:
        fail("%s does not import TensorFlow: set PYTHON_BIN_PATH to a Python that does, e.g. .venv/bin/python made by make setup. It says: %s" %
             (python, asked.stderr.strip().split("\n")[-1]))
    include, library, flags = json.decode(asked.stdout.strip().split("\n")[-1])

    repository.symlink(include, "include")
    repository.symlink(library + "/libtensorflow_framework.so.2", "libtensorflow_framework.so.2")
    repository.file("python", "#!/bin/sh\nexec '%s' \"$@\"\n" % python, executable = True)
    # null, or what tools/cuda_toolkit.py says; it knows which variables count.
    asked = repository.execute([python, str(repository.path(Label("//:tools/cuda_toolkit.py")))])
    if asked.return_code != 0:
        fail(asked.stderr.strip().split("\n")[-1])
    cuda = json.decode(asked.stdout)
    nvcc = []
    if cuda:
        nvcc = [cuda["nvcc"]] + cuda["flags"]
        repository.symlink(cuda["static_runtime"], "libcudart_static.a")
    repository.file("flags.bzl", "TENSORFLOW_COPTS = %r\nNVCC = %r\n" % (
        [flag for flag in flags if not flag.startswith("-I")],
        nvcc,
    ))
    repository.file("BUILD", _BUILD)

tensorflow_configure = repository_rule(
    implementation = _tensorflow_configure,
    environ = ["PYTHON_BIN_PATH", "PATH", "HVD8BIT_CUDA", "HVD8BIT_CUDA_ARCHS", "NVCC", "CUDA_HOME"],
    local = True,
)

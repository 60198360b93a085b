"""The commands of `hvd8bit`, a file each: `add` declares its arguments, `run` calls and prints.

None imports NumPy or TensorFlow before it runs: the doctor must start where they do not.
"""

"""On a machine where TensorFlow sees a GPU: the ops run there, on TensorFlow's stream, and give the CPU's bytes.

    python tests/gpu/with_tensorflow.py

A kernel on another stream would read what a long matrix product has not written yet: 200 times, in one graph, the
payload is compared with the CPU's. Exit status 0: no difference; 1: one; 3: no GPU, or an op library without CUDA.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))


def main() -> int:
    import tensorflow as tf

    from hvd8bit import native, ops
    from hvd8bit.encoding import Encoding

    if not tf.config.list_physical_devices("GPU"):
        print("no GPU here: TensorFlow sees none")
        return 3
    if not native.build_info().get("cuda_architectures"):
        print("the op library was built without CUDA: see tools/cuda_toolkit.py")
        return 3

    @tf.function(autograph=False)
    def run(x, y):
        with tf.device("/GPU:0"):
            product = tf.matmul(x, y)
            payload, splits = ops.encode_list([product], 2, Encoding())
            sent = splits[0]
            reduced = ops.reduce_shards(
                tf.concat([payload[:sent]] * 2, 0), tf.stack([sent, sent]), [product], 2, 0, Encoding()
            )
            (decoded,) = ops.decode_list(
                [tf.concat([reduced, payload[sent:]], 0)], [product], 2, Encoding(), factor=1.0
            )
        with tf.device("/CPU:0"):
            on_cpu = tf.identity(product)
            expected, _ = ops.encode_list([on_cpu], 2, Encoding())
            right = ops.reduce_shards(
                tf.concat([expected[:sent]] * 2, 0), tf.stack([sent, sent]), [on_cpu], 2, 0, Encoding()
            )
            (again,) = ops.decode_list([tf.concat([right, expected[sent:]], 0)], [on_cpu], 2, Encoding(), factor=1.0)
        return payload, expected, reduced, right, decoded, again

    random = np.random.default_rng(0)
    for step in range(200):
        x, y = (tf.constant(random.standard_normal((2000, 2000)), tf.float32) for _ in range(2))
        results = [result.numpy() for result in run(x, y)]
        for name, got, right in zip(("encode", "reduce", "decode"), results[::2], results[1::2]):
            if got.tobytes() != right.tobytes():
                print(f"step {step}: {name} on the GPU gives other bytes than on the CPU")
                return 1
    print("passed: 200 steps, the same bytes on the GPU and on the CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What the exchange of some workers' values must give, by the NumPy reference."""

import numpy as np

from hvd8bit import reference


def rank_values(rank, shape, seed=0):
    """float32 normals, different for each rank, known to all."""
    return np.random.default_rng(1000 * seed + rank).standard_normal(shape).astype(np.float32)


def exchanged(tensors_of_ranks, encoding, factor=1.0):
    """The exchange's result for `tensors_of_ranks[rank][tensor]`; the mean for factor 1."""
    workers = len(tensors_of_ranks)
    like = tensors_of_ranks[0]
    if workers == 1:
        return like
    sent = [reference.encode_list(tensors, workers, encoding) for tensors in tensors_of_ranks]
    reduced = [
        reference.reduce_shards([sent[worker][shard] for worker in range(workers)], like, shard, encoding)
        for shard in range(workers)
    ]
    return reference.decode_list([reduced], like, encoding, factor)

"""What the exchange of some workers' values must give, by the NumPy reference."""

import numpy as np

from hvd8bit import collectives, modes, reference


def rank_values(rank, shape, seed=0):
    """float32 normals, different for each rank, known to all."""
    return np.random.default_rng(1000 * seed + rank).standard_normal(shape).astype(np.float32)


def exchanged(tensors_of_ranks, encoding, factor=1.0, exchange="auto"):
    """The exchange's result for `tensors_of_ranks[rank][tensor]`; the mean for factor 1."""
    workers = len(tensors_of_ranks)
    like = tensors_of_ranks[0]
    if workers == 1:
        return like
    sizes = tuple(int(np.size(tensor)) for tensor in like)
    mode = modes.choose(exchange, sizes, None if collectives.elastic() else workers, encoding.block_size)
    return (_gathered if mode == modes.ALLGATHER else _scattered)(tensors_of_ranks, encoding, factor)


def _scattered(tensors_of_ranks, encoding, factor):
    workers, like = len(tensors_of_ranks), tensors_of_ranks[0]
    sent = [reference.encode_list(tensors, workers, encoding) for tensors in tensors_of_ranks]
    reduced = [
        reference.reduce_shards([sent[worker][shard] for worker in range(workers)], like, shard, encoding)
        for shard in range(workers)
    ]
    return reference.decode_list([reduced], like, encoding, factor)


def _gathered(tensors_of_ranks, encoding, factor):
    """Everyone's list decoded, added in float32 in the order of the ranks."""
    decoded = [
        reference.decode_list([reference.encode_list(tensors, 1, encoding)], tensors, encoding)
        for tensors in tensors_of_ranks
    ]
    results = []
    for parts in zip(*decoded):
        total = np.asarray(parts[0]).astype(np.float32)
        for part in parts[1:]:
            total = total + np.asarray(part).astype(np.float32)
        mean = total.astype(np.float64) * factor / len(parts)
        results.append(mean.astype(parts[0].dtype))
    return results

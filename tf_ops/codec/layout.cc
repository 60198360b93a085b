#include "tf_ops/codec/layout.h"

#include <algorithm>

namespace hvd8bit {
namespace {

int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

int64_t Layout::Chunk::ScalesOffset() const { return kHeaderBytes + RoundUp(code_bytes, kScaleBytes); }

Layout::Layout(const std::vector<TensorInfo>& tensors, int64_t block_size, int64_t shards, int64_t slices)
    : block_size_(block_size), shards_(shards), slices_(slices) {
  Fnv1a hash;
  hash.Add(static_cast<uint64_t>(shards));
  hash.Add(static_cast<uint64_t>(slices));
  hash.Add(tensors.size());
  starts_.push_back(0);
  for (const TensorInfo& tensor : tensors) {
    hash.Add(static_cast<uint64_t>(tensor.dtype));
    hash.Add(tensor.shape.size());
    for (int64_t dim : tensor.shape) {
      hash.Add(static_cast<uint64_t>(dim));
    }
    sizes_.push_back(tensor.elements);
    elements_ += tensor.elements;
    starts_.push_back(starts_.back() + RoundUp(tensor.elements, kAlignment));
  }
  hash_ = hash.value();
}

Layout::Chunk Layout::GetChunk(int64_t shard, int64_t slice) const {
  const int64_t units = starts_.back() / kAlignment;
  const int64_t begin = kAlignment * (units * shard / shards_);
  const int64_t end = kAlignment * (units * (shard + 1) / shards_);

  // Each tensor's part of the chunk, first as one piece with all its blocks.
  std::vector<Piece> parts;
  int64_t all_blocks = 0;
  auto tensor = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
  for (; tensor < tensors() && starts_[tensor] < end; ++tensor) {
    const int64_t start = std::max(begin - starts_[tensor], int64_t{0});
    const int64_t stop = std::min(end - starts_[tensor], sizes_[tensor]);
    if (start < stop) {
      const int64_t size = block_size_ ? block_size_ : stop - start;
      const int64_t blocks = (stop - start + size - 1) / size;
      parts.push_back({tensor, start, stop, 0, all_blocks, blocks, size, 0});
      all_blocks += blocks;
    }
  }

  // Then what of it this slice holds.
  const int64_t first = all_blocks * slice / slices_;
  const int64_t last = all_blocks * (slice + 1) / slices_;
  Chunk chunk;
  int64_t origin = -1;
  for (const Piece& part : parts) {
    const int64_t lo = std::max(first, part.first_block) - part.first_block;
    const int64_t hi = std::min(last, part.first_block + part.blocks) - part.first_block;
    if (lo >= hi) {
      continue;
    }
    Piece piece = part;
    piece.start = part.BlockStart(lo);
    piece.stop = part.BlockStop(hi - 1);
    const int64_t row = starts_[part.tensor] + piece.start;
    if (origin < 0) {
      origin = row;
    }
    piece.codes_offset = row - origin;
    piece.row = row;
    piece.first_block = part.first_block + lo - first;
    piece.blocks = hi - lo;
    chunk.code_bytes = piece.codes_offset + piece.stop - piece.start;
    chunk.blocks = piece.first_block + piece.blocks;
    chunk.pieces.push_back(piece);
  }
  return chunk;
}

}  // namespace hvd8bit

// The packed layout: which block of which tensor lies where in which chunk (docs/wire-format.md).
// hvd8bit/layout.py is the same in Python.
#ifndef HVD8BIT_CODEC_LAYOUT_H_
#define HVD8BIT_CODEC_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "tf_ops/codec/format.h"

namespace hvd8bit {

// Consecutive whole blocks of one tensor in a chunk.
struct Piece {
  int64_t tensor;
  int64_t start, stop;   // elements of the tensor
  int64_t codes_offset;  // from the chunk's first code, bytes
  int64_t first_block;   // from the chunk's first block
  int64_t blocks;
  int64_t block_size;
  int64_t row;  // place of the first element in the row of all tensors

  int64_t BlockStart(int64_t block) const { return start + block * block_size; }
  int64_t BlockStop(int64_t block) const {
    const int64_t end = BlockStart(block) + block_size;
    return end < stop ? end : stop;
  }
};

struct TensorInfo {
  DType dtype;
  std::vector<int64_t> shape;
  int64_t elements;
};

class Layout {
 public:
  // A chunk's pieces and what they add up to.
  struct Chunk {
    std::vector<Piece> pieces;
    int64_t code_bytes = 0;
    int64_t blocks = 0;

    int64_t ScalesOffset() const;  // from the chunk's start, header included
    int64_t Bytes() const { return ScalesOffset() + kScaleBytes * blocks; }
  };

  Layout(const std::vector<TensorInfo>& tensors, int64_t block_size, int64_t shards, int64_t slices);

  Chunk GetChunk(int64_t shard, int64_t slice) const;

  int64_t shards() const { return shards_; }
  int64_t slices() const { return slices_; }
  int64_t elements() const { return elements_; }
  int64_t tensors() const { return static_cast<int64_t>(sizes_.size()); }
  uint64_t hash() const { return hash_; }

 private:
  std::vector<int64_t> sizes_;
  std::vector<int64_t> starts_;  // of the tensors in the row, and its end
  int64_t block_size_, shards_, slices_;
  int64_t elements_ = 0;
  uint64_t hash_;
};

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_LAYOUT_H_

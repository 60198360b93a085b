// What a kernel launch is told: plain values that fit into the 4 KB that every CUDA version passes to a
// kernel. A list of tensors that needs more is worked on by several launches, so that nothing has to be
// copied to the device first, and nothing allocated there.
#ifndef HVD8BIT_CODEC_CUDA_ARGUMENTS_H_
#define HVD8BIT_CODEC_CUDA_ARGUMENTS_H_

#include <cstdint>

#include "tf_ops/codec/format.h"

namespace hvd8bit {
namespace cuda {

inline constexpr int kPieces = 46;
inline constexpr int kChunks = 22;
inline constexpr int kThreads = 256;
inline constexpr int kTileElements = 4096;  // 16 per thread, kept in registers between the two looks at them
inline constexpr int kMostBuckets = 1856;   // of a codebook: from 2^-29 to 1, with 64 for each power of two
inline constexpr int kUnits = kTileElements / static_cast<int>(kAlignment);

// A piece (layout.h) with its pointers. A tile is what the threads of a block work on together: as many whole
// blocks of the codec as fit into kTileElements, or a part of one that is longer.
struct PieceArgument {
  void* tensor;  // the piece's first element
  int64_t elements;
  int64_t codes;  // offset in the chunk
  int64_t row;    // place of the first element in the row of all tensors
  uint32_t first_block;
  uint32_t first_tile;  // counted through the launch
  uint16_t chunk;       // position in `chunks`
  uint16_t zeros;       // bytes of padding after the codes
};

struct ChunkArgument {
  uint8_t* data;  // reduce: the one to be written
  uint64_t code_bytes;
  uint32_t blocks;
  uint32_t shard;
  uint16_t slice;
};

// What is reported of a chunk that does not fit: written by a kernel into memory that the host sees.
struct Report {
  volatile uint32_t set;
  int32_t worker;  // whose chunk it is
  ChunkHeader expected, received;
};

struct Arguments {
  ChunkHeader header;  // of all chunks, but for the fields that ChunkArgument holds
  uint32_t pieces, chunks, tiles;
  float fixed_scale;
  int64_t block_size;  // 0: a piece is one block
  // Reduce: what the workers sent, `sent_bytes` each.
  const uint8_t* sent;
  int64_t sent_bytes;
  int64_t shards;
  double factor;  // decode: scales are multiplied by factor / shards
  Report* report;
  uint64_t key;              // of stochastic rounding
  float values[128];         // decode, reduce: of the codes
  uint32_t thresholds[127];  // encode, reduce: bits, ascending; how many are below y is its index
  uint32_t first_bucket;     // Codebook::first_bucket
  PieceArgument piece[kPieces];
  ChunkArgument chunk[kChunks];
};
static_assert(sizeof(Arguments) <= 4096, "the limit of kernel arguments");

}  // namespace cuda
}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_CUDA_ARGUMENTS_H_

// What the CUDA kernels have in common: headers, how tiles lie in a launch, which elements of a tile are a
// thread's, and its codes. For kernels.cu alone.
#ifndef HVD8BIT_CODEC_CUDA_TILES_H_
#define HVD8BIT_CODEC_CUDA_TILES_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tf_ops/codec/cuda/arguments.h"

namespace hvd8bit {
namespace cuda {
namespace {

constexpr int kPerThread = kTileElements / kThreads;
constexpr int kWarp = 32;
constexpr int kPerWarp = kWarp * kPerThread;
constexpr int kHeaderWords = static_cast<int>(kHeaderBytes) / 4;

// Elements that a thread loads or stores at once: 16 bytes of float32, float16 and bfloat16, twice that of
// float64.
template <typename T>
constexpr int kAtOnce = sizeof(T) < 4 ? 8 : 4;

__device__ bool Aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

__device__ uint32_t ReadWord(const uint8_t* from) {
  if (Aligned(from, 4)) {
    return *reinterpret_cast<const uint32_t*>(from);
  }
  uint32_t word;
  memcpy(&word, from, sizeof word);  // byte by byte
  return word;
}

__device__ void WriteWord(uint8_t* to, uint32_t word) { memcpy(to, &word, sizeof word); }

__device__ int64_t ScalesOffset(const ChunkArgument& chunk) {
  return kHeaderBytes +
         (static_cast<int64_t>(chunk.code_bytes) + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
}

// ----------------------------------------------------------------------------------------------------
// headers

// The i-th four bytes of a chunk's header.
__device__ uint32_t HeaderWord(const Arguments& a, const ChunkArgument& chunk, int i) {
  switch (i) {
    case offsetof(ChunkHeader, shard) / 4:
      return chunk.shard;
    case offsetof(ChunkHeader, slice) / 4:
      return chunk.slice | static_cast<uint32_t>(a.header.slices) << 16;
    case offsetof(ChunkHeader, blocks) / 4:
      return chunk.blocks;
    case offsetof(ChunkHeader, code_bytes) / 4:
      return static_cast<uint32_t>(chunk.code_bytes);
    case offsetof(ChunkHeader, code_bytes) / 4 + 1:
      return static_cast<uint32_t>(chunk.code_bytes >> 32);
    default:
      return reinterpret_cast<const uint32_t*>(&a.header)[i];
  }
}

__device__ void WriteHeaders(const Arguments& a) {
  for (uint32_t i = threadIdx.x; i < a.chunks * kHeaderWords; i += kThreads) {
    const ChunkArgument& chunk = a.chunk[i / kHeaderWords];
    WriteWord(chunk.data + i % kHeaderWords * 4, HeaderWord(a, chunk, i % kHeaderWords));
  }
}

// Whether this thread finds a difference between `count` chunks that arrived and what they must be; the k-th
// is chunk_of(k), and lies at data_of(k).
template <typename ChunkOf, typename DataOf>
__device__ bool HeadersDiffer(const Arguments& a, int64_t count, ChunkOf chunk_of, DataOf data_of) {
  bool differ = false;
  for (int64_t i = threadIdx.x; i < count * kHeaderWords; i += kThreads) {
    const int64_t k = i / kHeaderWords;
    const int word = static_cast<int>(i % kHeaderWords);
    differ |= ReadWord(data_of(k) + word * 4) != HeaderWord(a, chunk_of(k), word);
  }
  return differ;
}

// Tells the host of the first chunk that differs, which worker_of(k) had to send. One thread.
template <typename ChunkOf, typename DataOf, typename WorkerOf>
__device__ void ReportFirst(const Arguments& a, int64_t count, ChunkOf chunk_of, DataOf data_of,
                            WorkerOf worker_of) {
  if (a.report == nullptr || a.report->set != 0) {
    return;
  }
  for (int64_t k = 0; k < count; ++k) {
    uint32_t expected[kHeaderWords], received[kHeaderWords];
    bool differ = false;
    for (int i = 0; i < kHeaderWords; ++i) {
      expected[i] = HeaderWord(a, chunk_of(k), i);
      received[i] = ReadWord(data_of(k) + i * 4);
      differ |= expected[i] != received[i];
    }
    if (differ) {
      a.report->worker = static_cast<int32_t>(worker_of(k));
      memcpy(&a.report->expected, expected, sizeof expected);
      memcpy(&a.report->received, received, sizeof received);
      __threadfence_system();
      a.report->set = 1;
      return;
    }
  }
}

// ------------------------------------------------------------------------------------------------------
// tiles

struct Tile {
  int piece;
  int64_t start;       // first element in the piece
  int elements;        // at least 1
  int64_t block;       // first block in the piece
  bool starts_block;   // false for the later parts of a block longer than a tile
  int64_t block_size;  // of this piece
};

// How a launch's blocks lie in tiles.
struct Geometry {
  int tile_blocks;       // whole blocks in a tile; 0 if a block is longer than a tile
  int tile_elements;     // that they have
  uint32_t block_tiles;  // tiles of a long block
  int block_units;       // 64 elements each; of a block, or of a tile where that is shorter

  __device__ explicit Geometry(int64_t block_size) {
    const bool fits = block_size != 0 && block_size <= kTileElements;
    tile_blocks = fits ? kTileElements / static_cast<int>(block_size) : 0;
    tile_elements = fits ? tile_blocks * static_cast<int>(block_size) : kTileElements;
    block_tiles = static_cast<uint32_t>((block_size + kTileElements - 1) / kTileElements);
    block_units = fits ? static_cast<int>(block_size / kAlignment) : kUnits;
  }

  // Whether a tile has a block of this number, from 0: a scale that one thread reads or writes.
  __device__ bool Holds(const Tile& tile, int block) const {
    return block == 0 || (block < tile_blocks && block * tile.block_size < tile.elements);
  }

  // The block of a tile that its unit belongs to: unit / block_units, exact for less than 64 of either.
  __device__ int BlockOfUnit(int unit) const { return (unit * (65536 / block_units + 1)) >> 16; }

  __device__ Tile At(const Arguments& a, uint32_t number) const {
    int low = 0, high = static_cast<int>(a.pieces) - 1;
    while (low < high) {  // the last piece that starts at this tile or before
      const int middle = (low + high + 1) / 2;
      if (a.piece[middle].first_tile <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const PieceArgument& piece = a.piece[low];
    const uint32_t at = number - piece.first_tile;
    Tile tile;
    tile.piece = low;
    tile.block_size = a.block_size != 0 ? a.block_size : piece.elements;
    int64_t end;
    if (tile_blocks != 0 || a.block_size == 0) {
      tile.start = static_cast<int64_t>(at) * tile_elements;
      tile.block = static_cast<int64_t>(at) * tile_blocks;
      tile.starts_block = tile_blocks != 0 || at == 0;
      end = tile.start + tile_elements;
    } else {
      const uint32_t part = at % block_tiles;
      tile.block = at / block_tiles;
      tile.start = tile.block * a.block_size + static_cast<int64_t>(part) * kTileElements;
      tile.starts_block = part == 0;
      const int64_t block_end = (tile.block + 1) * a.block_size;
      end = tile.start + kTileElements < block_end ? tile.start + kTileElements : block_end;
    }
    tile.elements = static_cast<int>((end < piece.elements ? end : piece.elements) - tile.start);
    return tile;
  }
};

__device__ const ChunkArgument& ChunkOf(const Arguments& a, const Tile& tile) {
  return a.chunk[a.piece[tile.piece].chunk];
}

// A tile's first code, and the scale of its first block, in the chunk at `data`: the launch's own, or a
// worker's.
template <typename Byte>
__device__ Byte* CodesOf(const Arguments& a, const Tile& tile, Byte* data) {
  return data + kHeaderBytes + a.piece[tile.piece].codes + tile.start;
}

template <typename Byte>
__device__ Byte* ScalesOf(const Arguments& a, const Tile& tile, Byte* data) {
  return data + ScalesOffset(ChunkOf(a, tile)) + kScaleBytes * (a.piece[tile.piece].first_block + tile.block);
}

// The first element of a tile that a thread has in its row `row`; the rows of a warp lie one after another.
template <int kPerRow>
__device__ int FirstElement(int row) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  return warp * kPerWarp + row * kWarp * kPerRow + lane * kPerRow;
}

// Whether all rows of a thread lie within a tile; then they are loaded side by side, without a branch between
// them.
template <int kPerRow>
__device__ bool AllWithin(const Tile& tile) {
  return FirstElement<kPerRow>(kPerThread / kPerRow - 1) + kPerRow <= tile.elements;
}

__device__ int UnitOf(int element) { return element / static_cast<int>(kAlignment); }

// Values by code, with the sign; 0x80 reads as 0.
__device__ void FillValues(const Arguments& a, float* values) {
  const float magnitude = a.values[threadIdx.x % 128];
  values[threadIdx.x] = threadIdx.x > 128 ? -magnitude : magnitude;
}

// A thread's codes, four to a word; places behind the tile's end become 0.
template <int kPerRow>
__device__ void ReadCodes(const Tile& tile, const uint8_t* codes, uint32_t* words) {
  constexpr int kWords = kPerRow / 4;
  if (AllWithin<kPerRow>(tile) && Aligned(codes, 4)) {
#pragma unroll
    for (int i = 0; i < kPerThread / 4; ++i) {
      words[i] =
          *reinterpret_cast<const uint32_t*>(codes + FirstElement<kPerRow>(i / kWords) + i % kWords * 4);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerThread / 4; ++i) {
    const int first = FirstElement<kPerRow>(i / kWords) + i % kWords * 4;
    words[i] = 0;
    for (int at = 0; at < 4 && first + at < tile.elements; ++at) {
      words[i] |= static_cast<uint32_t>(codes[first + at]) << (8 * at);
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_CUDA_TILES_H_

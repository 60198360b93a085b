// The codec on a GPU: encode, sum and encode, decode. docs/gpu.md says why it is done in this way.
//
// A block of 256 threads works on tiles of up to 4096 elements, 16 per thread, which stay in registers while
// the largest magnitude of each block of the codec is found: memory is read once and written once. Blocks of
// more than 4096 elements take a first pass for their scales. No multiplication and addition is contracted:
// nvcc is called with -fmad=false, and the roundings are written out besides.
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cuda/kernels.h"
#include "tf_ops/codec/cuda/tiles.h"
#include "tf_ops/codec/dither.h"
#include "tf_ops/codec/float_types.h"

// The tests compile this file for the host, with another way to launch a kernel.
#ifndef HVD8BIT_LAUNCH
#define HVD8BIT_LAUNCH(kernel, grid, stream, arguments) \
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments)
#endif

namespace hvd8bit {
namespace cuda {
namespace {

constexpr int kBucketBits = Codebook::kBucketShift;
constexpr uint32_t kOne = 0x3f800000u;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kQuietNan = 0x7fc00000u;
// Enough for the largest GPUs; a tile takes a few microseconds, so that the last ones end almost together.
#ifndef HVD8BIT_MOST_THREAD_BLOCKS
#define HVD8BIT_MOST_THREAD_BLOCKS 2048
#endif

// --------------------------------------------------------------------------------- where floats come from

// Both loaders fill a thread's 16 floats, in rows of kPerRow; places behind the tile's end become 0.

template <typename T>
struct TensorLoader {
  static constexpr int kPerRow = kAtOnce<T>;
  static constexpr bool kReceives = false;

  __device__ static void Load(const Arguments& a, const Tile& tile, const float* /*values*/, float* floats) {
    const PieceArgument& piece = a.piece[tile.piece];
    const auto* from =
        static_cast<const uint8_t*>(piece.tensor) + tile.start * static_cast<int64_t>(sizeof(T));
    constexpr int kRows = kPerThread / kPerRow, kLoads = kPerRow * sizeof(T) / 16;
    T elements[kPerThread];
    if (AllWithin<kPerRow>(tile) && Aligned(from, 16)) {
      uint4 loaded[kRows * kLoads];
#pragma unroll
      for (int i = 0; i < kRows * kLoads; ++i) {
        const uint8_t* row = from + FirstElement<kPerRow>(i / kLoads) * sizeof(T);
        loaded[i] = reinterpret_cast<const uint4*>(row)[i % kLoads];
      }
      memcpy(elements, loaded, sizeof elements);
    } else {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int at = FirstElement<kPerRow>(i / kPerRow) + i % kPerRow;
        elements[i] = T{};
        if (at < tile.elements) {
          memcpy(&elements[i], from + at * sizeof(T), sizeof(T));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      floats[i] = ToFloat(elements[i]);
    }
  }
};

struct ShardsLoader {
  static constexpr int kPerRow = 4;
  static constexpr bool kReceives = true;

  __device__ static void Load(const Arguments& a, const Tile& tile, const float* values, float* floats) {
    constexpr int kRows = kPerThread / kPerRow;
    const Geometry geometry(a.block_size);
    for (int64_t worker = 0; worker < a.shards; ++worker) {
      const uint8_t* sent = a.sent + worker * a.sent_bytes;
      const uint8_t* codes = CodesOf(a, tile, sent);
      const uint8_t* scales = ScalesOf(a, tile, sent);
      uint32_t words[kRows];
      float scale[kRows];
      ReadCodes<kPerRow>(tile, codes, words);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int first = FirstElement<kPerRow>(row);
        // Behind the end 0, since a NaN there would count as the block's.
        scale[row] = first < tile.elements
                         ? BitsToFloat(ReadWord(scales + kScaleBytes * geometry.BlockOfUnit(UnitOf(first))))
                         : 0.f;
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kPerRow; ++i) {
          const float decoded = __fmul_rn(values[words[row] >> (8 * i) & 0xff], scale[row]);
          float* sum = &floats[row * kPerRow + i];
          *sum = worker == 0 ? decoded : __fadd_rn(*sum, decoded);
        }
      }
    }
  }

  // Whether what a worker sent is not what this launch adds up. All threads get the same answer.
  __device__ static bool Refused(const Arguments& a) {
    const auto chunk_of = [&](int64_t) { return a.chunk[0]; };
    const auto data_of = [&](int64_t worker) { return a.sent + worker * a.sent_bytes; };
    const bool refused = __syncthreads_or(HeadersDiffer(a, a.shards, chunk_of, data_of));
    if (refused && blockIdx.x == 0 && threadIdx.x == 0) {
      ReportFirst(a, a.shards, chunk_of, data_of, [](int64_t worker) { return worker; });
    }
    return refused;
  }
};

// --------------------------------------------------------------------------------- the largest magnitude

__device__ uint32_t Magnitude(float x) { return FloatBits(x) & 0x7fffffffu; }

// Over groups of `lanes` neighbouring lanes.
__device__ uint32_t MaxOfLanes(uint32_t bits, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, bits, distance);
    bits = bits > other ? bits : other;
  }
  return bits;
}

__device__ uint32_t MaxOfWarp(const float* floats) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t bits = Magnitude(floats[i]);  // as integers, so that NaN and Inf come out on top
    most = bits > most ? bits : most;
  }
  return MaxOfLanes(most, kWarp);
}

// Adds this thread's floats to the largest magnitudes of a tile's blocks, in shared memory.
template <int kPerRow>
__device__ void FindMost(const Geometry& geometry, const float* floats, uint32_t* most) {
  const int lane = threadIdx.x % kWarp;
  if (geometry.block_units % UnitOf(kPerWarp) == 0) {  // a warp's floats belong to one block
    const uint32_t bits = MaxOfWarp(floats);
    if (lane == 0) {
      atomicMax(&most[geometry.BlockOfUnit(UnitOf(FirstElement<kPerRow>(0)))], bits);
    }
    return;
  }
  constexpr int kLanes = static_cast<int>(kAlignment) / kPerRow;  // that share a unit
#pragma unroll
  for (int row = 0; row < kPerThread / kPerRow; ++row) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kPerRow; ++i) {
      const uint32_t own = Magnitude(floats[row * kPerRow + i]);
      bits = own > bits ? own : bits;
    }
    bits = MaxOfLanes(bits, kLanes);
    if (lane % kLanes == 0) {
      atomicMax(&most[geometry.BlockOfUnit(UnitOf(FirstElement<kPerRow>(row)))], bits);
    }
  }
}

// Where the scales of blocks longer than a tile are collected, in two kernels that run before that which
// encodes.
__global__ void __launch_bounds__(kThreads) ZeroScalesKernel(const __grid_constant__ Arguments a) {
  for (uint32_t p = 0; p < a.pieces; ++p) {  // other pieces of the same chunk may belong to another launch
    const PieceArgument& piece = a.piece[p];
    const ChunkArgument& chunk = a.chunk[piece.chunk];
    const int64_t size = a.block_size != 0 ? a.block_size : piece.elements;
    const int64_t blocks = (piece.elements + size - 1) / size;
    uint8_t* scales = chunk.data + ScalesOffset(chunk) + kScaleBytes * piece.first_block;
    for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < blocks; i += gridDim.x * kThreads) {
      WriteWord(scales + kScaleBytes * i, 0);
    }
  }
}

template <typename Loader>
__global__ void __launch_bounds__(kThreads) LongBlocksKernel(const __grid_constant__ Arguments a) {
  __shared__ float values[256];
  const Geometry geometry(a.block_size);
  if (Loader::kReceives) {
    FillValues(a, values);
    __syncthreads();
  }
  for (uint32_t number = blockIdx.x; number < a.tiles; number += gridDim.x) {
    const Tile tile = geometry.At(a, number);
    float floats[kPerThread];
    Loader::Load(a, tile, values, floats);
    const uint32_t most = MaxOfWarp(floats);
    if (threadIdx.x % kWarp == 0) {
      // A bit pattern for now: the encoding kernel makes the scale of it.
      atomicMax(reinterpret_cast<uint32_t*>(ScalesOf(a, tile, ChunkOf(a, tile).data)), most);
    }
  }
}

// -------------------------------------------------------------------------------------------------------
// encode

// The table that finds an index (codebook.h), a word for each bucket: 17 bits of its threshold, 7 of the
// index below it, 7 to add above it.
__device__ void FillBuckets(const Arguments& a, uint32_t* buckets) {
  const uint32_t last = kOne >> kBucketBits;
  for (uint32_t bucket = a.first_bucket + threadIdx.x; bucket <= last; bucket += kThreads) {
    // How many thresholds lie before this bucket, and before the next.
    int before[2];
    for (int i = 0; i < 2; ++i) {
      int low = 0, high = 127;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (a.thresholds[middle] >> kBucketBits < bucket + i) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      before[i] = low;
    }
    const uint32_t step = before[1] - before[0];
    const uint32_t threshold = step == 0 ? 0 : a.thresholds[before[0]] & ((1u << kBucketBits) - 1);
    buckets[bucket - a.first_bucket] =
        threshold | static_cast<uint32_t>(before[0]) << kBucketBits | step << 24;
  }
}

// The index of the nearest magnitude; `y` are the bits of a number in [0, 1].
__device__ uint32_t NearestIndex(uint32_t y, uint32_t lowest, const uint32_t* buckets) {
  y = y > lowest ? y : lowest;
  const uint32_t bucket = buckets[(y - lowest) >> kBucketBits];
  constexpr uint32_t kLow = (1u << kBucketBits) - 1;
  return (bucket >> kBucketBits & 0x7fu) + ((y & kLow) > (bucket & kLow) ? bucket >> 24 : 0u);
}

__device__ float BlockScale(uint32_t most, float fixed_scale) {
  if (most >= kInfinity) {
    return BitsToFloat(kQuietNan);
  }
  return fixed_scale != 0.f ? fixed_scale : BitsToFloat(most);
}

template <typename Loader, bool kStochastic>
__global__ void __launch_bounds__(kThreads) EncodeKernel(const __grid_constant__ Arguments a) {
  constexpr int kPerRow = Loader::kPerRow;
  __shared__ uint32_t buckets[kMostBuckets];
  __shared__ float values[256];
  // Of three tiles in turn: the last one's may still be read while the next one's are cleared.
  __shared__ uint32_t most[3][kUnits];

  const Geometry geometry(a.block_size);
  const bool long_blocks = geometry.tile_blocks == 0;
  const uint32_t lowest = a.first_bucket << kBucketBits;
  FillBuckets(a, buckets);
  bool refused = false;
  if constexpr (Loader::kReceives || kStochastic) {
    FillValues(a, values);
  }
  if constexpr (Loader::kReceives) {
    refused = Loader::Refused(a);
  }
  if (threadIdx.x < kUnits) {
    most[0][threadIdx.x] = 0;
  }
  if (blockIdx.x == 0) {
    WriteHeaders(a);
  }
  __syncthreads();

  int turn = 0;
  for (uint32_t number = blockIdx.x; number < a.tiles; number += gridDim.x) {
    const Tile tile = geometry.At(a, number);
    const PieceArgument& piece = a.piece[tile.piece];
    uint8_t* codes = CodesOf(a, tile, ChunkOf(a, tile).data);
    uint8_t* scales = ScalesOf(a, tile, ChunkOf(a, tile).data);
    float floats[kPerThread];
    Loader::Load(a, tile, values, floats);

    const int next = turn == 2 ? 0 : turn + 1;
    if (!long_blocks) {
      FindMost<kPerRow>(geometry, floats, most[turn]);
    } else if (threadIdx.x == 0) {
      // The thread block with the block's first tile writes the scale below, perhaps at this moment: what it
      // makes of the bits, BlockScale makes of them again.
      most[turn][0] = *reinterpret_cast<volatile uint32_t*>(scales);
    }
    if (threadIdx.x < kUnits) {
      most[next][threadIdx.x] = 0;
    }
    __syncthreads();

    const bool whole_words = AllWithin<kPerRow>(tile) && Aligned(codes, 4);
#pragma unroll
    for (int row = 0; row < kPerThread / kPerRow; ++row) {
      const int first = FirstElement<kPerRow>(row);
      const uint32_t bits = most[turn][geometry.BlockOfUnit(UnitOf(first))];
      const float scale = BlockScale(bits, a.fixed_scale);
      const float divisor = scale > 0.f ? scale : 1.f;  // of zeros, and of what is not finite
      const uint32_t mask = bits < kInfinity && !refused ? 0xffffffffu : 0u;
#pragma unroll
      for (int at = 0; at < kPerRow; at += 4) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = floats[row * kPerRow + at + i];
          uint32_t y = FloatBits(__fdiv_rn(BitsToFloat(Magnitude(x)), divisor));
          y = y < kOne ? y : kOne;
          uint32_t index = NearestIndex(y, lowest, buckets);
          if constexpr (kStochastic) {
            const int64_t place = piece.row + tile.start + first + at + i;
            index = StochasticIndex(values, static_cast<int>(index), BitsToFloat(y), RandomAt(a.key, place));
          }
          const uint32_t code = index == 0 ? 0u : index | (FloatBits(x) >> 24 & kSignBit);
          word |= code << (8 * i);
        }
        word &= mask;
        if (whole_words) {
          *reinterpret_cast<uint32_t*>(codes + first + at) = word;
        } else {
          for (int i = 0; i < 4 && first + at + i < tile.elements; ++i) {
            codes[first + at + i] = static_cast<uint8_t>(word >> (8 * i));
          }
        }
      }
    }
    const int block = static_cast<int>(threadIdx.x);
    if (tile.starts_block && geometry.Holds(tile, block)) {
      const float scale = refused ? BitsToFloat(kQuietNan) : BlockScale(most[turn][block], a.fixed_scale);
      WriteWord(scales + kScaleBytes * block, FloatBits(scale));
    }
    if (tile.start + tile.elements == piece.elements && threadIdx.x < piece.zeros) {
      codes[tile.elements + threadIdx.x] = 0;
    }
    turn = next;
  }
}

// -------------------------------------------------------------------------------------------------------
// decode

template <typename T>
__global__ void __launch_bounds__(kThreads) DecodeKernel(const __grid_constant__ Arguments a) {
  constexpr int kPerRow = kAtOnce<T>, kRows = kPerThread / kPerRow;
  __shared__ float values[256];
  // Of two tiles in turn: the last one's may still be read while the next one's are written.
  __shared__ float scale_of[2][kUnits];

  const Geometry geometry(a.block_size);
  FillValues(a, values);  // read after the first tile's barrier
  if (blockIdx.x == 0) {
    const auto chunk_of = [&](int64_t k) { return a.chunk[k]; };
    const auto data_of = [&](int64_t k) -> const uint8_t* { return a.chunk[k].data; };
    if (__syncthreads_or(HeadersDiffer(a, a.chunks, chunk_of, data_of)) && threadIdx.x == 0) {
      ReportFirst(a, a.chunks, chunk_of, data_of, [&](int64_t k) { return a.chunk[k].shard; });
    }
  }

  int turn = 0, checked = -1;
  bool refused = false;
  for (uint32_t number = blockIdx.x; number < a.tiles; number += gridDim.x) {
    const Tile tile = geometry.At(a, number);
    const PieceArgument& piece = a.piece[tile.piece];
    const ChunkArgument& chunk = ChunkOf(a, tile);
    const uint8_t* codes = CodesOf(a, tile, chunk.data);

    bool differs = false;
    if (checked != piece.chunk) {
      differs = HeadersDiffer(
          a, 1, [&](int64_t) { return chunk; }, [&](int64_t) -> const uint8_t* { return chunk.data; });
      refused = false;
      checked = piece.chunk;
    }
    const int block = static_cast<int>(threadIdx.x);
    if (geometry.Holds(tile, block)) {
      const double scale = BitsToFloat(ReadWord(ScalesOf(a, tile, chunk.data) + kScaleBytes * block));
      scale_of[turn][block] =
          static_cast<float>(__ddiv_rn(__dmul_rn(scale, a.factor), static_cast<double>(a.shards)));
    }
    refused |= __syncthreads_or(differs);

    uint32_t words[kPerThread / 4];
    ReadCodes<kPerRow>(tile, codes, words);
    auto* to = static_cast<uint8_t*>(piece.tensor) + tile.start * static_cast<int64_t>(sizeof(T));
    const bool vectors = AllWithin<kPerRow>(tile) && Aligned(to, 16);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int first = FirstElement<kPerRow>(row);
      if (first >= tile.elements) {
        continue;
      }
      const float scale =
          refused ? BitsToFloat(kQuietNan) : scale_of[turn][geometry.BlockOfUnit(UnitOf(first))];
      T elements[kPerRow];
#pragma unroll
      for (int i = 0; i < kPerRow; ++i) {
        const uint32_t code = words[(row * kPerRow + i) / 4] >> (8 * (i % 4)) & 0xff;
        elements[i] = FromFloat<T>(__fmul_rn(values[code], scale));
      }
      if (vectors) {
        constexpr int kStores = kPerRow * sizeof(T) / 16;
        uint4 stored[kStores];
        memcpy(stored, elements, sizeof elements);
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
          reinterpret_cast<uint4*>(to + first * sizeof(T))[i] = stored[i];
        }
      } else {
        for (int i = 0; i < kPerRow; ++i) {
          if (first + i < tile.elements) {
            memcpy(to + (first + i) * sizeof(T), &elements[i], sizeof(T));
          }
        }
      }
    }
    turn ^= 1;
  }
}

// -------------------------------------------------------------------------------------------------------
// launches

uint32_t Grid(const Arguments& a) {
  const uint32_t wanted = a.tiles < HVD8BIT_MOST_THREAD_BLOCKS ? a.tiles : HVD8BIT_MOST_THREAD_BLOCKS;
  return wanted > 0 ? wanted : 1;  // headers alone
}

template <typename Loader>
int Encode(const Arguments& a, void* stream) {
  if (a.block_size == 0 || a.block_size > kTileElements) {
    HVD8BIT_LAUNCH(ZeroScalesKernel, Grid(a), stream, a);
    HVD8BIT_LAUNCH(LongBlocksKernel<Loader>, Grid(a), stream, a);
  }
  if (a.header.rounding == static_cast<uint8_t>(Rounding::kStochastic)) {
    HVD8BIT_LAUNCH((EncodeKernel<Loader, true>), Grid(a), stream, a);
  } else {
    HVD8BIT_LAUNCH((EncodeKernel<Loader, false>), Grid(a), stream, a);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

int LaunchEncode(DType dtype, const Arguments& arguments, void* stream) {
  int error = 0;
  ForDType(dtype, [&](auto* type) {
    error = Encode<TensorLoader<std::remove_pointer_t<decltype(type)>>>(arguments, stream);
  });
  return error;
}

int LaunchReduce(const Arguments& arguments, void* stream) { return Encode<ShardsLoader>(arguments, stream); }

int LaunchDecode(DType dtype, const Arguments& arguments, void* stream) {
  ForDType(dtype, [&](auto* type) {
    HVD8BIT_LAUNCH(DecodeKernel<std::remove_pointer_t<decltype(type)>>, Grid(arguments), stream, arguments);
  });
  return static_cast<int>(cudaGetLastError());
}

int AllocateHostMemory(int64_t bytes, void** memory) {
  const cudaError_t error = cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error == cudaSuccess) {
    memset(*memory, 0, bytes);
  } else {
    cudaGetLastError();  // or the next launch would return it
  }
  return static_cast<int>(error);
}

const char* ErrorText(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

void Versions(int* runtime, int* driver) {
  *runtime = *driver = 0;
  cudaRuntimeGetVersion(runtime);
  cudaDriverGetVersion(driver);
}

}  // namespace cuda
}  // namespace hvd8bit

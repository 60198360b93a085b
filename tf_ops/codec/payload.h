// Lists of tensors to chunks and back: the three steps of the exchange, on plain pointers. Every chunk that
// was received is checked before a byte of it is used.
#ifndef HVD8BIT_CODEC_PAYLOAD_H_
#define HVD8BIT_CODEC_PAYLOAD_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/layout.h"

namespace hvd8bit {

// Runs fn(begin, end) over ranges that make up [0, units), perhaps on several threads. `cost` is in cycles
// per unit.
using ParallelFor = std::function<void(int64_t units, int64_t cost,
                                       const std::function<void(int64_t begin, int64_t end)>& fn)>;

// The functions below that return a string return what is wrong, or "".

inline constexpr int64_t kMaxShards = 1 << 20;
inline constexpr int64_t kMaxSlices = 65535;  // the header has 16 bits for them

// What a list op was asked to do, checked.
struct Plan {
  Spec spec;
  Layout layout;
  std::vector<TensorInfo> tensors;
  const Backend* backend;
  int64_t seed = 0;  // of stochastic rounding
};
std::string CheckSpec(const Spec& spec);

// The header of one slice of a chunk.
ChunkHeader MakeHeader(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice);
// What tells `received` from `expected`, of all fields; `own` are this worker's tensors, if they are at hand.
std::string CompareHeaders(const ChunkHeader& expected, const ChunkHeader& received,
                           const std::string& sender, const std::vector<TensorInfo>* own);

// Encode one slice of every chunk. `chunks` are the layout's; they go to `payload` one after another.
std::vector<Layout::Chunk> SliceOfAllChunks(const Layout& layout, int64_t slice);
void EncodeList(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                const std::vector<const void*>& data, uint8_t* payload, const ParallelFor& parallel_for);

// Check what all workers sent for chunk `shard`: `bytes` of `payload`, `sent[k]` of them from worker k.
std::string CheckShards(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                        const uint8_t* payload, int64_t bytes, const std::vector<int64_t>& sent);
// The part of it that needs no look at the payload, and so can be had of one that a GPU holds.
std::string CheckShardSizes(const Plan& plan, const Layout::Chunk& chunk, int64_t bytes,
                            const std::vector<int64_t>& sent);
// Their encoded sum, a chunk of the same size.
void ReduceShards(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                  const uint8_t* payload, uint8_t* out, const ParallelFor& parallel_for);
// The sum itself, of the chunk's elements, which are `count` consecutive ones of the tensors' elements one
// after another, from `first` on.
struct Elements {
  int64_t first, count;
};
Elements ElementsOf(const Plan& plan, const Layout::Chunk& chunk);
void SumShards(const Plan& plan, const Layout::Chunk& chunk, const uint8_t* payload, float* out,
               const ParallelFor& parallel_for);

// Check the chunks of one slice, one after another.
std::string CheckReduced(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                         const uint8_t* payload, int64_t bytes);
std::string CheckReducedSize(const std::vector<Layout::Chunk>& chunks, int64_t bytes);
// Decode them into the tensors at `out`, times `factor` / shards.
void DecodeList(const Plan& plan, const std::vector<Layout::Chunk>& chunks, const uint8_t* payload,
                double factor, const std::vector<void*>& out, const ParallelFor& parallel_for);

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_PAYLOAD_H_

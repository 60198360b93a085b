// Lists of tensors to chunks and back on a GPU: the functions of payload.h, on the device's memory, as work
// that is queued on a stream. They return what is wrong, or "".
#ifndef HVD8BIT_CODEC_CUDA_LISTS_H_
#define HVD8BIT_CODEC_CUDA_LISTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tf_ops/codec/payload.h"

namespace hvd8bit {
namespace cuda {

std::string EncodeList(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                       const std::vector<const void*>& data, uint8_t* payload, void* stream);

// `payload` holds plan.layout.shards() chunks of chunk.Bytes(); CheckShardSizes has said so. Where one of
// them was made of something else, all scales of the sum become NaN, and TakeReport() will tell. `who` is
// named then.
std::string ReduceShards(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                         const uint8_t* payload, uint8_t* out, const std::string& who, void* stream);

// Decodes slices, the k-th from payloads[k], which CheckReducedSize let pass. Of a chunk that was made of
// something else all numbers become NaN, and TakeReport() will tell.
std::string DecodeList(const Plan& plan, const std::vector<std::vector<Layout::Chunk>>& slices,
                       const std::vector<const uint8_t*>& payloads, double factor,
                       const std::vector<void*>& out, const std::string& who, void* stream);

// What a kernel has found wrong with a chunk since the last call, or "". No kernel is waited for: it may be
// told at a later call.
std::string TakeReport();

}  // namespace cuda
}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_CUDA_LISTS_H_

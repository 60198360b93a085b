// The ops on CUDA GPUs. Tensors and payloads lie in the device's memory, numbers that the host needs in its
// own. Nothing waits for the device: the headers of received chunks are compared there (codec/cuda/lists.h).
#include "tensorflow/core/platform/stream_executor.h"
#include "tf_ops/codec/cuda/lists.h"
#include "tf_ops/kernels/list_ops.h"

// A test runs these kernels, over emulated CUDA, on the CPU.
#ifndef HVD8BIT_CUDA_DEVICE
#define HVD8BIT_CUDA_DEVICE tensorflow::DEVICE_GPU
#endif

namespace hvd8bit {
namespace {

// TensorFlow's own stream for this op: what wrote the inputs runs before, what reads the outputs after.
void* StreamOf(OpKernelContext* ctx) {
  auto* device = ctx->op_device_context();
  return device == nullptr || device->stream() == nullptr
             ? nullptr
             : device->stream()->platform_specific_handle().stream;
}

struct Cuda {
  static std::string Prepare(const Backend** /*backend*/) { return ""; }

  static std::string Late() { return cuda::TakeReport(); }

  static std::string CheckShards(const Plan& plan, const Layout::Chunk& chunk, int64_t /*shard*/,
                                 int64_t /*slice*/, const uint8_t* /*payload*/, int64_t bytes,
                                 const std::vector<int64_t>& sent) {
    return CheckShardSizes(plan, chunk, bytes, sent);
  }

  static std::string CheckReduced(const Plan& /*plan*/, const std::vector<Layout::Chunk>& chunks,
                                  int64_t /*slice*/, const uint8_t* /*payload*/, int64_t bytes) {
    return CheckReducedSize(chunks, bytes);
  }

  static std::string Encode(OpKernelContext* ctx, const Plan& plan, const std::vector<Layout::Chunk>& chunks,
                            int64_t slice, const std::vector<const void*>& data, uint8_t* payload) {
    return cuda::EncodeList(plan, chunks, slice, data, payload, StreamOf(ctx));
  }

  static std::string Reduce(OpKernelContext* ctx, const Plan& plan, const Layout::Chunk& chunk, int64_t shard,
                            int64_t slice, const uint8_t* payload, uint8_t* out, const std::string& name) {
    return cuda::ReduceShards(plan, chunk, shard, slice, payload, out, name, StreamOf(ctx));
  }

  static std::string Decode(OpKernelContext* ctx, const Plan& plan,
                            const std::vector<std::vector<Layout::Chunk>>& slices,
                            const std::vector<const uint8_t*>& payloads, double factor,
                            const std::vector<void*>& out, const std::string& name) {
    return cuda::DecodeList(plan, slices, payloads, factor, out, name, StreamOf(ctx));
  }
};

REGISTER_KERNEL_BUILDER(Name("Hvd8bitEncodeList")
                            .Device(HVD8BIT_CUDA_DEVICE)
                            .HostMemory("shards")
                            .HostMemory("seed")
                            .HostMemory("splits"),
                        EncodeListOp<Cuda>);
REGISTER_KERNEL_BUILDER(Name("Hvd8bitReduceShards")
                            .Device(HVD8BIT_CUDA_DEVICE)
                            .HostMemory("splits")
                            .HostMemory("shards")
                            .HostMemory("shard")
                            .HostMemory("seed"),
                        ReduceShardsOp<Cuda>);
REGISTER_KERNEL_BUILDER(
    Name("Hvd8bitDecodeList").Device(HVD8BIT_CUDA_DEVICE).HostMemory("shards").HostMemory("factor"),
    DecodeListOp<Cuda>);

}  // namespace
}  // namespace hvd8bit

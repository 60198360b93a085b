// The ops on CPUs.
#include "tf_ops/codec/float_types.h"
#include "tf_ops/kernels/huge_pages.h"
#include "tf_ops/kernels/list_ops.h"

namespace hvd8bit {
namespace {

ParallelFor OnTensorFlowsThreads(OpKernelContext* ctx) {
  auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  return [pool](int64_t units, int64_t cost, const std::function<void(int64_t, int64_t)>& fn) {
    pool->ParallelFor(units, cost, fn);
  };
}

struct Cpu {
  static std::string Prepare(const Backend** backend) { return ChooseBackend(backend); }

  static std::string Late() { return ""; }

  static std::string CheckShards(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                                 const uint8_t* payload, int64_t bytes, const std::vector<int64_t>& sent) {
    return hvd8bit::CheckShards(plan, chunk, shard, slice, payload, bytes, sent);
  }

  static std::string CheckReduced(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                                  const uint8_t* payload, int64_t bytes) {
    return hvd8bit::CheckReduced(plan, chunks, slice, payload, bytes);
  }

  static std::string Encode(OpKernelContext* ctx, const Plan& plan, const std::vector<Layout::Chunk>& chunks,
                            int64_t slice, const std::vector<const void*>& data, uint8_t* payload) {
    int64_t bytes = 0;
    for (const Layout::Chunk& chunk : chunks) {
      bytes += chunk.Bytes();
    }
    AskForHugePages(payload, bytes);
    EncodeList(plan, chunks, slice, data, payload, OnTensorFlowsThreads(ctx));
    return "";
  }

  static std::string Reduce(OpKernelContext* ctx, const Plan& plan, const Layout::Chunk& chunk, int64_t shard,
                            int64_t slice, const uint8_t* payload, uint8_t* out,
                            const std::string& /*name*/) {
    ReduceShards(plan, chunk, shard, slice, payload, out, OnTensorFlowsThreads(ctx));
    return "";
  }

  static void Sum(OpKernelContext* ctx, const Plan& plan, const Layout::Chunk& chunk, const uint8_t* payload,
                  float* out) {
    SumShards(plan, chunk, payload, out, OnTensorFlowsThreads(ctx));
  }

  static std::string Decode(OpKernelContext* ctx, const Plan& plan,
                            const std::vector<std::vector<Layout::Chunk>>& slices,
                            const std::vector<const uint8_t*>& payloads, double factor,
                            const std::vector<void*>& out, const std::string& /*name*/) {
    for (size_t i = 0; i < out.size(); ++i) {
      AskForHugePages(out[i], plan.tensors[i].elements * DTypeBytes(plan.tensors[i].dtype));
    }
    for (size_t slice = 0; slice < slices.size(); ++slice) {
      DecodeList(plan, slices[slice], payloads[slice], factor, out, OnTensorFlowsThreads(ctx));
    }
    return "";
  }
};

REGISTER_KERNEL_BUILDER(Name("Hvd8bitEncodeList").Device(tensorflow::DEVICE_CPU), EncodeListOp<Cpu>);
REGISTER_KERNEL_BUILDER(Name("Hvd8bitReduceShards").Device(tensorflow::DEVICE_CPU), ReduceShardsOp<Cpu>);
REGISTER_KERNEL_BUILDER(Name("Hvd8bitSumShards").Device(tensorflow::DEVICE_CPU), SumShardsOp<Cpu>);
REGISTER_KERNEL_BUILDER(Name("Hvd8bitDecodeList").Device(tensorflow::DEVICE_CPU), DecodeListOp<Cpu>);

}  // namespace
}  // namespace hvd8bit

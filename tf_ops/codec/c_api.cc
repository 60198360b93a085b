#include "tf_ops/codec/c_api.h"

#include <string>
#include <vector>

#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/cpu/float_environment.h"
#include "tf_ops/codec/dither.h"
#include "tf_ops/codec/payload.h"

#if defined(HVD8BIT_CUDA)
#include "tf_ops/codec/cuda/kernels.h"
#include "tf_ops/codec/cuda/lists.h"
#endif

namespace hvd8bit {
namespace {

const char* Message(const std::string& text) {
  thread_local std::string kept;
  kept = text;
  return kept.c_str();
}

// Finds back end and codebook, then calls fn(backend, codebook, block, start, count) for each block of n
// elements.
template <typename Fn>
const char* ForBlocks(const char* backend_name, const char* data_type, int64_t block_size, float fixed_scale,
                      int dtype, int64_t n, Fn fn) {
  const Backend* backend = FindBackend(backend_name);
  if (backend == nullptr) {
    return Message("backend must be one of " + RunnableBackends() + ", got '" + backend_name + "'");
  }
  Spec spec;
  spec.data_type = static_cast<uint8_t>(DataTypeByName(data_type));
  spec.block_size = block_size;
  spec.fixed_scale = fixed_scale;
  const std::string error = CheckSpec(spec);
  if (!error.empty()) {
    return Message(error);
  }
  if (dtype < 1 || dtype > 4 || n < 0) {
    return Message("dtype must be in [1, 4] and n at least 0");
  }
  const FullFloatRange full_float_range;
  const Codebook& book = GetCodebook(spec.data_type);
  const int64_t size = block_size != 0 ? block_size : n;
  for (int64_t start = 0, block = 0; start < n; start += size, ++block) {
    fn(*backend, book, block, start, n - start < size ? n - start : size);
  }
  return nullptr;
}

// The list functions below: checks the list, then calls fn(plan, whether on the device).
template <typename Fn>
const char* WithPlan(const hvd8bit_list* list, Fn fn) {
  Spec spec;
  spec.data_type = static_cast<uint8_t>(DataTypeByName(list->data_type));
  spec.block_size = list->block_size;
  spec.fixed_scale = list->fixed_scale;
  spec.rounding = list->stochastic != 0 ? Rounding::kStochastic : Rounding::kNearest;
  std::string error = CheckSpec(spec);
  if (error.empty() &&
      (list->count < 1 || list->shards < 1 || list->shards > kMaxShards || list->slices < 1 ||
       list->slices > kMaxSlices || list->slice < 0 || list->slice >= list->slices)) {
    error = "count and shards must be at least 1, slices in [1, 65535], slice in [0, slices)";
  }
  std::vector<TensorInfo> infos;
  for (int64_t i = 0; error.empty() && i < list->count; ++i) {
    if (list->dtypes[i] < 1 || list->dtypes[i] > 4 || list->elements[i] < 0) {
      error = "dtypes must be in [1, 4] and elements at least 0";
    }
    infos.push_back({static_cast<DType>(list->dtypes[i]), {list->elements[i]}, list->elements[i]});
  }
  const bool on_device = std::string(list->backend) == "cuda";
  const Backend* backend = on_device ? nullptr : FindBackend(list->backend);
  if (error.empty() && on_device && hvd8bit_cuda_built() == 0) {
    error = "the library was built without CUDA";
  } else if (error.empty() && !on_device && backend == nullptr) {
    error = "backend must be cuda or one of " + RunnableBackends() + ", got '" + list->backend + "'";
  }
  if (error.empty()) {
    Layout layout(infos, spec.block_size, list->shards, list->slices);
    error = fn(Plan{spec, std::move(layout), std::move(infos), backend, list->seed}, on_device);
  }
  return error.empty() ? nullptr : Message(error);
}

void OnThisThread(int64_t units, int64_t /*cost*/, const std::function<void(int64_t, int64_t)>& fn) {
  fn(0, units);
}

}  // namespace
}  // namespace hvd8bit

using hvd8bit::Backend;
using hvd8bit::Codebook;
using hvd8bit::Dither;
using hvd8bit::DType;
using hvd8bit::Layout;
using hvd8bit::Plan;

const char* hvd8bit_built_backends(void) {
  static const auto* names = new std::string(hvd8bit::BuiltBackends());
  return names->c_str();
}

const char* hvd8bit_runnable_backends(void) {
  static const auto* names = new std::string(hvd8bit::RunnableBackends());
  return names->c_str();
}

const char* hvd8bit_encode(const char* backend, const char* data_type, int64_t block_size, float fixed_scale,
                           int stochastic, int64_t seed, int dtype, const void* x, int64_t n, uint8_t* codes,
                           float* scales) {
  const uint64_t key = hvd8bit::DitherKey(seed);
  return hvd8bit::ForBlocks(
      backend, data_type, block_size, fixed_scale, dtype, n,
      [&](const Backend& b, const Codebook& book, int64_t block, int64_t start, int64_t count) {
        const Dither dither{key, start};
        b.encode(static_cast<DType>(dtype), x, start, count, book, fixed_scale,
                 stochastic != 0 ? &dither : nullptr, codes + start, scales + block);
      });
}

const char* hvd8bit_decode(const char* backend, const char* data_type, int64_t block_size, int dtype,
                           const uint8_t* codes, const float* scales, int64_t n, int stream, void* out) {
  const char* error = hvd8bit::ForBlocks(
      backend, data_type, block_size, 0.f, dtype, n,
      [&](const Backend& b, const Codebook& book, int64_t block, int64_t start, int64_t count) {
        b.decode(static_cast<DType>(dtype), codes + start, scales[block], count, book, out, start,
                 stream != 0);
      });
  hvd8bit::FinishStreaming();
  return error;
}

const char* hvd8bit_sum_and_encode(const char* backend, const char* data_type, int64_t block_size,
                                   float fixed_scale, int stochastic, int64_t seed, int64_t shards,
                                   const uint8_t* const* codes, const float* const* scales, int64_t n,
                                   uint8_t* out_codes, float* out_scales) {
  if (shards < 1) {
    return hvd8bit::Message("shards must be at least 1, got " + std::to_string(shards));
  }
  const uint64_t key = hvd8bit::DitherKey(seed);
  std::vector<const uint8_t*> block_codes(shards);
  std::vector<float> block_scales(shards);
  return hvd8bit::ForBlocks(
      backend, data_type, block_size, fixed_scale, 1, n,
      [&](const Backend& b, const Codebook& book, int64_t block, int64_t start, int64_t count) {
        for (int64_t k = 0; k < shards; ++k) {
          block_codes[k] = codes[k] + start;
          block_scales[k] = scales[k][block];
        }
        const Dither dither{key, start};
        b.sum_and_encode(block_codes.data(), block_scales.data(), shards, count, book, fixed_scale,
                         stochastic != 0 ? &dither : nullptr, out_codes + start, out_scales + block);
      });
}

const char* hvd8bit_list_bytes(const hvd8bit_list* list, int64_t* chunk_bytes) {
  return hvd8bit::WithPlan(list, [&](const Plan& plan, bool) -> std::string {
    for (int64_t shard = 0; shard < list->shards; ++shard) {
      chunk_bytes[shard] = plan.layout.GetChunk(shard, list->slice).Bytes();
    }
    return "";
  });
}

const char* hvd8bit_encode_list(const hvd8bit_list* list, const void* const* tensors, uint8_t* payload) {
  return hvd8bit::WithPlan(list, [&](const Plan& plan, bool on_device) -> std::string {
    const auto chunks = SliceOfAllChunks(plan.layout, list->slice);
    const std::vector<const void*> data(tensors, tensors + list->count);
#if defined(HVD8BIT_CUDA)
    if (on_device) {
      return hvd8bit::cuda::EncodeList(plan, chunks, list->slice, data, payload, list->stream);
    }
#endif
    (void)on_device;
    EncodeList(plan, chunks, list->slice, data, payload, hvd8bit::OnThisThread);
    return "";
  });
}

const char* hvd8bit_reduce_shards(const hvd8bit_list* list, int64_t shard, const uint8_t* payload,
                                  int64_t bytes, const int64_t* sent, uint8_t* reduced) {
  return hvd8bit::WithPlan(list, [&](const Plan& plan, bool on_device) -> std::string {
    if (shard < 0 || shard >= list->shards) {
      return "shard must be in [0, shards), got " + std::to_string(shard);
    }
    const Layout::Chunk chunk = plan.layout.GetChunk(shard, list->slice);
    const std::vector<int64_t> sizes(sent, sent + list->shards);
#if defined(HVD8BIT_CUDA)
    if (on_device) {
      const std::string error = CheckShardSizes(plan, chunk, bytes, sizes);
      return error.empty() ? hvd8bit::cuda::ReduceShards(plan, chunk, shard, list->slice, payload, reduced,
                                                         "reduce_shards", list->stream)
                           : error;
    }
#endif
    (void)on_device;
    const std::string error = CheckShards(plan, chunk, shard, list->slice, payload, bytes, sizes);
    if (error.empty()) {
      ReduceShards(plan, chunk, shard, list->slice, payload, reduced, hvd8bit::OnThisThread);
    }
    return error;
  });
}

const char* hvd8bit_decode_list(const hvd8bit_list* list, const uint8_t* const* payloads,
                                const int64_t* bytes, double factor, void* const* out) {
  return hvd8bit::WithPlan(list, [&](const Plan& plan, bool on_device) -> std::string {
    std::vector<std::vector<Layout::Chunk>> slices;
    for (int64_t slice = 0; slice < list->slices; ++slice) {
      slices.push_back(SliceOfAllChunks(plan.layout, slice));
      const std::string error = on_device
                                    ? CheckReducedSize(slices.back(), bytes[slice])
                                    : CheckReduced(plan, slices.back(), slice, payloads[slice], bytes[slice]);
      if (!error.empty()) {
        return error;
      }
    }
    const std::vector<void*> tensors(out, out + list->count);
#if defined(HVD8BIT_CUDA)
    if (on_device) {
      return hvd8bit::cuda::DecodeList(plan, slices, {payloads, payloads + list->slices}, factor, tensors,
                                       "decode_list", list->stream);
    }
#endif
    for (int64_t slice = 0; slice < list->slices; ++slice) {
      DecodeList(plan, slices[slice], payloads[slice], factor, tensors, hvd8bit::OnThisThread);
    }
    return "";
  });
}

int hvd8bit_cuda_built(void) {
#if defined(HVD8BIT_CUDA)
  return 1;
#else
  return 0;
#endif
}

const char* hvd8bit_cuda_report(void) {
#if defined(HVD8BIT_CUDA)
  const std::string report = hvd8bit::cuda::TakeReport();
  return report.empty() ? nullptr : hvd8bit::Message(report);
#else
  return nullptr;
#endif
}

void hvd8bit_cuda_versions(int* runtime, int* driver) {
  *runtime = *driver = 0;
#if defined(HVD8BIT_CUDA)
  hvd8bit::cuda::Versions(runtime, driver);
#endif
}

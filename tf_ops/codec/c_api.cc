#include "tf_ops/codec/c_api.h"

#include <string>
#include <vector>

#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/cpu/float_environment.h"
#include "tf_ops/codec/payload.h"

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

}  // namespace
}  // namespace hvd8bit

using hvd8bit::Backend;
using hvd8bit::Codebook;
using hvd8bit::DType;

const char* hvd8bit_built_backends(void) {
  static const auto* names = new std::string(hvd8bit::BuiltBackends());
  return names->c_str();
}

const char* hvd8bit_runnable_backends(void) {
  static const auto* names = new std::string(hvd8bit::RunnableBackends());
  return names->c_str();
}

const char* hvd8bit_encode(const char* backend, const char* data_type, int64_t block_size, float fixed_scale,
                           int dtype, const void* x, int64_t n, uint8_t* codes, float* scales) {
  return hvd8bit::ForBlocks(
      backend, data_type, block_size, fixed_scale, dtype, n,
      [&](const Backend& b, const Codebook& book, int64_t block, int64_t start, int64_t count) {
        b.encode(static_cast<DType>(dtype), x, start, count, book, fixed_scale, codes + start,
                 scales + block);
      });
}

const char* hvd8bit_decode(const char* backend, const char* data_type, int64_t block_size, int dtype,
                           const uint8_t* codes, const float* scales, int64_t n, int stream, void* out) {
  return hvd8bit::ForBlocks(
      backend, data_type, block_size, 0.f, dtype, n,
      [&](const Backend& b, const Codebook& book, int64_t block, int64_t start, int64_t count) {
        b.decode(static_cast<DType>(dtype), codes + start, scales[block], count, book, out, start,
                 stream != 0);
      });
}

const char* hvd8bit_sum_and_encode(const char* backend, const char* data_type, int64_t block_size,
                                   float fixed_scale, int64_t shards, const uint8_t* const* codes,
                                   const float* const* scales, int64_t n, uint8_t* out_codes,
                                   float* out_scales) {
  if (shards < 1) {
    return hvd8bit::Message("shards must be at least 1, got " + std::to_string(shards));
  }
  std::vector<const uint8_t*> block_codes(shards);
  std::vector<float> block_scales(shards);
  return hvd8bit::ForBlocks(
      backend, data_type, block_size, fixed_scale, 1, n,
      [&](const Backend& b, const Codebook& book, int64_t block, int64_t start, int64_t count) {
        for (int64_t k = 0; k < shards; ++k) {
          block_codes[k] = codes[k] + start;
          block_scales[k] = scales[k][block];
        }
        b.sum_and_encode(block_codes.data(), block_scales.data(), shards, count, book, fixed_scale,
                         out_codes + start, out_scales + block);
      });
}

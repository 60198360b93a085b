// What a CPU back end offers: the arithmetic on one block. All back ends give the same bytes.
#ifndef HVD8BIT_CODEC_CPU_BACKEND_H_
#define HVD8BIT_CODEC_CPU_BACKEND_H_

#include <cstdint>
#include <string>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/dither.h"
#include "tf_ops/codec/format.h"

namespace hvd8bit {

struct Backend {
  const char* name;
  bool (*supported)();

  // Elements [start, start + n) of a tensor at `x` to n codes and a scale. `fixed_scale` 0: absolute maximum.
  // `dither` null: to the nearest value.
  void (*encode)(DType dtype, const void* x, int64_t start, int64_t n, const Codebook& book,
                 float fixed_scale, const Dither* dither, uint8_t* codes, float* scale);
  // n codes to elements [start, start + n) of a tensor at `out`. With `stream` the results bypass the caches,
  // which pays for outputs that do not fit into them; FinishStreaming comes before others look at them.
  void (*decode)(DType dtype, const uint8_t* codes, float scale, int64_t n, const Codebook& book, void* out,
                 int64_t start, bool stream);
  // Decodes `shards` blocks of n codes, adds them in order in float32, encodes the sum.
  void (*sum_and_encode)(const uint8_t* const* codes, const float* scales, int64_t shards, int64_t n,
                         const Codebook& book, float fixed_scale, const Dither* dither, uint8_t* out_codes,
                         float* out_scale);
};

// After decodes with `stream`, on the thread that ran them: once for many blocks, since it waits for the
// memory.
inline void FinishStreaming() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

// The fastest back end that this CPU runs, or the one that HVD8BIT_CPU names. An error if it names none that
// runs here. Decided once, at the first call.
std::string ChooseBackend(const Backend** backend);

// Names of the back ends that were built, fastest first; and of those that this CPU runs.
std::string BuiltBackends();
std::string RunnableBackends();
// By name; null if it was not built or does not run here.
const Backend* FindBackend(const std::string& name);

// Null where the architecture has no such instructions.
const Backend* Avx512Backend();
const Backend* Avx2Backend();
const Backend* ScalarBackend();

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_CPU_BACKEND_H_

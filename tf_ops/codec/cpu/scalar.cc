// The portable back end.
#include <cstring>
#include <type_traits>

#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/float_types.h"

namespace hvd8bit {
namespace scalar {
namespace {

#include "tf_ops/codec/cpu/portable.inc"

uint32_t AbsMaxBits(const float* x, int64_t n) { return PortableAbsMaxBits(x, n); }

void EncodeFloats(const float* x, int64_t n, float scale, const Codebook& book, uint8_t* codes) {
  PortableEncodeFloats(x, n, scale, book, codes);
}

void EncodeStochastic(const float* x, int64_t n, float scale, const Codebook& book, Dither dither,
                      uint8_t* codes) {
  PortableEncodeStochastic(x, n, scale, book, dither, codes);
}

void DecodeFloats(const uint8_t* codes, int64_t n, float scale, const Codebook& book, float* out,
                  bool /*stream*/) {
  PortableDecodeFloats(codes, n, scale, book, out);
}

void AddDecoded(const uint8_t* codes, int64_t n, float scale, const Codebook& book, float* sum) {
  PortableAddDecoded(codes, n, scale, book, sum);
}

#include "tf_ops/codec/cpu/kernels.inc"

bool Supported() { return true; }

}  // namespace
}  // namespace scalar

const Backend* ScalarBackend() {
  static const Backend backend{"scalar", scalar::Supported, scalar::Encode, scalar::Decode,
                               scalar::SumAndEncode};
  return &backend;
}

}  // namespace hvd8bit

// The portable back end.
#include <cstring>
#include <type_traits>

#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/float_types.h"

namespace hvd8bit {
namespace scalar {
namespace {

#include "tf_ops/codec/cpu/kernels.inc"

bool Supported() { return true; }

}  // namespace
}  // namespace scalar

const Backend& ScalarBackend() {
  static const Backend backend{"scalar", scalar::Supported, scalar::Encode, scalar::Decode, scalar::SumAndEncode};
  return backend;
}

}  // namespace hvd8bit

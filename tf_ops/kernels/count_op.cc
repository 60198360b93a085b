// Counts the bytes that this process hands to Horovod: hvd8bit/counting.py.
#include <atomic>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/codec/c_api.h"

namespace hvd8bit {
namespace {

// No variable of TensorFlow's: a step may count for hundreds of small gradients, and a function that counts
// can be exported.
std::atomic<int64_t> sent_bytes{0};

class CountSentOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& bytes = ctx->input(0);
    OP_REQUIRES(
        ctx, bytes.dims() == 0,
        absl::InvalidArgumentError("bytes must be a scalar, got shape " + bytes.shape().DebugString()));
    sent_bytes.fetch_add(bytes.scalar<int64_t>()(), std::memory_order_relaxed);
  }

  bool IsExpensive() override { return false; }
};

REGISTER_KERNEL_BUILDER(Name("Hvd8bitCountSent").Device(tensorflow::DEVICE_CPU), CountSentOp);

}  // namespace
}  // namespace hvd8bit

extern "C" {

HVD8BIT_EXPORT int64_t hvd8bit_sent_bytes(void) {
  return hvd8bit::sent_bytes.load(std::memory_order_relaxed);
}

HVD8BIT_EXPORT void hvd8bit_reset_sent_bytes(void) {
  hvd8bit::sent_bytes.store(0, std::memory_order_relaxed);
}
}

// Launches of the CUDA kernels. What they do to a launch's pieces, the CPU's functions of payload.h do to a
// list.
#ifndef HVD8BIT_CODEC_CUDA_KERNELS_H_
#define HVD8BIT_CODEC_CUDA_KERNELS_H_

#include <cstdint>

#include "tf_ops/codec/cuda/arguments.h"
#include "tf_ops/codec/format.h"

namespace hvd8bit {
namespace cuda {

// All return a cudaError_t: 0 is success. `stream` is a cudaStream_t. They return as soon as the work is
// queued.

// Tensors of one dtype to the chunks' codes and scales, and the chunks' headers.
int LaunchEncode(DType dtype, const Arguments& arguments, void* stream);
// The same of sums of `arguments.sent`.
int LaunchReduce(const Arguments& arguments, void* stream);
// The chunks to tensors of one dtype.
int LaunchDecode(DType dtype, const Arguments& arguments, void* stream);

// Memory of the host that kernels can write to, filled with zeros.
int AllocateHostMemory(int64_t bytes, void** memory);

const char* ErrorText(int error);

// For the C ABI: the library's CUDA runtime against the driver. Each as 1000 * major + 10 * minor, or 0.
void Versions(int* runtime, int* driver);

}  // namespace cuda
}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_CUDA_KERNELS_H_

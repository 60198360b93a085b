// The arithmetic of one tensor behind a C ABI, for ctypes: tests and benchmarks reach every CPU back end with
// it, without TensorFlow. Single-threaded. `backend`, `data_type`: names; `dtype`: the numbers of format.h's
// DType; `block_size` 0: one block; `fixed_scale` 0: absolute maximum. All return null, or a message that
// says what is wrong.
#ifndef HVD8BIT_CODEC_C_API_H_
#define HVD8BIT_CODEC_C_API_H_

#include <stdint.h>

#define HVD8BIT_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Names, separated by commas, fastest first: the back ends in the library, and those that this CPU runs.
HVD8BIT_EXPORT const char* hvd8bit_built_backends(void);
HVD8BIT_EXPORT const char* hvd8bit_runnable_backends(void);

// x[n] to codes[n] and scales[ceil(n / block_size)].
HVD8BIT_EXPORT const char* hvd8bit_encode(const char* backend, const char* data_type, int64_t block_size,
                                          float fixed_scale, int dtype, const void* x, int64_t n,
                                          uint8_t* codes, float* scales);

// codes[n] and scales to out[n]. `stream`: bypass the caches.
HVD8BIT_EXPORT const char* hvd8bit_decode(const char* backend, const char* data_type, int64_t block_size,
                                          int dtype, const uint8_t* codes, const float* scales, int64_t n,
                                          int stream, void* out);

// The encoded sum of `shards` arrays of codes and scales, added in order.
HVD8BIT_EXPORT const char* hvd8bit_sum_and_encode(const char* backend, const char* data_type,
                                                  int64_t block_size, float fixed_scale, int64_t shards,
                                                  const uint8_t* const* codes, const float* const* scales,
                                                  int64_t n, uint8_t* out_codes, float* out_scales);

#ifdef __cplusplus
}
#endif

#endif  // HVD8BIT_CODEC_C_API_H_

// The codec behind a C ABI, for ctypes: tests and benchmarks reach every back end with it, without
// TensorFlow. First the arithmetic of one tensor, of the CPU back ends, then the three steps on lists of
// tensors, of CUDA too. Single-threaded. `backend`, `data_type`: names; `dtype`: the numbers of format.h's
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

// x[n] to codes[n] and scales[ceil(n / block_size)]. `stochastic`: rounding, with `seed`; an element's place
// is its position in x.
HVD8BIT_EXPORT const char* hvd8bit_encode(const char* backend, const char* data_type, int64_t block_size,
                                          float fixed_scale, int stochastic, int64_t seed, int dtype,
                                          const void* x, int64_t n, uint8_t* codes, float* scales);

// codes[n] and scales to out[n]. `stream`: bypass the caches.
HVD8BIT_EXPORT const char* hvd8bit_decode(const char* backend, const char* data_type, int64_t block_size,
                                          int dtype, const uint8_t* codes, const float* scales, int64_t n,
                                          int stream, void* out);

// The encoded sum of `shards` arrays of codes and scales, added in order.
HVD8BIT_EXPORT const char* hvd8bit_sum_and_encode(const char* backend, const char* data_type,
                                                  int64_t block_size, float fixed_scale, int stochastic,
                                                  int64_t seed, int64_t shards, const uint8_t* const* codes,
                                                  const float* const* scales, int64_t n, uint8_t* out_codes,
                                                  float* out_scales);

// A list of vectors and how it is cut and encoded: one slice of `slices` of each of `shards` chunks.
typedef struct {
  const char* backend;  // "cuda", too: then tensors and payloads are memory of the device, in use by `stream`
  void* stream;         // a cudaStream_t
  const char* data_type;
  int64_t block_size;
  float fixed_scale;
  int stochastic;  // rounding, with `seed`
  int64_t seed;
  int64_t count;
  const int* dtypes;
  const int64_t* elements;
  int64_t shards, slices, slice;
} hvd8bit_list;

// Bytes of the slice of each chunk, into chunk_bytes[shards].
HVD8BIT_EXPORT const char* hvd8bit_list_bytes(const hvd8bit_list* list, int64_t* chunk_bytes);

// tensors[count] to the payload, all chunks one after another.
HVD8BIT_EXPORT const char* hvd8bit_encode_list(const hvd8bit_list* list, const void* const* tensors,
                                               uint8_t* payload);

// What `shards` workers sent for one chunk, sent[shards] bytes each, to their encoded sum.
HVD8BIT_EXPORT const char* hvd8bit_reduce_shards(const hvd8bit_list* list, int64_t shard,
                                                 const uint8_t* payload, int64_t bytes, const int64_t* sent,
                                                 uint8_t* reduced);

// payloads[slices] of bytes[slices] to out[count], times factor / shards. list->slice counts for nothing.
HVD8BIT_EXPORT const char* hvd8bit_decode_list(const hvd8bit_list* list, const uint8_t* const* payloads,
                                               const int64_t* bytes, double factor, void* const* out);

// Whether the library has the CUDA back end. What a kernel found wrong with a chunk since the last call, or
// null; its work is not waited for. CUDA's versions as 1000 * major + 10 * minor: of the runtime in the
// library, and the newest that the driver runs; 0 if there is none.
HVD8BIT_EXPORT int hvd8bit_cuda_built(void);
HVD8BIT_EXPORT const char* hvd8bit_cuda_report(void);
HVD8BIT_EXPORT void hvd8bit_cuda_versions(int* runtime, int* driver);

#ifdef __cplusplus
}
#endif

#endif  // HVD8BIT_CODEC_C_API_H_

// The whole range of floats, subnormals included, while it lives.
#ifndef HVD8BIT_CODEC_CPU_FLOAT_ENVIRONMENT_H_
#define HVD8BIT_CODEC_CPU_FLOAT_ENVIRONMENT_H_

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace hvd8bit {

// TensorFlow runs CPU kernels with flush-to-zero on, which would make scales below 2^-126 vanish there and
// nowhere else.
class FullFloatRange {
 public:
#if defined(__SSE__)
  FullFloatRange() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }  // FTZ and DAZ
  ~FullFloatRange() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FullFloatRange() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)));  // FZ
  }
  ~FullFloatRange() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_CPU_FLOAT_ENVIRONMENT_H_

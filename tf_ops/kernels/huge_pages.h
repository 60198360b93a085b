// Large outputs in large pages, where the system leaves that to programs (Linux: `madvise`).
//
// A page of 4 KiB costs a fault when it is first written and an entry of the TLB each time it is passed; one
// of 2 MiB costs the same. NumPy asks for them, too; TensorFlow's allocator does not.
#ifndef HVD8BIT_KERNELS_HUGE_PAGES_H_
#define HVD8BIT_KERNELS_HUGE_PAGES_H_

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace hvd8bit {

// Smaller buffers hold a whole large page seldom, and are often kept and used again.
constexpr int64_t kMinHugeBytes = int64_t{4} << 20;

// Before a buffer is written. Only advice: what is not granted is no error.
inline void AskForHugePages(const void* buffer, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kMinHugeBytes) {
    return;
  }
  constexpr uintptr_t kPage = 4096;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(buffer) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(buffer) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
  (void)buffer;
  (void)bytes;
#endif
}

}  // namespace hvd8bit

#endif  // HVD8BIT_KERNELS_HUGE_PAGES_H_

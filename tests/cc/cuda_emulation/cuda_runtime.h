// CUDA kernels on the host, for tests only: with this folder on the include path g++ compiles a .cu file as
// C++.
//
// Every thread of a thread block is a fiber with a stack of its own. A fiber runs until it comes to a barrier
// or a shuffle; when all are there, all go on. Thread blocks run one after another. Shared memory is static.
// The thread sanitizer takes the fibers for threads that nothing but a barrier synchronises, so that it finds
// a race although they never run at once.
//
// HVD8BIT_SKIP_BARRIER=all or =LINE, of kernels.cu, takes out barriers: a test of the tests.
//
// What it cannot do: <<<>>> (the file launches through HVD8BIT_LAUNCH), dynamic shared memory,
// warp-synchronous code, shuffles that some lanes of a warp leave out, a return before a barrier. The last
// two end the program.
#ifndef HVD8BIT_TESTS_CC_CUDA_EMULATION_CUDA_RUNTIME_H_
#define HVD8BIT_TESTS_CC_CUDA_EMULATION_CUDA_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

#include "tf_ops/codec/cpu/float_environment.h"

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64"
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#define HVD8BIT_NO_TSAN __attribute__((no_sanitize("thread"), noinline))
#else
#define HVD8BIT_NO_TSAN
#endif

// Saves the registers that a call must keep on the stack, its place in *from, and goes on with `to`.
extern "C" void hvd8bit_switch_fiber(void** from, void* to);
asm(R"(
.text
.type hvd8bit_switch_fiber, @function
hvd8bit_switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hvd8bit_switch_fiber, .-hvd8bit_switch_fiber
)");

namespace cuda_emulation {

constexpr int kMaxThreads = 256;
constexpr int kLanes = 32;
constexpr size_t kStackBytes = size_t{256} << 10;

struct Index {
  unsigned x;
};

enum State { kReady, kAtBarrier, kInShuffle, kDone };

struct Fiber {
  unsigned index;
  State state;
  int barrier;        // line of the one it waits at
  unsigned shuffles;  // so far
  void* stack_pointer;
  std::unique_ptr<char[]> stack;
  void* sanitizer_state;  // the thread sanitizer's fiber, the address sanitizer's stack
};

struct Machine {
  std::mutex mutex;
  Fiber fibers[kMaxThreads];
  int threads;
  Fiber* current;
  void* scheduler;  // stack pointer
  void* scheduler_sanitizer_state;
  const void* scheduler_stack;
  size_t scheduler_stack_bytes;
  Index block, grid;
  void (*body)(const void*);
  const void* body_argument;
  uint32_t shuffled[2][kMaxThreads];
  bool votes, verdict;                // of __syncthreads_or
  char at_start, at_barrier, at_end;  // what the thread sanitizer synchronises on
};

inline Machine& TheMachine() {
  static auto* machine = new Machine;
  return *machine;
}

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "cuda_emulation: %s\n", what);
  std::abort();
}

inline void Acquire(char& at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&at);
#else
  (void)at;
#endif
}

inline void Release(char& at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&at);
#else
  (void)at;
#endif
}

// From the scheduler to a fiber.
HVD8BIT_NO_TSAN inline void Resume(Machine& m, Fiber& fiber) {
  m.current = &fiber;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.sanitizer_state, 1);  // 1: that the switch does not synchronise
#elif defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&m.scheduler_sanitizer_state, fiber.stack.get(), kStackBytes);
#endif
  hvd8bit_switch_fiber(&m.scheduler, fiber.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(m.scheduler_sanitizer_state, nullptr, nullptr);
#endif
}

// From the current fiber to the scheduler; returns when it goes on.
HVD8BIT_NO_TSAN inline void Yield(Machine& m, State state) {
  Fiber& fiber = *m.current;
  fiber.state = state;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(m.scheduler_sanitizer_state, 1);
#elif defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fiber.sanitizer_state, m.scheduler_stack, m.scheduler_stack_bytes);
#endif
  hvd8bit_switch_fiber(&fiber.stack_pointer, m.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.sanitizer_state, nullptr, nullptr);
#endif
}

// What a fiber runs: one thread of one thread block after another.
HVD8BIT_NO_TSAN inline void RunFiber() {
  Machine& m = TheMachine();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &m.scheduler_stack, &m.scheduler_stack_bytes);
#endif
  for (;;) {
    Acquire(m.at_start);
    m.body(m.body_argument);
    Release(m.at_end);
    Yield(m, kDone);
  }
}

inline void MakeFiber(Fiber& fiber, unsigned index) {
  fiber.index = index;
  if (fiber.stack) {
    return;
  }
  fiber.stack.reset(new char[kStackBytes]);
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) & ~uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top);
  *--words = nullptr;  // where RunFiber would return to; and the alignment that a call leaves
  *--words = reinterpret_cast<void*>(&RunFiber);
  for (int i = 0; i < 6; ++i) {
    *--words = nullptr;
  }
  fiber.stack_pointer = words;
  fiber.sanitizer_state = nullptr;
#if defined(__SANITIZE_THREAD__)
  fiber.sanitizer_state = __tsan_create_fiber(0);
#endif
}

// Runs a warp until all its threads wait for other warps, or are done.
HVD8BIT_NO_TSAN inline void RunWarp(Machine& m, int first) {
  const bool backwards = m.block.x % 2 == 1;  // two orders find more than one
  for (;;) {
    int shuffling = 0, ran = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      Fiber& fiber = m.fibers[first + (backwards ? kLanes - 1 - lane : lane)];
      if (fiber.state == kReady) {
        Resume(m, fiber);
        ++ran;
      }
      shuffling += fiber.state == kInShuffle;
    }
    if (shuffling == kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        m.fibers[first + lane].state = kReady;
      }
    } else if (shuffling > 0) {
      Fail("some lanes of a warp leave out a shuffle");
    } else if (ran == 0) {
      return;
    }
  }
}

HVD8BIT_NO_TSAN inline void RunThreadBlock(Machine& m) {
  for (int i = 0; i < m.threads; ++i) {
    m.fibers[i].state = kReady;
    m.fibers[i].shuffles = 0;
  }
  for (;;) {
    const int warps = m.threads / kLanes;
    for (int i = 0; i < warps; ++i) {
      RunWarp(m, kLanes * (m.block.x % 2 == 1 ? warps - 1 - i : i));
    }
    int done = 0, waiting = 0;
    for (int i = 0; i < m.threads; ++i) {
      done += m.fibers[i].state == kDone;
      waiting += m.fibers[i].state == kAtBarrier && m.fibers[i].barrier == m.fibers[0].barrier;
    }
    if (done == m.threads) {
      return;
    }
    if (waiting != m.threads) {
      Fail("a thread returned before a barrier that others wait at, or waits at another");
    }
    m.verdict = m.votes;
    m.votes = false;
    for (int i = 0; i < m.threads; ++i) {
      m.fibers[i].state = kReady;
    }
  }
}

template <typename Body>
void Launch(unsigned grid, int threads, const Body& body) {
  Machine& m = TheMachine();
  const std::lock_guard<std::mutex> lock(m.mutex);
  // A GPU has the whole range of floats; TensorFlow's CPU threads do not.
  const hvd8bit::FullFloatRange full_range;
  if (threads > kMaxThreads || threads % kLanes != 0) {
    Fail("thread blocks have up to 256 threads, whole warps");
  }
  m.threads = threads;
  for (int i = 0; i < threads; ++i) {
    MakeFiber(m.fibers[i], static_cast<unsigned>(i));
  }
#if defined(__SANITIZE_THREAD__)
  m.scheduler_sanitizer_state = __tsan_get_current_fiber();
#endif
  m.body = [](const void* argument) { (*static_cast<const Body*>(argument))(); };
  m.body_argument = &body;
  m.grid.x = grid;
  for (m.block.x = 0; m.block.x < grid; ++m.block.x) {
    m.votes = false;
    Release(m.at_start);
    RunThreadBlock(m);
    Acquire(m.at_end);
  }
}

HVD8BIT_NO_TSAN inline Index CurrentThread() { return {TheMachine().current->index}; }
HVD8BIT_NO_TSAN inline Index CurrentBlock() { return TheMachine().block; }
HVD8BIT_NO_TSAN inline Index CurrentGrid() { return TheMachine().grid; }

inline bool Skipped(int line) {
  static const std::string* skipped = [] {
    const char* variable = std::getenv("HVD8BIT_SKIP_BARRIER");
    return new std::string(variable == nullptr ? "" : variable);
  }();
  return !skipped->empty() && (*skipped == "all" || *skipped == std::to_string(line));
}

HVD8BIT_NO_TSAN inline bool Vote(Machine& m, bool vote) { return m.votes |= vote; }
HVD8BIT_NO_TSAN inline bool Verdict(Machine& m) { return m.verdict; }

HVD8BIT_NO_TSAN inline void WaitAtBarrier(Machine& m, int line) {
  m.current->barrier = line;
  Yield(m, kAtBarrier);
}

inline bool Barrier(int line, bool vote) {
  if (Skipped(line)) {
    return vote;
  }
  Machine& m = TheMachine();
  Vote(m, vote);
  Release(m.at_barrier);
  WaitAtBarrier(m, line);
  Acquire(m.at_barrier);
  return Verdict(m);
}

HVD8BIT_NO_TSAN inline uint32_t ShuffleXor(uint32_t mask, uint32_t value, int distance) {
  if (mask != 0xffffffffu) {
    Fail("only shuffles of whole warps");
  }
  Machine& m = TheMachine();
  // Two places in turn: no lane is more than one shuffle ahead of another.
  uint32_t* places = m.shuffled[m.current->shuffles++ % 2];
  const unsigned index = m.current->index;
  places[index] = value;
  Yield(m, kInShuffle);
  return places[index ^ static_cast<unsigned>(distance)];
}

}  // namespace cuda_emulation

// -------------------------------------------------------------------------------------------------- the
// language

#define __global__ static
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)
#define threadIdx ::cuda_emulation::CurrentThread()
#define blockIdx ::cuda_emulation::CurrentBlock()
#define gridDim ::cuda_emulation::CurrentGrid()
#define __syncthreads() ::cuda_emulation::Barrier(__LINE__, false)
#define __syncthreads_or(vote) ::cuda_emulation::Barrier(__LINE__, vote)
#define __shfl_xor_sync(mask, value, distance) ::cuda_emulation::ShuffleXor(mask, value, distance)
#define __threadfence_system()

#define HVD8BIT_LAUNCH(kernel, grid, stream, arguments) \
  ((void)(stream), ::cuda_emulation::Launch(grid, kThreads, [&] { kernel(arguments); }))
// Few, so that a thread block has several tiles even of small tensors.
#define HVD8BIT_MOST_THREAD_BLOCKS 3

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

inline uint32_t atomicMax(uint32_t* address, uint32_t value) {
  uint32_t old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value &&
         !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

// --------------------------------------------------------------------------------------------------- the
// runtime

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
using cudaStream_t = void*;
enum : unsigned { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };

namespace cuda_emulation {

constexpr size_t kHostBytes = size_t{1} << 40;  // more is refused, before a sanitizer sees it

inline cudaError_t& LastError() {
  thread_local cudaError_t last_error = cudaSuccess;
  return last_error;
}

}  // namespace cuda_emulation

inline cudaError_t cudaGetLastError() {
  const cudaError_t last_error = cuda_emulation::LastError();
  cuda_emulation::LastError() = cudaSuccess;
  return last_error;
}
inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = bytes <= cuda_emulation::kHostBytes ? std::malloc(bytes) : nullptr;
  return *memory != nullptr ? cudaSuccess : cuda_emulation::LastError() = cudaErrorMemoryAllocation;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }

#endif  // HVD8BIT_TESTS_CC_CUDA_EMULATION_CUDA_RUNTIME_H_

// Loops on the threads that PyTorch has: a second runtime of threads in the process would compete with it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

// libgomp's entry to a parallel region, from the library that PyTorch has loaded; null for one thread.
typedef void (*Parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
extern "C" Parallel subquad_parallel;

// Call f(i, worker) for all i in [0, n), in any order, with worker in [0, threads).
template <class F> static void parallel(int64_t n, int64_t threads, F&& f) {
  threads = std::min(threads, n);
  if (threads <= 1 || !subquad_parallel) {
    for (int64_t i = 0; i < n; i++) f(i, int64_t(0));
    return;
  }
  struct Job {
    F& f;
    int64_t n;
    std::atomic<int64_t> next{0}, workers{0};
  } job{f, n};
  subquad_parallel([](void* data) {
    Job& job = *static_cast<Job*>(data);
    int64_t worker = job.workers++;
    for (int64_t i; (i = job.next++) < job.n;) job.f(i, worker);
  }, &job, unsigned(threads), 0);
}

// What operators return. Unless it is DONE, the caller computes the result in another way, or raises.
enum Status { DONE = 0, OUT_OF_RANGE = 1, NO_MEMORY = 2 };

// Floats that the operators work in, aligned to the lines of a cache; null if there is no memory.
struct Memory {
  explicit Memory(int64_t count) : data((float*)std::aligned_alloc(64, size_t(count + 31) / 16 * 64)) {}
  Memory(const Memory&) = delete;
  ~Memory() { std::free(data); }
  float* data;
};

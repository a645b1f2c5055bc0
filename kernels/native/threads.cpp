// What does not depend on the instruction set.
#include "parallel.h"

extern "C" {
Parallel subquad_parallel = nullptr;

const char* subquad_sources() { return SUBQUAD_SOURCES; }                    // a digest, by setup.py

// The instruction sets that the library has code for and this processor has, the best one last.
const char* subquad_instruction_sets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return "";
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl");
  return wide ? "avx2 avx512" : "avx2";
#else
  return "plain";
#endif
}
}

/* AVX2, FMA and F16C: Haswell, Zen and later. */

#if defined(__x86_64__)
#include "native.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define INSTRUCTIONS avx2
#include "vector_avx2.h"
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

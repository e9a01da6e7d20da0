/* AVX2 with AVX-VNNI: Alder Lake and later. */

#if defined(__x86_64__)
#include "native.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2,avxvnni")
#endif
#define INSTRUCTIONS avxvnni
#define VECTOR_VNNI
#include "vector_avx2.h"
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

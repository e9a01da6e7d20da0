/* ARMv8.2 with the dot product: Cortex-A76, Neoverse, Apple M1 and later. */

#if defined(__aarch64__)
#include "native.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("arch=armv8.2-a+dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define INSTRUCTIONS neon
#include "vector_neon.h"
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

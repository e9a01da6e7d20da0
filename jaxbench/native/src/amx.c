/* AVX-512 with VNNI and BF16, and AMX's matrix unit: Sapphire Rapids and later. */

#if defined(__x86_64__)
#include "native.h"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8,fma,f16c,bmi2")
#endif
#define INSTRUCTIONS amx
#define VECTOR_BF16
#include "vector_avx512.h"
#include "unit_amx.h"
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif

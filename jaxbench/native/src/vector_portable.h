/* Sixteen lanes in plain C: what every vector_*.h offers, and what it means. Compilers turn the loops into vector code.
 *
 * vf: sixteen floats, vi: sixteen 32-bit integers. vf_sum and vf_largest add and compare in one fixed order (halves of
 * 8, 4, 2, 1), so that results do not depend on the instruction set where it has fused multiply-adds. */

typedef struct { float lane[16]; } vf;
typedef struct { int32_t lane[16]; } vi;

#define EACH for (int i = 0; i < 16; i++)
#define VF_OP(name, expression) INLINE vf name(vf a, vf b) { vf r; EACH r.lane[i] = (expression); return r; }

INLINE vf vf_set1(float x) { vf r; EACH r.lane[i] = x; return r; }
INLINE vf vf_load(const float *p) { vf r; memcpy(&r, p, sizeof r); return r; }
INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
VF_OP(vf_add, a.lane[i] + b.lane[i])
VF_OP(vf_sub, a.lane[i] - b.lane[i])
VF_OP(vf_mul, a.lane[i] * b.lane[i])
VF_OP(vf_div, a.lane[i] / b.lane[i])
VF_OP(vf_max, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]) /* b where either is NaN, as x86 */
VF_OP(vf_min, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i])
#if defined(__FP_FAST_FMAF) /* fused where the machine can */
INLINE vf vf_fma(vf a, vf b, vf c) { vf r; EACH r.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); return r; }
#else
INLINE vf vf_fma(vf a, vf b, vf c) { vf r; EACH r.lane[i] = a.lane[i] * b.lane[i] + c.lane[i]; return r; }
#endif
INLINE vf vf_abs(vf a) { EACH a.lane[i] = __builtin_fabsf(a.lane[i]); return a; }
INLINE vi vi_round(vf a) { /* to nearest, ties to even; INT32_MIN for what does not fit and for NaN, as x86 */
  vi r;
  EACH {
    float x = a.lane[i], magic = 12582912.0f; /* 1.5 * 2^23: the sum's last bit is a unit */
    if (x > -4194304.0f && x < 4194304.0f) {
      volatile float sum = x + magic; /* volatile: the compiler must not cancel it */
      r.lane[i] = (int32_t)(sum - magic);
    } else {
      r.lane[i] = x >= -2147483648.0f && x < 2147483648.0f ? (int32_t)__builtin_rintf(x) : INT32_MIN;
    }
  }
  return r;
}
INLINE vf vf_of(vi a) { vf r; EACH r.lane[i] = (float)a.lane[i]; return r; }
INLINE vf vf_pow2(vi n) { /* 2^n, n in [-126, 127] */
  vf r;
  EACH {
    uint32_t bits = (uint32_t)(n.lane[i] + 127) << 23;
    memcpy(&r.lane[i], &bits, 4);
  }
  return r;
}
INLINE float vf_sum(vf a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.lane[i] += a.lane[i + half];
  return a.lane[0];
}
INLINE float vf_largest(vf a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
  return a.lane[0];
}

INLINE vi vi_load(const void *p) { vi r; memcpy(&r, p, sizeof r); return r; }
INLINE void vi_store(void *p, vi x) { memcpy(p, &x, sizeof x); }
INLINE vi vi_set1(int32_t x) { vi r; EACH r.lane[i] = x; return r; }
INLINE vi vi_add(vi a, vi b) { EACH a.lane[i] += b.lane[i]; return a; }
INLINE vi vi_sub(vi a, vi b) { EACH a.lane[i] -= b.lane[i]; return a; }
INLINE vi vi_shift_left_8(vi a) { EACH a.lane[i] = (int32_t)((uint32_t)a.lane[i] << 8); return a; }
INLINE vi vi_shift_right_8(vi a) { EACH a.lane[i] >>= 8; return a; } /* arithmetic, as every compiler here does */
INLINE int32_t vi_sum(vi a) { int32_t sum = 0; EACH sum += a.lane[i]; return sum; }
INLINE vi vi_low_nibbles(vi a) { EACH a.lane[i] &= 0x0f0f0f0f; return a; } /* of each byte, as bytes */
INLINE vi vi_high_nibbles(vi a) { EACH a.lane[i] = (int32_t)(((uint32_t)a.lane[i] >> 4) & 0x0f0f0f0fu); return a; }
INLINE vi vi_dot(vi acc, vi unsigned_bytes, int32_t signed_bytes) { /* lane += sum over its four bytes of u * s */
  int8_t s[4];
  memcpy(s, &signed_bytes, 4);
  EACH {
    uint32_t u = (uint32_t)unsigned_bytes.lane[i];
    acc.lane[i] += (int32_t)(u & 255) * s[0] + (int32_t)(u >> 8 & 255) * s[1] + (int32_t)(u >> 16 & 255) * s[2] +
                   (int32_t)(u >> 24) * s[3];
  }
  return acc;
}

INLINE vf vf_low_bf16(vi pairs) { /* the bfloat16 in the low half of each lane */
  vf r;
  EACH {
    uint32_t bits = (uint32_t)pairs.lane[i] << 16;
    memcpy(&r.lane[i], &bits, 4);
  }
  return r;
}
INLINE vf vf_high_bf16(vi pairs) {
  vf r;
  EACH {
    uint32_t bits = (uint32_t)pairs.lane[i] & 0xffff0000u;
    memcpy(&r.lane[i], &bits, 4);
  }
  return r;
}
INLINE vf vf_load_f16(const uint16_t *p) { /* sixteen IEEE halves */
  vf r;
  EACH r.lane[i] = f16_value(p[i]);
  return r;
}
INLINE vf vf_load_bf16(const uint16_t *p) {
  vf r;
  EACH {
    uint32_t bits = (uint32_t)p[i] << 16;
    memcpy(&r.lane[i], &bits, 4);
  }
  return r;
}
INLINE vf vf_load_i8(const int8_t *p) { vf r; EACH r.lane[i] = p[i]; return r; }
INLINE void vi_store_i8(int8_t *p, vi a) { EACH p[i] = (int8_t)a.lane[i]; }

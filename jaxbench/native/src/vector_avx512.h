/* Sixteen lanes in one register: AVX-512 with VNNI. The names are those of every vector_*.h; vector_portable.h says what they mean. */

#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;

#define PRODUCT_ROWS 12 /* 24 sums, two of the other operand, one repeated pair: 27 of 32 registers */
#define ATTEND_VECTORS 4 /* six queries' sums of four vectors, the vectors, one query's element: 29 registers */

INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vi vi_round(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vf vf_of(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vf vf_pow2(vi n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }

INLINE float vf_sum(vf a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

INLINE float vf_largest(vf a) { return _mm512_reduce_max_ps(a); }

INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi vi_shift_left_8(vi a) { return _mm512_slli_epi32(a, 8); }
INLINE vi vi_shift_right_8(vi a) { return _mm512_srai_epi32(a, 8); }
INLINE int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }
INLINE vi vi_low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE vi vi_high_nibbles(vi a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
INLINE vi vi_dot(vi acc, vi unsigned_bytes, int32_t signed_bytes) {
  return _mm512_dpbusd_epi32(acc, unsigned_bytes, _mm512_set1_epi32(signed_bytes));
}

/* Sixteen pairs of two lines of 16 bits, `even` low: the first `count` places, the others zero; a line may be none. */
INLINE vi vi_pairs(const uint16_t *even, const uint16_t *odd, int64_t count) {
  const __mmask16 mask = count >= 16 ? 0xffff : (__mmask16)((1u << (count < 0 ? 0 : count)) - 1);
  vi low = even ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even)) : vi_set1(0);
  if (!odd) return low;
  return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd)), 16));
}

/* Lanes whose bit is set, `other` elsewhere. */
INLINE vf vf_where(uint16_t bits, vf x, vf other) { return _mm512_mask_blend_ps(bits, other, x); }

/* x[i] lane j becomes x[j] lane i. */
#define VECTOR_HAS_TRANSPOSE16
INLINE void vi_transpose16(vi *x) {
  vi a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) /* lane group g of b[i + k]: column 4 g + k of rows i to i + 3 */
    for (int k = 0; k < 2; k++) {
      b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + 2 + k]);
      b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + 2 + k]);
    }
  for (int k = 0; k < 4; k++) {
    vi low = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x88), high = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x88);
    x[k] = _mm512_shuffle_i32x4(low, high, 0x88), x[8 + k] = _mm512_shuffle_i32x4(low, high, 0xdd);
    low = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xdd), high = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xdd);
    x[4 + k] = _mm512_shuffle_i32x4(low, high, 0x88), x[12 + k] = _mm512_shuffle_i32x4(low, high, 0xdd);
  }
}

INLINE vf vf_low_bf16(vi pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE vf vf_high_bf16(vi pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000u)));
}
/* Whether one of 32 bfloat16 is infinite or NaN. */
INLINE int has_nonfinite_bf16(vi pairs) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs, exponent), exponent) != 0;
}
INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf vf_load_i8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE void vi_store_i8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
#ifdef VECTOR_BF16
#define VECTOR_HAS_DOT_BF16
#define VECTOR_HAS_TO_BF16
INLINE void store_bf16(uint16_t *to, vf low, vf high) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }
INLINE vf vf_dot_bf16(vf acc, vi pairs, int32_t pair) {
  return _mm512_dpbf16_ps(acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

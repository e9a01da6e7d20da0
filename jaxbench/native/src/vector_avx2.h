/* Sixteen lanes in two registers: AVX2, FMA and F16C; with VECTOR_VNNI the dot product of AVX-VNNI. */

#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;

#define VF(x, y) ((vf){(x), (y)})
#define VI(x, y) ((vi){(x), (y)})

INLINE vf vf_set1(float x) { return VF(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE vf vf_load(const float *p) { return VF(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE vf vf_add(vf x, vf y) { return VF(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE vf vf_sub(vf x, vf y) { return VF(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE vf vf_mul(vf x, vf y) { return VF(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE vf vf_div(vf x, vf y) { return VF(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE vf vf_fma(vf x, vf y, vf z) { return VF(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
INLINE vf vf_max(vf x, vf y) { return VF(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE vf vf_min(vf x, vf y) { return VF(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
INLINE vf vf_abs(vf x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return VF(_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}
INLINE vi vi_round(vf x) { return VI(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); }
INLINE vf vf_of(vi x) { return VF(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
INLINE __m256 pow2_half(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
INLINE vf vf_pow2(vi n) { return VF(pow2_half(n.a), pow2_half(n.b)); }

INLINE float vf_sum(vf x) {
  __m256 b = _mm256_add_ps(x.a, x.b);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

INLINE float vf_largest(vf x) {
  __m256 b = _mm256_max_ps(x.a, x.b);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

INLINE vi vi_load(const void *p) {
  return VI(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1));
}
INLINE void vi_store(void *p, vi x) {
  _mm256_storeu_si256((__m256i *)p, x.a);
  _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
INLINE vi vi_set1(int32_t x) { return VI(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE vi vi_add(vi x, vi y) { return VI(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
INLINE vi vi_sub(vi x, vi y) { return VI(_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)); }
INLINE vi vi_shift_left_8(vi x) { return VI(_mm256_slli_epi32(x.a, 8), _mm256_slli_epi32(x.b, 8)); }
INLINE vi vi_shift_right_8(vi x) { return VI(_mm256_srai_epi32(x.a, 8), _mm256_srai_epi32(x.b, 8)); }
INLINE int32_t vi_sum(vi x) {
  __m256i b = _mm256_add_epi32(x.a, x.b);
  __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
INLINE vi vi_low_nibbles(vi x) {
  __m256i mask = _mm256_set1_epi8(15);
  return VI(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
}
INLINE vi vi_high_nibbles(vi x) {
  __m256i mask = _mm256_set1_epi8(15);
  return VI(_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask));
}

INLINE __m256i dot_half(__m256i acc, __m256i bytes, __m256i signed_bytes) {
#ifdef VECTOR_VNNI
  return _mm256_dpbusd_avx_epi32(acc, bytes, signed_bytes);
#else /* in 16 bits: vpmaddubsw saturates at 255 * 127 * 2 */
  __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(bytes, 8);
  __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8), x_odd = _mm256_srai_epi16(signed_bytes, 8);
  return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
#endif
}

INLINE vi vi_dot(vi acc, vi unsigned_bytes, int32_t signed_bytes) {
  __m256i x = _mm256_set1_epi32(signed_bytes);
  return VI(dot_half(acc.a, unsigned_bytes.a, x), dot_half(acc.b, unsigned_bytes.b, x));
}

INLINE vf vf_low_bf16(vi x) {
  return VF(_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16)));
}
INLINE vf vf_high_bf16(vi x) {
  __m256i mask = _mm256_set1_epi32((int32_t)0xffff0000u);
  return VF(_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask)));
}
INLINE vf vf_load_f16(const uint16_t *p) {
  return VF(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1)));
}
INLINE __m256 bf16_half(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vf_load_bf16(const uint16_t *p) { return VF(bf16_half(p), bf16_half(p + 8)); }
INLINE __m256 i8_half(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE vf vf_load_i8(const int8_t *p) { return VF(i8_half(p), i8_half(p + 8)); }
INLINE void vi_store_i8(int8_t *p, vi x) {
  int32_t lanes[16];
  vi_store(lanes, x);
  for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}

/* Sixteen lanes in four registers: ARMv8.2 NEON with the dot product. vector_portable.h says what the names mean. */

#include <arm_neon.h>

typedef struct { float32x4_t q[4]; } vf;
typedef struct { int32x4_t q[4]; } vi;

#define QUADS for (int i = 0; i < 4; i++)
#define VF_EACH(expression) do { vf r; QUADS r.q[i] = (expression); return r; } while (0)
#define VI_EACH(expression) do { vi r; QUADS r.q[i] = (expression); return r; } while (0)

INLINE vf vf_set1(float x) { VF_EACH(vdupq_n_f32(x)); }
INLINE vf vf_load(const float *p) { VF_EACH(vld1q_f32(p + 4 * i)); }
INLINE void vf_store(float *p, vf x) { QUADS vst1q_f32(p + 4 * i, x.q[i]); }
INLINE vf vf_add(vf a, vf b) { VF_EACH(vaddq_f32(a.q[i], b.q[i])); }
INLINE vf vf_sub(vf a, vf b) { VF_EACH(vsubq_f32(a.q[i], b.q[i])); }
INLINE vf vf_mul(vf a, vf b) { VF_EACH(vmulq_f32(a.q[i], b.q[i])); }
INLINE vf vf_div(vf a, vf b) { VF_EACH(vdivq_f32(a.q[i], b.q[i])); }
INLINE vf vf_fma(vf a, vf b, vf c) { VF_EACH(vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
/* fmax and fmin of NEON give NaN or the other operand: compare and select gives b where either is NaN. */
INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE vf vf_max(vf a, vf b) { VF_EACH(larger(a.q[i], b.q[i])); }
INLINE vf vf_min(vf a, vf b) { VF_EACH(vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
INLINE vf vf_abs(vf a) { VF_EACH(vabsq_f32(a.q[i])); }
INLINE int32x4_t rounded(float32x4_t x) { /* fcvtns saturates, and makes 0 of NaN: INT32_MIN for both */
  return vbslq_s32(vcltq_f32(x, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
INLINE vi vi_round(vf a) { VI_EACH(rounded(a.q[i])); }
INLINE vf vf_of(vi a) { VF_EACH(vcvtq_f32_s32(a.q[i])); }
INLINE vf vf_pow2(vi n) { VF_EACH(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.q[i], vdupq_n_s32(127)), 23))); }

INLINE float vf_sum(vf a) {
  float32x4_t c = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  float32x2_t d = vadd_f32(vget_low_f32(c), vget_high_f32(c));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
INLINE float vf_largest(vf a) {
  float32x4_t c = larger(larger(a.q[0], a.q[2]), larger(a.q[1], a.q[3]));
  float32x2_t low = vget_low_f32(c), high = vget_high_f32(c), d = vbsl_f32(vcgt_f32(low, high), low, high);
  float first = vget_lane_f32(d, 0), second = vget_lane_f32(d, 1);
  return first > second ? first : second;
}

INLINE vi vi_load(const void *p) { VI_EACH(vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)p + 16 * i))); }
INLINE void vi_store(void *p, vi x) { QUADS vst1q_u8((uint8_t *)p + 16 * i, vreinterpretq_u8_s32(x.q[i])); }
INLINE vi vi_set1(int32_t x) { VI_EACH(vdupq_n_s32(x)); }
INLINE vi vi_add(vi a, vi b) { VI_EACH(vaddq_s32(a.q[i], b.q[i])); }
INLINE vi vi_sub(vi a, vi b) { VI_EACH(vsubq_s32(a.q[i], b.q[i])); }
INLINE vi vi_shift_left_8(vi a) { VI_EACH(vshlq_n_s32(a.q[i], 8)); }
INLINE vi vi_shift_right_8(vi a) { VI_EACH(vshrq_n_s32(a.q[i], 8)); }
INLINE int32_t vi_sum(vi a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.q[0], a.q[2]), vaddq_s32(a.q[1], a.q[3])));
}
INLINE int32x4_t as_words(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
INLINE uint8x16_t as_bytes(int32x4_t x) { return vreinterpretq_u8_s32(x); }
INLINE vi vi_low_nibbles(vi a) { VI_EACH(as_words(vandq_u8(as_bytes(a.q[i]), vdupq_n_u8(15)))); }
INLINE vi vi_high_nibbles(vi a) { VI_EACH(as_words(vshrq_n_u8(as_bytes(a.q[i]), 4))); }
/* sdot takes signed bytes only: u * s = (u - 128) * s + 2 * 64 * s. What is added is the same for all of a step's weights. */
INLINE vi vi_dot(vi acc, vi unsigned_bytes, int32_t signed_bytes) {
  int8x16_t s = vreinterpretq_s8_s32(vdupq_n_s32(signed_bytes)), half = vdupq_n_s8(64);
  int32x4_t added = vdotq_s32(vdotq_s32(vdupq_n_s32(0), half, s), half, s);
  VI_EACH(vdotq_s32(vaddq_s32(acc.q[i], added),
                    vreinterpretq_s8_u8(veorq_u8(as_bytes(unsigned_bytes.q[i]), vdupq_n_u8(128))), s));
}

INLINE vf vf_low_bf16(vi pairs) { VF_EACH(vreinterpretq_f32_s32(vshlq_n_s32(pairs.q[i], 16))); }
INLINE vf vf_high_bf16(vi pairs) {
  VF_EACH(vreinterpretq_f32_s32(vandq_s32(pairs.q[i], vdupq_n_s32((int32_t)0xffff0000u))));
}
INLINE vf vf_load_f16(const uint16_t *p) { VF_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
INLINE vf vf_load_bf16(const uint16_t *p) { VF_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
INLINE vf vf_load_i8(const int8_t *p) {
  int8x16_t bytes = vld1q_s8(p);
  int16x8_t pairs[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
  VF_EACH(vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(pairs[i / 2]) : vget_low_s16(pairs[i / 2]))));
}
INLINE void vi_store_i8(int8_t *p, vi a) {
  int16x8_t low = vcombine_s16(vmovn_s32(a.q[0]), vmovn_s32(a.q[1])), high = vcombine_s16(vmovn_s32(a.q[2]), vmovn_s32(a.q[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

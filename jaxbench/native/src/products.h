/* Products of rows by a packed matrix, one tile of 32 outputs at a time. Part of kernels.h: compiled once for each instruction set.
 *
 * The sum of one output is taken in one order whatever the number of rows and threads, so a row's result is the same
 * bits in any batch. Integer formats add exact integers over a group of 32 inputs, then groups from first to last;
 * FORMAT_F32 and FORMAT_BF16 add even and odd inputs apart. */

#ifndef PRODUCT_ROWS
#define PRODUCT_ROWS 4 /* rows of a product in bfloat16 whose sums stay in registers; the vectors' file may say more */
#endif

INLINE void ask_ahead(const uint8_t *p, int is_stream) {
  if (is_stream) __builtin_prefetch(p + AHEAD);
}

/* Activations of one group as integers; a group that is not finite becomes NaN, so that nothing is hidden. */
INLINE void quantize_group(const float *x, group *g, int planes) {
  vf low = vf_load(x), high = vf_load(x + 16);
  vf bad = vf_add(vf_sub(low, low), vf_sub(high, high)); /* 0, or NaN where a value is not finite */
  float largest = vf_largest(vf_max(vf_abs(low), vf_abs(high)));
  float top = planes == 1 ? 127.0f : 8355700.0f; /* 11 below three digits of 127: room for rounding */
  int is_finite = vf_sum(bad) == 0.0f;
  vf inverse = vf_set1(largest > 0.0f && is_finite ? top / largest : 0.0f);
  if (!(top / largest < 3e38f)) inverse = vf_set1(0.0f); /* nothing but values of 1e-38 */
  g->scale = is_finite ? largest / top : __builtin_nanf("");
  vi rest[2] = {vi_round(vf_mul(low, inverse)), vi_round(vf_mul(high, inverse))};
  if (!is_finite) rest[0] = rest[1] = vi_set1(0);
  int64_t total = 0;
  for (int plane = 0; plane < planes; plane++) {
    vi sums = vi_set1(0);
    for (int half = 0; half < 2; half++) {
      vi_store_i8(g->q[plane] + 16 * half, rest[half]);
      vi carried = vi_shift_right_8(vi_add(rest[half], vi_set1(128))); /* digits of [-128, 127] */
      sums = vi_add(sums, vi_sub(rest[half], vi_shift_left_8(carried)));
      rest[half] = carried;
    }
    g->plane_sum[plane] = vi_sum(sums);
    total += (int64_t)g->plane_sum[plane] * (1 << (8 * plane));
  }
  g->sum = (float)total * g->scale;
}

/* To nearest, ties to even; NaN stays NaN. */
INLINE uint16_t rounded_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return (uint16_t)(is_nan ? (bits >> 16) | 64u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* One group of activations as an operand holds it: integers, or bfloat16. */
INLINE void narrow_group(const float *x, void *to, int planes, int is_bf16) {
  if (!is_bf16) {
    quantize_group(x, to, planes);
    return;
  }
#ifdef VECTOR_HAS_TO_BF16
  store_bf16(to, vf_load(x), vf_load(x + 16));
#else
  for (int i = 0; i < GROUP; i++) ((uint16_t *)to)[i] = rounded_bf16(x[i]);
#endif
}

#ifndef VECTOR_HAS_DOT_BF16
INLINE vf vf_dot_bf16(vf acc, vi pairs, int32_t pair) { /* lane += sum over its two bfloat16 of w * x */
  uint32_t low = (uint32_t)pair << 16, high = (uint32_t)pair & 0xffff0000u;
  float x[2];
  memcpy(x, &low, 4);
  memcpy(x + 1, &high, 4);
  return vf_fma(vf_high_bf16(pairs), vf_set1(x[1]), vf_fma(vf_low_bf16(pairs), vf_set1(x[0]), acc));
}
#endif

/* Integer sums of the planes as one float. */
INLINE vf joined(const vi *acc, int planes) {
  vf low = vf_of(acc[0]);
  if (planes == 1) return low;
  return vf_fma(vf_of(acc[2]), vf_set1(65536.0f), vf_fma(vf_of(acc[1]), vf_set1(256.0f), low));
}

/* Bytes of one group of a tile, scales included. */
INLINE int64_t quantized_group_bytes(int format) {
  switch (format) {
    case FORMAT_INT8: return GROUP * TILE;
    case FORMAT_Q8_0: return GROUP * TILE + 2 * TILE;
    case FORMAT_Q4_0: return GROUP * TILE / 2 + 2 * TILE;
    default: return GROUP * TILE / 2 + 4 * TILE;
  }
}

INLINE void quantized_rows(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups, float *out,
                           const int format, const int planes, const int rows, const int is_stream) {
  const int is_byte = format == FORMAT_INT8 || format == FORMAT_Q8_0;
  const int offset = is_byte ? 128 : format == FORMAT_Q4_0 ? 8 : 0; /* of the stored unsigned values */
  vf sums[8][2], channel[2] = {vf_set1(0.0f), vf_set1(0.0f)};
  for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = vf_set1(0.0f);
  if (format == FORMAT_INT8) {
    channel[0] = vf_load((const float *)w);
    channel[1] = vf_load((const float *)w + 16);
    w += 4 * TILE;
  }
  for (int64_t g = 0; g < groups; g++, x += group_bytes(planes)) {
    const uint16_t *scales = (const uint16_t *)w;
    const int num_scales = format == FORMAT_INT8 ? 0 : format == FORMAT_Q4_1 ? 2 : 1;
    for (int i = 0; i < num_scales; i++) ask_ahead(w + 64 * i, is_stream);
    w += 64 * num_scales;
    vi acc[8][2][3];
    for (int r = 0; r < rows; r++)
      for (int p = 0; p < planes; p++) {
        const group *gx = (const group *)(x + r * row_bytes);
        acc[r][0][p] = acc[r][1][p] = vi_set1(-offset * gx->plane_sum[p]);
      }
    for (int step = 0; step < (is_byte ? 8 : 4); step++, w += 128) {
      ask_ahead(w, is_stream), ask_ahead(w + 64, is_stream);
      vi first = vi_load(w), second = vi_load(w + 64);
      vi low[2] = {is_byte ? first : vi_low_nibbles(first), is_byte ? second : vi_low_nibbles(second)};
      vi high[2] = {vi_high_nibbles(first), vi_high_nibbles(second)};
      for (int r = 0; r < rows; r++)
        for (int p = 0; p < planes; p++) {
          const group *gx = (const group *)(x + r * row_bytes);
          int32_t four[2];
          memcpy(four, gx->q[p] + (is_byte ? 4 : 8) * step, is_byte ? 4 : 8);
          for (int v = 0; v < 2; v++) {
            acc[r][v][p] = vi_dot(acc[r][v][p], low[v], four[0]);
            if (!is_byte) acc[r][v][p] = vi_dot(acc[r][v][p], high[v], four[1]);
          }
        }
    }
    for (int v = 0; v < 2; v++) {
      vf scale = num_scales ? vf_load_f16(scales + 16 * v) : vf_set1(1.0f);
      vf least = num_scales == 2 ? vf_load_f16(scales + TILE + 16 * v) : vf_set1(0.0f);
      for (int r = 0; r < rows; r++) {
        const group *gx = (const group *)(x + r * row_bytes);
        vf by = num_scales ? vf_mul(scale, vf_set1(gx->scale)) : vf_set1(gx->scale);
        sums[r][v] = vf_fma(joined(acc[r][v], planes), by, sums[r][v]);
        if (num_scales == 2) sums[r][v] = vf_fma(least, vf_set1(gx->sum), sums[r][v]);
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 2; v++)
      vf_store(out + r * TILE + 16 * v, format == FORMAT_INT8 ? vf_mul(sums[r][v], channel[v]) : sums[r][v]);
}

INLINE void float_rows(const uint8_t *w, const float *x, int64_t stride, int64_t inputs, float *out, const int format,
                       const int rows, const int is_stream) {
  vf even[8][2], odd[8][2];
  for (int r = 0; r < rows; r++) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = vf_set1(0.0f);
  for (int64_t k = 0; k < inputs; k += 2)
    for (int v = 0; v < 2; v++) {
      vf first, second;
      if (format == FORMAT_BF16) {
        ask_ahead(w, is_stream);
        vi pairs = vi_load(w);
        first = vf_low_bf16(pairs), second = vf_high_bf16(pairs);
        w += 64;
      } else {
        ask_ahead(w, is_stream), ask_ahead(w + 64, is_stream);
        first = vf_load((const float *)w), second = vf_load((const float *)w + 16);
        w += 128;
      }
      for (int r = 0; r < rows; r++) {
        even[r][v] = vf_fma(first, vf_set1(x[r * stride + k]), even[r][v]);
        odd[r][v] = vf_fma(second, vf_set1(x[r * stride + k + 1]), odd[r][v]);
      }
    }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 2; v++) vf_store(out + r * TILE + 16 * v, vf_add(even[r][v], odd[r][v]));
}

/* bfloat16 by bfloat16, pairs of inputs from first to last. */
INLINE void bf16_rows(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups, float *out, const int rows,
                      const int is_stream) {
  vf sums[PRODUCT_ROWS][2];
  for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = vf_set1(0.0f);
  for (int64_t k = 0; k < groups * GROUP / 2; k++, w += 128, x += 4) {
    ask_ahead(w, is_stream), ask_ahead(w + 64, is_stream);
    vi first = vi_load(w), second = vi_load(w + 64);
    for (int r = 0; r < rows; r++) {
      int32_t pair;
      memcpy(&pair, x + r * row_bytes, 4);
      sums[r][0] = vf_dot_bf16(sums[r][0], first, pair);
      sums[r][1] = vf_dot_bf16(sums[r][1], second, pair);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 2; v++) vf_store(out + r * TILE + 16 * v, sums[r][v]);
}

#define NOINLINE static __attribute__((noinline))

/* One function for each format, number of planes and of rows: constants, so that sums stay in registers. */
#define QUANTIZED(format, planes, rows, suffix)                                                                      \
  NOINLINE void NAME(quantized_##suffix)(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups,      \
                                         float *out, int is_stream) {                                                \
    if (is_stream) quantized_rows(w, x, row_bytes, groups, out, format, planes, rows, 1);                            \
    else quantized_rows(w, x, row_bytes, groups, out, format, planes, rows, 0);                                      \
  }
#define QUANTIZED_FORMAT(format, name)         \
  QUANTIZED(format, 1, 1, name##_1_1)          \
  QUANTIZED(format, 1, MANY_8BIT, name##_1_n)  \
  QUANTIZED(format, 3, 1, name##_3_1)          \
  QUANTIZED(format, 3, MANY_24BIT, name##_3_n)
#define MANY_8BIT 4
#define MANY_24BIT 2
#define MANY_FLOAT 4
QUANTIZED_FORMAT(FORMAT_INT8, int8)
QUANTIZED_FORMAT(FORMAT_Q8_0, q8_0)
QUANTIZED_FORMAT(FORMAT_Q4_0, q4_0)
QUANTIZED_FORMAT(FORMAT_Q4_1, q4_1)

#define FLOATS(format, rows, suffix)                                                                              \
  NOINLINE void NAME(floats_##suffix)(const uint8_t *w, const float *x, int64_t stride, int64_t inputs, float *out, \
                                      int is_stream) {                                                            \
    if (is_stream) float_rows(w, x, stride, inputs, out, format, rows, 1);                                        \
    else float_rows(w, x, stride, inputs, out, format, rows, 0);                                                  \
  }
FLOATS(FORMAT_F32, 1, f32_1)
FLOATS(FORMAT_F32, MANY_FLOAT, f32_n)
FLOATS(FORMAT_BF16, 1, bf16_1)
FLOATS(FORMAT_BF16, MANY_FLOAT, bf16_n)

#define FEW_BF16 4
#define BF16(rows, suffix)                                                                                          \
  NOINLINE void NAME(bf16_##suffix)(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups,          \
                                    float *out, int is_stream) {                                                    \
    if (is_stream) bf16_rows(w, x, row_bytes, groups, out, rows, 1);                                                \
    else bf16_rows(w, x, row_bytes, groups, out, rows, 0);                                                          \
  }
BF16(1, 1)
BF16(FEW_BF16, few)
BF16(PRODUCT_ROWS, n)

typedef void (*quantized_function)(const uint8_t *, const uint8_t *, int64_t, int64_t, float *, int);
typedef void (*float_function)(const uint8_t *, const float *, int64_t, int64_t, float *, int);

static quantized_function NAME(quantized_functions)[NUM_FORMATS][2][2] = {
    [FORMAT_INT8] = {{NAME(quantized_int8_1_1), NAME(quantized_int8_1_n)}, {NAME(quantized_int8_3_1), NAME(quantized_int8_3_n)}},
    [FORMAT_Q8_0] = {{NAME(quantized_q8_0_1_1), NAME(quantized_q8_0_1_n)}, {NAME(quantized_q8_0_3_1), NAME(quantized_q8_0_3_n)}},
    [FORMAT_Q4_0] = {{NAME(quantized_q4_0_1_1), NAME(quantized_q4_0_1_n)}, {NAME(quantized_q4_0_3_1), NAME(quantized_q4_0_3_n)}},
    [FORMAT_Q4_1] = {{NAME(quantized_q4_1_1_1), NAME(quantized_q4_1_1_n)}, {NAME(quantized_q4_1_3_1), NAME(quantized_q4_1_3_n)}},
};
static float_function NAME(float_functions)[NUM_FORMATS][2] = {
    [FORMAT_F32] = {NAME(floats_f32_1), NAME(floats_f32_n)},
    [FORMAT_BF16] = {NAME(floats_bf16_1), NAME(floats_bf16_n)},
};

#ifdef VECTOR_HAS_UNIT
#include "products_unit.h"
#endif

/* Rows `first` to `first + rows` by one tile: out [rows, 32]. */
static void product_tile(const matrix *m, const operand *x, int64_t tile, int64_t first, int64_t rows, float *out) {
  const uint8_t *w = m->data + tile * tile_bytes(m->format, m->inputs);
  const int is_quantized = m->format >= FORMAT_INT8, is_bf16 = m->format == FORMAT_BF16 && x->is_bf16;
  const int64_t row_bytes = x->num_groups * group_bytes(x->planes);
  const int many = is_bf16 ? PRODUCT_ROWS : !is_quantized ? MANY_FLOAT : x->planes == 1 ? MANY_8BIT : MANY_24BIT;
#ifdef VECTOR_HAS_UNIT
  if (unit_takes(m, x, rows)) {
    NAME(unit_tile)(m, w, x, first, rows, out);
    return;
  }
#endif
  for (int64_t r = 0; r < rows;) {
    int is_many = rows - r >= many, is_few = is_bf16 && !is_many && rows - r >= FEW_BF16, is_stream = r == 0;
    const uint8_t *groups = x->groups + (first + r) * row_bytes;
    if (is_bf16)
      (is_many ? NAME(bf16_n) : is_few ? NAME(bf16_few) : NAME(bf16_1))(w, groups, row_bytes, x->num_groups, out + r * TILE, is_stream);
    else if (is_quantized)
      NAME(quantized_functions)[m->format][x->planes == 3][is_many](w, groups, row_bytes, x->num_groups, out + r * TILE, is_stream);
    else
      NAME(float_functions)[m->format][is_many](w, x->values + (first + r) * x->stride, x->stride,
                                                x->num_groups * GROUP, out + r * TILE, is_stream);
    r += is_many ? many : is_few ? FEW_BF16 : 1;
  }
}

/* The same plus bias, as the caller wants a row's outputs: 32 floats, of which the last tile uses fewer. */
INLINE void add_bias(float *out, const float *bias, int64_t tile, int64_t outputs, int64_t rows) {
  if (!bias) return;
  int64_t width = outputs - tile * TILE < TILE ? outputs - tile * TILE : TILE;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i++) out[r * TILE + i] += bias[tile * TILE + i];
}

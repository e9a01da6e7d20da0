/* Products of rows by a packed tile with the matrix unit (unit_amx.h). Part of products.h.
 *
 * The unit reads packed weights and rows as they lie for vectors. bfloat16 goes through it whatever the number of rows: its
 * sums take another order than those of vectors. Integers are exact, so that both give the same bits. */

#define UNIT_LEAST_ROWS 16 /* of integers; fewer gain nothing */

INLINE int unit_takes(const matrix *m, const operand *x, int64_t rows) {
  if (!has_unit) return 0;
  return m->format == FORMAT_BF16 ? x->is_bf16 : m->format >= FORMAT_INT8 && rows >= UNIT_LEAST_ROWS;
}

typedef void (*unit_function)(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups, int64_t rows, float *out);

/* Up to 32 rows; the first ones of a call ask for weights in advance. */
static void NAME(unit_bf16_rows)(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups, int64_t rows, float *out) {
  unit_begin(NULL, rows, TILE);
  unit_bf16(w, x, row_bytes, groups, rows, 0);
  unit_end(out, rows, TILE, TILE);
}
static void NAME(unit_bf16_stream)(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups, int64_t rows, float *out) {
  unit_begin(NULL, rows, TILE);
  unit_bf16(w, x, row_bytes, groups, rows, 1);
  unit_end(out, rows, TILE, TILE);
}

/* Up to 32 rows of integers, a group of inputs at a time. With one plane the unit multiplies the next group while
 * vectors scale this one's sums; with three that is slower. */
INLINE void unit_quantized_rows(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups, int64_t rows, float *out,
                                const int format, const int planes) {
  const int is_byte = format == FORMAT_INT8 || format == FORMAT_Q8_0, num_scales = format == FORMAT_INT8 ? 0 : format == FORMAT_Q4_1 ? 2 : 1;
  const int offset = is_byte ? 128 : format == FORMAT_Q4_0 ? 8 : 0, ahead = planes == 1;
  int32_t sums[2][3][UNIT_ROWS * TILE] __attribute__((aligned(64)));
  uint8_t bytes[GROUP * TILE] __attribute__((aligned(64)));
  memset(out, 0, sizeof(float) * (size_t)(rows * TILE));
  for (int64_t g = -ahead; g < groups; g++) {
    const int64_t next = g + ahead;
    if (next < groups) {
      unit_weights(w + next * quantized_group_bytes(format) + 64 * num_scales, bytes, is_byte, offset);
      for (int p = 0; p < planes; p++) {
        unit_begin(NULL, rows, TILE);
        unit_bytes(bytes, ((const group *)(x + next * group_bytes(planes)))->q[p], row_bytes, rows);
        unit_end(sums[next % 2][p], rows, TILE, TILE);
      }
    }
    if (g < 0) continue;
    const uint16_t *scales = (const uint16_t *)(w + g * quantized_group_bytes(format));
    vf scale[2], minimum[2];
    for (int v = 0; v < 2; v++) {
      scale[v] = num_scales ? vf_load_f16(scales + 16 * v) : vf_set1(1.0f);
      minimum[v] = num_scales == 2 ? vf_load_f16(scales + TILE + 16 * v) : vf_set1(0.0f);
    }
    for (int64_t r = 0; r < rows; r++) {
      const group *gx = (const group *)(x + g * group_bytes(planes) + r * row_bytes);
      for (int v = 0; v < 2; v++) {
        vi acc[3];
        for (int p = 0; p < planes; p++) acc[p] = vi_load(sums[g % 2][p] + r * TILE + 16 * v);
        vf by = num_scales ? vf_mul(scale[v], vf_set1(gx->scale)) : vf_set1(gx->scale);
        vf sum = vf_fma(joined(acc, planes), by, vf_load(out + r * TILE + 16 * v));
        if (num_scales == 2) sum = vf_fma(minimum[v], vf_set1(gx->sum), sum);
        vf_store(out + r * TILE + 16 * v, sum);
      }
    }
  }
}

#define UNIT_QUANTIZED(format, planes, suffix)                                                                                  \
  NOINLINE void NAME(unit_##suffix)(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t groups, int64_t rows,      \
                                    float *out) {                                                                              \
    unit_quantized_rows(w, x, row_bytes, groups, rows, out, format, planes);                                                   \
  }
UNIT_QUANTIZED(FORMAT_INT8, 1, int8_1)
UNIT_QUANTIZED(FORMAT_INT8, 3, int8_3)
UNIT_QUANTIZED(FORMAT_Q8_0, 1, q8_0_1)
UNIT_QUANTIZED(FORMAT_Q8_0, 3, q8_0_3)
UNIT_QUANTIZED(FORMAT_Q4_0, 1, q4_0_1)
UNIT_QUANTIZED(FORMAT_Q4_0, 3, q4_0_3)
UNIT_QUANTIZED(FORMAT_Q4_1, 1, q4_1_1)
UNIT_QUANTIZED(FORMAT_Q4_1, 3, q4_1_3)

static unit_function NAME(unit_functions)[NUM_FORMATS][2] = { /* by planes: one, three */
    [FORMAT_INT8] = {NAME(unit_int8_1), NAME(unit_int8_3)},
    [FORMAT_Q8_0] = {NAME(unit_q8_0_1), NAME(unit_q8_0_3)},
    [FORMAT_Q4_0] = {NAME(unit_q4_0_1), NAME(unit_q4_0_3)},
    [FORMAT_Q4_1] = {NAME(unit_q4_1_1), NAME(unit_q4_1_3)},
};

/* Rows `first` to `first + rows` by a tile at `w`: out [rows, 32]. */
static void NAME(unit_tile)(const matrix *m, const uint8_t *w, const operand *x, int64_t first, int64_t rows, float *out) {
  const int is_bf16 = m->format == FORMAT_BF16, is_int8 = m->format == FORMAT_INT8;
  const int64_t row_bytes = x->num_groups * group_bytes(x->planes), channel_bytes = is_int8 ? 4 * TILE : 0;
  const uint8_t *lines = x->groups + first * row_bytes;
  unit_function run = is_bf16 ? NAME(unit_bf16_stream) : NAME(unit_functions)[m->format][x->planes == 3];
  int64_t configured = 0;
  for (int64_t done = 0; done < rows; done += UNIT_ROWS) {
    const int64_t some = min_of(rows - done, UNIT_ROWS);
    configure_unit(&configured, some, is_bf16 ? 64 : GROUP, is_bf16 ? 16 : GROUP / 4);
    run(w + channel_bytes, lines + done * row_bytes, row_bytes, x->num_groups, some, out + done * TILE);
    if (is_bf16) run = NAME(unit_bf16_rows);
  }
  _tile_release();
  if (!is_int8) return;
  for (int64_t r = 0; r < rows; r++)
    for (int v = 0; v < 2; v++) vf_store(out + r * TILE + 16 * v, vf_mul(vf_load(out + r * TILE + 16 * v), vf_load((const float *)w + 16 * v)));
}

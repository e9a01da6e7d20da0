/* A piece of a product of two bfloat16 matrices by the matrix unit (unit_amx.h). Part of product.h.
 *
 * The unit reads lines of pairs of the left operand, and of the right one tiles as vectors read them. What ends within a step
 * of 16 pairs is filled with zeros. */

#define STEP_PAIRS 16

/* Rows that lie side by side become lines of pairs, sixteen rows and pairs at once. */
static void transpose_rows(const uint16_t *from, int64_t stride, int64_t rows, int64_t inner, uint32_t *pairs) {
  for (int64_t p = 0; 2 * p < inner; p += STEP_PAIRS)
    for (int64_t first = 0; first < rows; first += 16) {
      vi x[16];
      for (int64_t i = 0; i < 16; i++) {
        const uint16_t *even = from + 2 * (p + i) * stride + first;
        const int64_t there = inner - 2 * (p + i);
        x[i] = there > 0 ? vi_pairs(even, there > 1 ? even + stride : NULL, rows - first) : vi_set1(0);
      }
      vi_transpose16(x);
      for (int64_t i = 0; i < 16; i++) vi_store(pairs + (first + i) * ROW_PAIRS + p, x[i]);
    }
}

/* Rows of the left operand as lines: where they begin, and how many bytes lie between them. A step reads 32 inner places: where
 * rows end with a step they are read as they lie. */
static const uint8_t *unit_lines(const narrow_matrix *m, int64_t first, int64_t inner, int64_t row, int64_t rows, uint32_t *pairs, int64_t *row_bytes) {
  *row_bytes = 4 * ROW_PAIRS;
  if (m->is_transposed) {
    transpose_rows(m->data + first * m->rows + row, m->rows, rows, inner, pairs);
    return (const uint8_t *)pairs;
  }
  const uint16_t *from = m->data + row * m->columns + first;
  if (inner % (2 * STEP_PAIRS) == 0) {
    *row_bytes = 2 * m->columns;
    return (const uint8_t *)from;
  }
  for (int64_t i = 0; i < rows; i++) {
    uint16_t *to = (uint16_t *)(pairs + i * ROW_PAIRS);
    memcpy(to, from + i * m->columns, 2 * (size_t)inner);
    memset(to + inner, 0, 2 * (size_t)(up_to(inner, 2 * STEP_PAIRS) - inner));
  }
  return (const uint8_t *)pairs;
}

static void NAME(unit_piece)(const product_state *s, int64_t row, int64_t rows, int64_t column, int64_t columns, char *scratch) {
  const int64_t tiles = (columns + TILE - 1) / TILE, panels = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
  uint32_t *b = (uint32_t *)scratch, *a = b + tiles * TILE * SPAN_PAIRS;
  float *kept = (float *)(a + PANELS * UNIT_ROWS * ROW_PAIRS), own[UNIT_ROWS * TILE];
  const uint8_t *lines = NULL;
  int64_t configured = 0, row_bytes = 0;
  for (int64_t first = 0; first < s->inner; first += 2 * SPAN_PAIRS) {
    const int64_t inner = min_of(s->inner - first, 2 * SPAN_PAIRS), pairs = (inner + 1) / 2, steps = (pairs + STEP_PAIRS - 1) / STEP_PAIRS;
    const int is_last = first + inner == s->inner;
    pack_columns(s->b, first, inner, column, columns, b);
    for (int64_t tile = 0; tile < tiles; tile++)
      memset(b + (tile * SPAN_PAIRS + pairs) * TILE, 0, 4 * TILE * (size_t)(steps * STEP_PAIRS - pairs));
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t done = panel * UNIT_ROWS, some = min_of(rows - done, UNIT_ROWS);
      if (panel % PANELS == 0) lines = unit_lines(s->a, first, inner, row + done, min_of(rows - done, PANELS * UNIT_ROWS), a, &row_bytes);
      else lines += UNIT_ROWS * row_bytes;
      configure_unit(&configured, some, 64, 16);
      for (int64_t tile = 0; tile < tiles; tile++) {
        float *sums = first == 0 && is_last ? own : kept + (panel * tiles + tile) * UNIT_ROWS * TILE;
        unit_begin(first ? sums : NULL, some, TILE);
        unit_bf16((const uint8_t *)(b + tile * TILE * SPAN_PAIRS), lines, row_bytes, steps, some, 0);
        unit_end(sums, some, TILE, TILE);
        if (is_last) emit(s, sums, row + done, column + tile * TILE, some, min_of(columns - tile * TILE, TILE));
      }
    }
  }
  _tile_release();
}

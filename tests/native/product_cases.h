/* Products of two bfloat16 matrices of any shape and order, held to double precision. Part of kernels_check.c. */

static narrow_matrix some_narrow(int64_t rows, int64_t columns) {
  uint16_t *data = fresh(rows * columns * 2);
  for (int64_t i = 0; i < rows * columns; i++) data[i] = bf16_of(number());
  return (narrow_matrix){data, rows, columns, chance(50)};
}

static double narrow_at(const narrow_matrix *m, int64_t row, int64_t column) {
  return bf16_value(m->data[m->is_transposed ? column * m->rows + row : row * m->columns + column]);
}

static void run_product(const narrow_matrix *a, const narrow_matrix *b, int is_f32, int64_t threads, void *out) {
  int64_t bytes = INSTRUCTION_SET.product_scratch(a, b, threads);
  team *t = team_begin(threads, bytes, own_pool_schedule, (void *)(intptr_t)threads);
  memset(team_scratch(t), 0xff, (size_t)bytes); /* NaN */
  INSTRUCTION_SET.product(a, b, out, is_f32, threads, t);
  team_end(t);
}

static void check_product(void) {
  int64_t rows = chance(60) ? between(1, 60) : between(1, 300), inner = chance(60) ? between(1, 100) : between(1, 1500);
  int64_t columns = chance(60) ? between(1, 100) : between(1, 700);
  narrow_matrix a = some_narrow(rows, inner), b = some_narrow(inner, columns);
  float *out = fresh(rows * columns * 4), *again = fresh(rows * columns * 4);
  uint16_t *narrow = fresh(rows * columns * 2);
  snprintf(description, sizeof description, "product %lld x %lld x %lld transposed %d %d", (long long)rows, (long long)inner,
           (long long)columns, a.is_transposed, b.is_transposed);
  run_product(&a, &b, 1, 1, out);
  for (int64_t i = 0; i < 40; i++) {
    int64_t row = below(rows), column = below(columns);
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < inner; k++) {
      double term = narrow_at(&a, row, k) * narrow_at(&b, k, column);
      sum += term, squares += term * term;
    }
    double error = fabs(out[row * columns + column] - sum) / sqrt(squares + 1e-30);
    if (!(error <= TOLERANCE)) return fail("a product is inexact", error);
  }
  for (int64_t threads = 2; threads <= 4; threads++) {
    run_product(&a, &b, 1, threads, again);
    if (memcmp(out, again, (size_t)(rows * columns) * 4)) return fail("a product depends on threads", (double)threads);
  }
  run_product(&a, &b, 0, 2, narrow);
  for (int64_t i = 0; i < rows * columns; i++) {
    uint32_t bits;
    memcpy(&bits, out + i, 4);
    uint16_t wanted = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    if (narrow[i] != wanted && fabsf(out[i]) > 1e-37f) return fail("a product is rounded otherwise", out[i]);
  }
  int64_t row = below(rows), column = below(columns), k = below(inner); /* one value is spoilt: its row or column shows it */
  int is_left = chance(50);
  uint16_t *data = (uint16_t *)(is_left ? a.data : b.data);
  data[is_left ? (a.is_transposed ? k * rows + row : row * inner + k) : (b.is_transposed ? column * inner + k : k * columns + column)] = 0x7fc0;
  run_product(&a, &b, 1, 3, again);
  for (int64_t i = 0; i < rows * columns; i++)
    if (isnan(again[i]) != (is_left ? i / columns == row : i % columns == column)) return fail("a spoilt product", (double)i);
}

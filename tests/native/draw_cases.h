/* Draws held to a plain one in double precision: sort what is kept, add each token's noise. Part of kernels_check.c. */

static double noise_of(const uint32_t *key, uint32_t step, int32_t row_id, uint32_t site, int64_t token) {
  uint32_t c[4] = {(uint32_t)(token / 4), (uint32_t)row_id, step, site}, k[2] = {key[0], key[1]};
  for (int round = 0; round < 10; round++, k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u) {
    uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
    memcpy(c, next, sizeof c);
  }
  return -log(-log(((double)(c[token % 4] >> 8) + 0.5) * 0x1p-24));
}

static int descending(const void *a, const void *b) { return (*(double *)b > *(double *)a) - (*(double *)b < *(double *)a); }

/* Least logit that is kept; `slack` is how far the sum of masses lies from top_p at its closest. */
static double least_of(const float *x, int64_t size, sampling how, double *slack) {
  double *sorted = fresh(size * 8), total = 0, mass = 0;
  for (int64_t i = 0; i < size; i++) sorted[i] = (double)(x[i] / how.temperature);
  qsort(sorted, (size_t)size, sizeof(double), descending);
  int64_t kept = how.top_k > 0 && how.top_k < size ? how.top_k : size;
  while (kept < size && sorted[kept] == sorted[kept - 1]) kept++;
  for (int64_t i = 0; i < kept; i++) total += exp(sorted[i] - sorted[0]);
  double least = sorted[kept - 1];
  *slack = 1;
  if (how.top_p < 1)
    for (int64_t i = 0; i < kept; i++) {
      mass += exp(sorted[i] - sorted[0]) / total;
      *slack = fmin(*slack, fabs(mass - (double)how.top_p));
      if (mass >= (double)how.top_p) {
        least = sorted[i];
        break;
      }
    }
  return how.min_p > 0 ? fmax(least, sorted[0] + log((double)how.min_p)) : least;
}

static void run_draw(const float *x, int64_t rows, int64_t size, const uint32_t *key, uint32_t step, const int32_t *ids, sampling how,
                     int64_t threads, int32_t *out) {
  team *t = team_begin(threads, INSTRUCTION_SET.draw_scratch(threads, size), own_pool_schedule, (void *)(intptr_t)threads);
  memset(team_scratch(t), 0xff, (size_t)INSTRUCTION_SET.draw_scratch(threads, size));
  INSTRUCTION_SET.draw(x, rows, size, key, step, ids, how, out, t);
  team_end(t);
}

/* Rows that have nothing to draw: a NaN shows itself, what is infinite wins, and no index leaves the vocabulary. */
static void check_spoilt_draw(float *x, int64_t size, sampling how) {
  uint32_t key[2] = {1, 2};
  int32_t id = 0, found = -1;
  int64_t place = below(size);
  float kinds[3] = {NAN, INFINITY, -INFINITY};
  int kind = (int)below(3);
  for (int64_t i = 0; i < size; i++) x[i] = kind == 2 ? -INFINITY : x[i];
  x[place] = kinds[kind];
  run_draw(x, 1, size, key, 0, &id, how, 1, &found);
  if (found != (kind == 2 ? 0 : place)) fail("draw of a spoilt row", found);
}

static void check_draw(void) {
  int64_t rows = between(1, 6), size = chance(20) ? between(1, 20) : between(20, 1500);
  float *x = numbers(rows * size, 0, chance(50) ? 1 : 6);
  int32_t *ids = fresh(rows * 4), *found = fresh(rows * 4), *alone = fresh(rows * 4);
  uint32_t key[2] = {(uint32_t)below(1 << 30) * 3u, (uint32_t)below(1 << 30)}, step = (uint32_t)below(1000);
  sampling how = {chance(30) ? 0.3f : 1.0f, chance(50) ? 1.0f : 0.05f + 0.9f * (float)below(1000) / 1000, chance(70) ? 0 : 0.1f,
                  chance(50) ? 0 : between(1, size), 77};
  snprintf(description, sizeof description, "draw rows %lld size %lld temperature %g top_k %lld top_p %g min_p %g", (long long)rows,
           (long long)size, how.temperature, (long long)how.top_k, how.top_p, how.min_p);
  for (int64_t r = 0; r < rows; r++) ids[r] = (int32_t)below(1000);
  if (chance(30))
    for (int64_t i = 0; i < rows * size; i++) x[i] = floorf(x[i]); /* many equal ones */
  run_draw(x, rows, size, key, step, ids, how, 3, found);
  for (int64_t r = 0; r < rows; r++) {
    double slack, least = least_of(x + r * size, size, how, &slack), best = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
      double value = (double)(x[r * size + i] / how.temperature);
      if (value >= least) best = fmax(best, value + noise_of(key, step, ids[r], how.site, i));
    }
    double value = (double)(x[r * size + found[r]] / how.temperature), sum = value + noise_of(key, step, ids[r], how.site, found[r]);
    if (slack > 1e-5 && (value < least - 1e-5 || fabs(sum - best) > 1e-4)) fail("draw", sum - best);
    run_draw(x + r * size, 1, size, key, step, ids + r, how, 1, alone + r);
    if (alone[r] != found[r]) fail("draw depends on the batch", alone[r]);
  }
  check_spoilt_draw(x, size, how);
}

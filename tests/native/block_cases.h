/* What is asked of a decode block. Part of kernels_check.c. */

static int64_t slot_bytes(const block_call *c) { return width_of(c) * (c->cache.kind == CACHE_F32 ? 4 : c->cache.kind == CACHE_BF16 ? 2 : 1); }

/* The same call with an output and a cache of its own. */
static block_call own_copy(const block_call *c) {
  block_call copy = *c;
  int64_t slots = c->cache.num_pages * c->num_kv_heads * c->cache.page_size;
  copy.out = fresh(c->rows * c->d_model * 4);
  copy.cache.keys = copied(c->cache.keys, slots * slot_bytes(c));
  copy.cache.values = copied(c->cache.values, slots * slot_bytes(c));
  copy.cache.key_scales = copied(c->cache.key_scales, slots * 4);
  copy.cache.value_scales = copied(c->cache.value_scales, slots * 4);
  return copy;
}

static void copy_slot(const block_call *from, block_call *to, int64_t slot) {
  int64_t bytes = slot_bytes(from), width = width_of(from), each = bytes / width;
  for (int64_t i = 0; i < width; i++) {
    int64_t at = place_at(&from->cache, 1, slot, width, i) * each;
    memcpy((char *)to->cache.keys + at, (char *)from->cache.keys + at, (size_t)each);
  }
  memcpy((char *)to->cache.values + slot * bytes, (char *)from->cache.values + slot * bytes, (size_t)bytes);
  if (from->cache.kind != CACHE_INT8) return;
  to->cache.key_scales[slot] = from->cache.key_scales[slot];
  to->cache.value_scales[slot] = from->cache.value_scales[slot];
}

static int same_caches(const block_call *a, const block_call *b) {
  int64_t slots = a->cache.num_pages * a->num_kv_heads * a->cache.page_size, bytes = slots * slot_bytes(a);
  if (memcmp(a->cache.keys, b->cache.keys, (size_t)bytes) || memcmp(a->cache.values, b->cache.values, (size_t)bytes)) return 0;
  if (a->cache.kind != CACHE_INT8) return 1;
  return !memcmp(a->cache.key_scales, b->cache.key_scales, (size_t)slots * 4) &&
         !memcmp(a->cache.value_scales, b->cache.value_scales, (size_t)slots * 4);
}

static double largest_of(const double *x, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(x[i]));
  return largest;
}

/* What a row wrote, against its keys or values [kv_heads, head_dim] in double precision. */
static void check_slots(const block_call *c, int64_t row, const double *exact, int is_key) {
  int64_t h = c->head_dim;
  double all = fmax(0.5, largest_of(exact, c->num_kv_heads * h)), exactness = (c->planes == 3 ? TOLERANCE : TOLERANCE_8BIT) * all;
  for (int64_t head = 0; head < c->num_kv_heads; head++) {
    double largest = largest_of(exact + head * h, h), step = c->cache.kind == CACHE_INT8 ? largest / 253 : 0;
    for (int64_t i = 0; i < width_of(c); i++) {
      double value = cached_at(&c->cache, is_key, slot_at(c, row, head, c->positions[row]), width_of(c), i);
      double wanted = i < h ? exact[head * h + i] : 0, rounding = c->cache.kind == CACHE_BF16 ? fabs(wanted) / 256 : step;
      if (!(fabs(value - wanted) <= exactness + rounding)) return fail("a slot of the cache", value - wanted);
    }
  }
}

/* The largest difference of a row from its block in double precision, over the largest of that. */
static double error_of(const float *found, const double *exact, int64_t size) {
  double error = 0, largest = largest_of(exact, size);
  for (int64_t i = 0; i < size; i++) {
    double one = fabs(found[i] - exact[i]) / largest;
    error = one > error || isnan(one) ? one : error;
  }
  return error;
}

/* The error of the same row where each step of the reference is rounded to float32. */
static double error_in_float32(const problem *p, int64_t row, const double *exact) {
  int64_t d = p->call.d_model, kv = p->call.num_kv_heads * p->call.head_dim;
  double *out = fresh(d * 8), *keys = fresh(kv * 8), *values = fresh(kv * 8);
  float *narrow = fresh(d * 4);
  in_float32 = 1;
  block_row(p, row, out, keys, values);
  in_float32 = 0;
  for (int64_t i = 0; i < d; i++) narrow[i] = (float)out[i];
  return error_of(narrow, exact, d);
}

static void check_row(problem *p, const block_call *ran, int64_t row) {
  const block_call *c = ran;
  double *exact = fresh(c->d_model * 8), *keys = fresh(c->num_kv_heads * c->head_dim * 8), *values = fresh(c->num_kv_heads * c->head_dim * 8);
  double error, tolerance = c->planes == 3 ? TOLERANCE : TOLERANCE_8BIT;
  problem as_left = *p;
  as_left.call = *ran;
  if (c->positions[row] < 0) {
    if (memcmp(c->out + row * c->d_model, c->x + row * c->d_model, (size_t)c->d_model * 4)) fail("a row at -1 changed", (double)row);
    return;
  }
  block_row(&as_left, row, exact, keys, values);
  error = error_of(c->out + row * c->d_model, exact, c->d_model);
  if (!(error <= tolerance)) {
    double plain = error_in_float32(&as_left, row, exact);
    if (getenv("SHOW")) printf("case %lld row %lld: %.2e, plain float32 %.2e\n", (long long)current_case, (long long)row, error, plain);
    if (!(c->planes == 3 && error <= 1.5 * plain)) fail("a block is inexact", error);
  }
  if (c->planes == 3) worst_block = fmax(worst_block, error);
  check_slots(c, row, keys, 1);
  check_slots(c, row, values, 0);
}

/* Rows `which` of a call as a batch of their own. */
static block_call batch_of(const block_call *c, const int64_t *which, int64_t count) {
  block_call batch = own_copy(c);
  int64_t half = c->head_dim / 2, pages = c->cache.max_pages;
  float *x = fresh(count * c->d_model * 4), *cosine = fresh(count * half * 4), *sine = fresh(count * half * 4);
  int32_t *positions = fresh(count * 4), *table = fresh(count * pages * 4);
  for (int64_t i = 0; i < count; i++) {
    memcpy(x + i * c->d_model, c->x + which[i] * c->d_model, (size_t)c->d_model * 4);
    memcpy(table + i * pages, c->cache.table + which[i] * pages, (size_t)pages * 4);
    positions[i] = c->positions[which[i]];
    if (!c->cosine) continue;
    memcpy(cosine + i * half, c->cosine + which[i] * half, (size_t)half * 4);
    memcpy(sine + i * half, c->sine + which[i] * half, (size_t)half * 4);
  }
  batch.rows = count, batch.x = x, batch.positions = positions, batch.cache.table = table;
  if (c->cosine) batch.cosine = cosine, batch.sine = sine;
  return batch;
}

static void check_batch(const block_call *c, const block_call *ran, const int64_t *which, int64_t count) {
  block_call batch = batch_of(c, which, count);
  run_block(&batch, between(1, 3));
  for (int64_t i = 0; i < count; i++) {
    if (memcmp(batch.out + i * c->d_model, ran->out + which[i] * c->d_model, (size_t)c->d_model * 4))
      return fail("a block's row depends on its batch", (double)count);
  }
  block_call wanted = own_copy(c); /* these rows' slots and nothing else */
  for (int64_t i = 0; i < count; i++)
    for (int64_t h = 0; h < c->num_kv_heads && batch.positions[i] >= 0; h++) copy_slot(ran, &wanted, slot_at(&batch, i, h, batch.positions[i]));
  if (!same_caches(&batch, &wanted)) fail("the cache depends on the batch, or more than its slots was written", (double)count);
}

/* The first position of a row's own pages: rows that begin alike share the first. */
static int64_t first_own(const block_call *c, int64_t row) {
  for (int64_t r = 0; r < c->rows; r++)
    if (r != row && c->cache.table[r * c->cache.max_pages] == c->cache.table[row * c->cache.max_pages]) return c->cache.page_size;
  return 0;
}

/* A value that a row sees becomes NaN or infinite: where double precision has no finite result the kernel must have none, and
 * rows that do not see it, of a text those before it, are as they were. */
static void check_spoilt_block(problem *p, const block_call *ran, int64_t row) {
  block_call spoilt = own_copy(&p->call);
  int64_t position = spoilt.positions[row], width = width_of(&spoilt), d = spoilt.d_model;
  float bad = chance(50) ? NAN : chance(50) ? INFINITY : -INFINITY, *x = copied(spoilt.x, spoilt.rows * d * 4);
  if (position < 0) return;
  spoilt.x = x;
  int64_t first = spoilt.window && position >= spoilt.window ? position - spoilt.window + 1 : 0, own = p->is_prompt ? position : first_own(&spoilt, row);
  first = first > own ? first : own;
  if (first >= position || chance(30)) {
    x[row * d + below(d)] = bad;
  } else {
    int64_t slot = slot_at(&spoilt, row, below(spoilt.num_kv_heads), between(first, position - 1));
    int is_key = chance(50);
    int64_t at = place_at(&spoilt.cache, is_key, slot, width, below(spoilt.head_dim));
    void *array = is_key ? spoilt.cache.keys : spoilt.cache.values;
    if (spoilt.cache.kind == CACHE_F32) ((float *)array)[at] = bad;
    else if (spoilt.cache.kind == CACHE_BF16) ((uint16_t *)array)[at] = (uint16_t)(bf16_of(bad) | (isnan(bad) ? 64 : 0));
    else (is_key ? spoilt.cache.key_scales : spoilt.cache.value_scales)[slot] = NAN; /* as it is written */
  }
  run_block(&spoilt, 3);
  for (int64_t i = 0; i < spoilt.rows * d; i++)
    if (i / d != row && !(p->is_prompt && i / d > row) && memcmp(spoilt.out + i, ran->out + i, 4))
      return fail("a spoilt row changed another one", (double)i);
  double *exact = fresh(d * 8), *keys = fresh(spoilt.num_kv_heads * spoilt.head_dim * 16);
  problem as_left = *p;
  as_left.call = spoilt;
  block_row(&as_left, row, exact, keys, keys + spoilt.num_kv_heads * spoilt.head_dim);
  for (int64_t i = 0; i < d; i++)
    if (!isfinite(exact[i]) && isfinite(spoilt.out[row * d + i])) return fail("a spoilt row has a finite output", (double)i);
}

static void check_batches(const problem *p, const block_call *ran) {
  const block_call *c = &p->call;
  int64_t all = 0, *which = memset(fresh(c->rows * 8), 0, 8);
  for (int64_t row = 0; row < c->rows; row++) { /* the beginning of a text, or rows in another order */
    if (p->is_prompt ? row < 1 + c->rows / 3 : chance(70)) which[all++] = p->is_prompt ? row : c->rows - 1 - row;
  }
  check_batch(c, ran, which, all ? all : 1);
  which[0] = p->is_prompt ? 0 : below(c->rows);
  check_batch(c, ran, which, 1);
  block_call text = own_copy(c); /* a text token by token */
  for (int64_t row = 0; p->is_prompt && row < c->rows; row++) {
    block_call one = batch_of(&text, &row, 1);
    one.cache.keys = text.cache.keys, one.cache.values = text.cache.values;
    one.cache.key_scales = text.cache.key_scales, one.cache.value_scales = text.cache.value_scales;
    run_block(&one, 2);
    if (memcmp(one.out, ran->out + row * c->d_model, (size_t)c->d_model * 4)) return fail("a text's row depends on its part", (double)row);
  }
  if (p->is_prompt && !same_caches(&text, ran)) fail("a text's cache depends on its part", 0);
}

static void check_blocks(void) {
  problem p = make_problem();
  block_call *c = &p.call, ran = own_copy(c);
  if (check_block(c)) return fail(check_block(c), 0);
  run_block(&ran, 1);
  int is_narrow = c->planes == 1 && all_bf16(&p);
  add_to_hash(ran.out, c->rows * c->d_model * 4, is_narrow);
  if (is_narrow && c->cache.kind == CACHE_BF16) {
    narrow_blocks++;
    long_narrow_blocks += c->rows * c->num_kv_heads >= 512;
  }
  for (int64_t row = 0; row < c->rows; row++)
    if (c->rows < 10 || below(c->rows) < 6) check_row(&p, &ran, row);
  for (int64_t threads = 2; threads <= 5; threads++) {
    block_call again = own_copy(c);
    run_block(&again, threads);
    if (memcmp(again.out, ran.out, (size_t)(c->rows * c->d_model) * 4) || !same_caches(&again, &ran))
      fail("a block depends on threads", (double)threads);
  }
  check_batches(&p, &ran);
  block_call in_place = own_copy(c); /* what a decoder does: out is x */
  memcpy(in_place.out, c->x, (size_t)(c->rows * c->d_model) * 4);
  in_place.x = in_place.out;
  run_block(&in_place, 2);
  if (memcmp(in_place.out, ran.out, (size_t)(c->rows * c->d_model) * 4)) fail("a block in place differs", 0);
  check_spoilt_block(&p, &ran, below(c->rows));
}

/* Holds the kernels to double precision on random calls: kernels_check SEED CASES [only]. Exit status 1 where something is wrong.
 * With `only`, team_cases.h is left out: emulators cannot fork a process that has threads.
 *
 * Compiled with the sources of one instruction set; test_kernels.py and sanitize.sh say how. Its last line has a hash of all
 * results: instruction sets with fused multiply-adds must print the same. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "reference.h"

#define TOLERANCE 3e-6
#define TOLERANCE_8BIT 0.05 /* of a block: an activation between two integers may go either way */

static const char *formats[] = {"float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1"};
static int64_t failures, current_case;
static char description[400];
static double worst_linear, worst_block;
static uint64_t hash = 14695981039346656037u, narrow_hash = 14695981039346656037u; /* the other: of products of bfloat16, which round as they like */
static int64_t narrow_blocks, long_narrow_blocks; /* attention in bfloat16; with rows enough to share what is packed of a span */

static void fail(const char *what, double value) {
  if (failures++ < 20) printf("case %lld: %s (%g): %s\n", (long long)current_case, what, value, description);
}

static void add_to_hash(const void *bytes, int64_t count, int is_narrow) {
  uint64_t *to = is_narrow ? &narrow_hash : &hash;
  for (int64_t i = 0; i < count; i++) *to = (*to ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
}

static void run_linear(const matrix *w, const float *x, int64_t rows, const float *bias, int planes, int64_t threads, float *out) {
  int64_t bytes = INSTRUCTION_SET.linear_scratch(w, rows, planes);
  team *t = team_begin(threads, bytes, own_pool_schedule, (void *)(intptr_t)threads);
  if (bytes) memset(team_scratch(t), 0xff, (size_t)bytes); /* NaN: what is read before it is written shows */
  INSTRUCTION_SET.linear(w, x, rows, bias, planes, out, t);
  team_end(t);
}

static void run_block(const block_call *c, int64_t threads) {
  int64_t bytes = INSTRUCTION_SET.block_scratch(c);
  team *t = team_begin(threads, bytes, own_pool_schedule, (void *)(intptr_t)threads);
  if (bytes) memset(team_scratch(t), 0xff, (size_t)bytes); /* rows that are all padding need none */
  INSTRUCTION_SET.block(c, t);
  team_end(t);
}

static void check_embedding(const weights *w) {
  int32_t tokens[3] = {(int32_t)below(w->m.outputs), (int32_t)w->m.outputs, -1};
  float *rows = fresh(3 * w->m.inputs * 4);
  embed_rows(&w->m, tokens, 3, rows);
  for (int64_t i = 0; i < 3 * w->m.inputs; i++)
    if (rows[i] != (i < w->m.inputs ? (float)w->values[tokens[0] * w->m.inputs + i] : 0)) return fail("embedding", rows[i]);
}

/* One row is spoilt: it must show, and no other row may change. */
static void check_spoilt_linear(const weights *w, float *x, int64_t rows, const float *bias, int planes, const float *out) {
  int64_t outputs = w->m.outputs, row = below(rows);
  float *spoilt = fresh(rows * outputs * 4);
  x[row * w->m.inputs + below(w->m.inputs)] = chance(50) ? NAN : chance(50) ? INFINITY : -INFINITY;
  run_linear(&w->m, x, rows, bias, planes, 3, spoilt);
  for (int64_t i = 0; i < rows * outputs; i++)
    if (i / outputs != row && memcmp(spoilt + i, out + i, 4)) return fail("a spoilt row changed another one", (double)i);
  for (int64_t i = 0; i < outputs; i++)
    if (isfinite(spoilt[row * outputs + i])) return fail("a spoilt row has a finite output", (double)i);
}

static void check_linear(void) {
  int32_t format = (int32_t)below(NUM_FORMATS);
  int planes = chance(50) ? 3 : 1;
  int64_t inputs = chance(30) ? 32 * between(1, 20) : between(1, 500), outputs = between(1, 150), rows = chance(50) ? between(1, 9) : between(1, 140);
  weights w = make_weights(format, inputs, outputs);
  float *bias = chance(50) ? numbers(outputs, 0, 1) : NULL, *x = numbers(rows * inputs, 0, 1);
  float *out = fresh(rows * outputs * 4), *again = fresh(rows * outputs * 4);
  double *exact = fresh(inputs * 8), *y = fresh(outputs * 8), *room = fresh(outputs * 8);
  snprintf(description, sizeof description, "linear %s rows %lld inputs %lld outputs %lld planes %d bias %d", formats[format],
           (long long)rows, (long long)inputs, (long long)outputs, planes, bias != NULL);
  for (int64_t i = 0; i < rows * inputs; i++) /* groups of other sizes, and zeros */
    x[i] *= i / 32 % 7 == 3 ? 1e4f : i / 32 % 7 == 5 ? 1e-5f : i / 32 % 11 == 6 ? 0.0f : 1.0f;
  run_linear(&w.m, x, rows, bias, planes, 1, out);
  add_to_hash(out, rows * outputs * 4, planes == 1 && format == FORMAT_BF16);
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = 0; i < inputs; i++) exact[i] = x[r * inputs + i];
    if (planes == 1) narrowed(exact, inputs, format);
    multiply(&w, exact, bias, y, room);
    for (int64_t o = 0; o < outputs; o++) {
      double error = fabs(out[r * outputs + o] - y[o]) / (room[o] + 1e-30);
      if (!(error <= TOLERANCE)) return fail("linear is inexact", error);
      worst_linear = fmax(worst_linear, error);
    }
  }
  for (int64_t threads = 2; threads <= 5; threads++) {
    run_linear(&w.m, x, rows, bias, planes, threads, again);
    if (memcmp(out, again, (size_t)(rows * outputs) * 4)) fail("linear depends on threads", (double)threads);
  }
  for (int64_t first = 0, count; first < rows; first += count) { /* the same rows in other batches */
    count = first ? between(1, rows - first) : 1;
    run_linear(&w.m, x + first * inputs, count, bias, planes, 2, again);
    if (memcmp(out + first * outputs, again, (size_t)(count * outputs) * 4)) fail("linear depends on the batch", (double)count);
  }
  check_embedding(&w);
  check_spoilt_linear(&w, x, rows, bias, planes, out);
}

static void check_largest(void) {
  int64_t rows = between(1, 9), size = between(1, 1500);
  float *x = numbers(rows * size, 0, 8);
  int32_t *found = fresh(rows * 4);
  snprintf(description, sizeof description, "largest rows %lld size %lld", (long long)rows, (long long)size);
  for (int64_t i = 0; i < rows * size; i++) {
    x[i] = i / size % 4 == 3 ? -INFINITY : floorf(x[i]);
    if (below(3 * size) == 0) x[i] = chance(50) ? NAN : INFINITY;
  }
  team *t = team_begin(2, 0, own_pool_schedule, (void *)2);
  INSTRUCTION_SET.largest(x, rows, size, found, t);
  team_end(t);
  for (int64_t r = 0; r < rows; r++) {
    int64_t best = 0;
    for (int64_t i = 0; i < size && !isnan(x[r * size + best]); i++)
      if (x[r * size + i] > x[r * size + best] || isnan(x[r * size + i])) best = i;
    if (found[r] != best) fail("largest", found[r]);
  }
}

static int falling(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x < y) - (x > y);
}

static void check_external(void) {
  int64_t batch = between(1, 2), heads = between(1, 3), slots = between(1, 70), tokens = between(1, 90), width = between(1, 200);
  float *weights = numbers(batch * heads * slots * tokens, 0, 8), *states = numbers(batch * tokens * width, 0.3f, 1);
  float *hidden = numbers(batch * slots * width, 0.3f, 1), *found = fresh(batch * heads * slots * 4), *sorted = fresh(tokens * 4);
  int32_t *k = fresh(batch * 4);
  snprintf(description, sizeof description, "external batch %lld heads %lld slots %lld tokens %lld width %lld", (long long)batch,
           (long long)heads, (long long)slots, (long long)tokens, (long long)width);
  for (int64_t b = 0; b < batch; b++) k[b] = (int32_t)between(1, tokens);
  for (int64_t i = 0; i < batch * heads * slots * tokens; i++) /* ties, zeros */
    weights[i] = chance(30) ? 0 : chance(30) ? floorf(fabsf(weights[i])) : fabsf(weights[i]) * 1e-6f;
  external_call call = {weights, states, hidden, k, found, batch, heads, slots, tokens, width};
  team *t = team_begin(2, INSTRUCTION_SET.external_scratch(&call, 2), own_pool_schedule, (void *)2);
  INSTRUCTION_SET.external(&call, 2, t);
  team_end(t);
  for (int64_t r = 0; r < batch * heads * slots; r++) {
    int64_t b = r / (heads * slots), slot = r % slots;
    const float *row = weights + r * tokens, *own = hidden + (b * slots + slot) * width;
    memcpy(sorted, row, (size_t)tokens * 4);
    qsort(sorted, (size_t)tokens, 4, falling);
    double dot = 0, square = 0, length = 0;
    for (int64_t j = 0; j < width; j++) {
      double sum = 0;
      for (int64_t i = 0; i < tokens; i++)
        if (row[i] > 0 && row[i] >= sorted[k[b] - 1]) sum += states[(b * tokens + i) * width + j];
      dot += sum * own[j];
      square += sum * sum;
      length += (double)own[j] * own[j];
    }
    double wanted = square > 0 ? dot / sqrt(square * length) : 0;
    if (!(fabs(found[r] - wanted) <= 1e-5)) return fail("external", found[r] - wanted);
  }
}

static void check_norm(void) {
  int64_t rows = between(1, 9), size = between(8, 200);
  norm n = {numbers(size, 1, 0.2f), chance(50) ? numbers(size, 0, 0.2f) : NULL};
  float *x = numbers(rows * size, 0, 3), *out = fresh(rows * size * 4);
  double *exact = fresh(size * 8);
  snprintf(description, sizeof description, "norm rows %lld size %lld bias %d", (long long)rows, (long long)size, n.bias != NULL);
  team *t = team_begin(2, 0, own_pool_schedule, (void *)2);
  INSTRUCTION_SET.norm(x, rows, size, n, 1e-5f, out, t);
  team_end(t);
  add_to_hash(out, rows * size * 4, 0);
  for (int64_t i = 0; i < rows * size; i++) {
    if (i % size == 0) {
      for (int64_t j = 0; j < size; j++) exact[j] = x[i + j];
      normalised(exact, size, n, 1e-5f);
    }
    if (!(fabs(out[i] - exact[i % size]) <= TOLERANCE * 3)) return fail("norm", out[i] - exact[i % size]);
  }
}

/* Random blocks */

static norm some_norm(int64_t size, int is_there, int has_bias) {
  return (norm){is_there ? numbers(size, 1, 0.2f) : NULL, is_there && has_bias ? numbers(size, 0, 0.2f) : NULL};
}

static void fill_cache(block_call *c) {
  kv_cache *k = &c->cache;
  int64_t slots = k->num_pages * c->num_kv_heads * k->page_size, width = width_of(c), size = k->kind == CACHE_F32 ? 4 : k->kind == CACHE_BF16 ? 2 : 1;
  void **arrays[2] = {&k->keys, &k->values};
  float **scales[2] = {&k->key_scales, &k->value_scales};
  for (int a = 0; a < 2; a++) {
    *arrays[a] = memset(fresh(slots * width * size), 0, (size_t)(slots * width * size));
    *scales[a] = k->kind == CACHE_INT8 ? numbers(slots, 0.015f, 0.005f) : NULL;
    for (int64_t at = 0; at < slots * width; at++) {
      if (at % width >= c->head_dim) continue;
      int64_t i = place_at(k, a == 0, at / width, width, at % width);
      if (k->kind == CACHE_F32) ((float *)*arrays[a])[i] = number();
      else if (k->kind == CACHE_BF16) ((uint16_t *)*arrays[a])[i] = bf16_of(number());
      else ((int8_t *)*arrays[a])[i] = (int8_t)between(-127, 127);
    }
  }
}

/* NaN wherever no row may look: slots behind positions and before windows; tables end in nonsense. */
static void spoil_hidden_slots(block_call *c, int is_prompt) {
  kv_cache *k = &c->cache;
  int64_t last = c->positions[c->rows - 1];
  for (int64_t r = 0; r < (is_prompt ? 1 : c->rows); r++)
    for (int64_t p = 0; p < k->page_size * k->max_pages; p++) {
      int64_t at = c->positions[r];
      if (p < (is_prompt ? last + 1 : at) && (!c->window || p > at - c->window)) continue;
      for (int64_t h = 0; h < c->num_kv_heads; h++) {
        int64_t slot = slot_at(c, r, h, p), element = below(c->head_dim);
        int64_t key = place_at(k, 1, slot, width_of(c), element), value = place_at(k, 0, slot, width_of(c), element);
        if (k->kind == CACHE_F32) ((float *)k->keys)[key] = ((float *)k->values)[value] = NAN;
        else if (k->kind == CACHE_BF16) ((uint16_t *)k->keys)[key] = ((uint16_t *)k->values)[value] = 0x7fc0;
        else k->key_scales[slot] = k->value_scales[slot] = NAN;
      }
    }
  for (int64_t r = 0; r < c->rows; r++)
    for (int64_t page = c->positions[r] < 0 ? 0 : c->positions[r] / k->page_size + 1; page < k->max_pages; page++)
      ((int32_t *)k->table)[r * k->max_pages + page] = chance(50) ? -1 : INT32_MAX;
}

/* Rows of their own at any position, or neighbours of one text, which see what the call itself writes. */
static int make_pages(block_call *c, int is_prompt, int is_narrow) {
  kv_cache *k = &c->cache;
  static const int64_t sizes[3] = {64, 64, 128};
  k->page_size = sizes[below(3)];
  k->max_pages = c->rows > 150 ? between(2, 3) : between(1, c->rows > 20 ? 2 : 5);
  int64_t room = k->page_size * k->max_pages, start = below(room);
  is_prompt = is_prompt && c->rows <= room;
  k->num_pages = (is_prompt ? 1 : c->rows) * k->max_pages + below(3);
  k->kind = is_narrow ? CACHE_BF16 : (int32_t)below(3);
  int64_t lines = c->rows * k->max_pages;
  int32_t *pages = fresh((lines > k->num_pages ? lines : k->num_pages) * 4), *positions = fresh(c->rows * 4);
  for (int64_t i = 0; i < k->num_pages; i++) { /* a shuffle: no row's pages lie in order */
    int64_t other = below(i + 1);
    pages[i] = pages[other];
    pages[other] = (int32_t)i;
  }
  if (start > room - c->rows) start = room - c->rows;
  for (int64_t r = 0; r < c->rows; r++) {
    positions[r] = is_prompt ? (int32_t)(start + r) : chance(12) ? -1 : (int32_t)below(room);
    if (is_prompt) memcpy(pages + r * k->max_pages, pages, (size_t)k->max_pages * 4);
  }
  for (int64_t r = 1; r < c->rows && !is_prompt && !c->window; r++) /* rows that begin alike share a page that no row writes to */
    if (positions[r] >= k->page_size && positions[r - 1] >= k->page_size && chance(40)) pages[r * k->max_pages] = pages[(r - 1) * k->max_pages];
  k->table = copied(pages, c->rows * k->max_pages * 4);
  c->positions = positions;
  fill_cache(c);
  spoil_hidden_slots(c, is_prompt);
  return is_prompt;
}

static problem make_problem(void) {
  static const int64_t head_dims[] = {2, 8, 16, 20, 32, 48, 64, 80, 96, 128, 160, 256}, batches[] = {1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 130};
  static const int64_t narrow_batches[] = {1, 2, 8, 15, 16, 17, 33, 180};
  problem p = {0};
  block_call *c = &p.call;
  int is_narrow = chance(25); /* bfloat16 all through: attention too may be a matrix unit's */
  c->rows = is_narrow ? narrow_batches[below(8)] : chance(60) ? between(1, 9) : batches[below(12)];
  c->d_model = chance(30) ? 32 * between(1, 5) : between(8, 130);
  c->d_ff = chance(30) ? 32 * between(1, 6) : between(1, 170);
  c->head_dim = head_dims[below(c->rows > 20 ? 7 : c->rows > 9 ? 10 : 12)];
  c->num_kv_heads = c->rows > 150 ? 3 : between(1, 3);
  c->num_heads = c->num_kv_heads * between(1, c->rows > 20 ? 4 : c->rows > 9 ? 7 : is_narrow && c->head_dim < 48 ? 40 : 11);
  c->window = chance(40) ? between(1, 200) : 0;
  c->activation = (int32_t)below(3);
  c->planes = !is_narrow && chance(70) ? 3 : 1;
  c->norm_eps = chance(50) ? 1e-5f : 1e-6f;
  c->query_scale = (float)(between(8, 16) / 10.0 / sqrt((double)c->head_dim));
  c->softcap = chance(30) ? (float)between(2, 50) : 0.0f;
  c->x = numbers(c->rows * c->d_model, 0, 1);
  c->out = fresh(c->rows * c->d_model * 4);
  if (chance(70)) {
    float *angles[2] = {fresh(c->rows * c->head_dim * 2), fresh(c->rows * c->head_dim * 2)};
    for (int64_t i = 0; i < c->rows * (c->head_dim / 2); i++) { /* on the circle, in floats of every machine */
      float t = number(), size = 1 / (1 + t * t);
      angles[0][i] = (1 - t * t) * size, angles[1][i] = 2 * t * size;
    }
    c->cosine = angles[0], c->sine = angles[1];
  }
  int has_bias = chance(40), has_post = chance(40), has_head_norms = chance(40) && c->head_dim > 2; /* two numbers may be next to nothing */
  c->attention_norm = some_norm(c->d_model, 1, has_bias), c->mlp_norm = some_norm(c->d_model, 1, has_bias);
  c->attention_post_norm = some_norm(c->d_model, has_post, has_bias), c->mlp_post_norm = some_norm(c->d_model, has_post, has_bias);
  c->q_norm = some_norm(c->head_dim, has_head_norms, 0), c->k_norm = some_norm(c->head_dim, has_head_norms, 0);
  int64_t query = c->num_heads * c->head_dim, kv = c->num_kv_heads * c->head_dim, d = c->d_model, ff = c->d_ff;
  int64_t inputs[7] = {d, d, d, query, d, d, ff}, outputs[7] = {query, kv, kv, d, ff, ff, d};
  matrix *matrices = &c->q_proj;
  const float **biases = &c->q_bias;
  int32_t format = is_narrow ? FORMAT_BF16 : (int32_t)below(NUM_FORMATS);
  int percent_others = is_narrow ? 0 : 20;
  for (int i = 0; i < 7; i++) {
    p.w[i] = make_weights(chance(percent_others) ? (int32_t)below(NUM_FORMATS) : format, inputs[i], outputs[i]);
    if (i != 4 || c->activation != ACTIVATION_GELU) matrices[i] = p.w[i].m;
    if (has_bias || chance(10)) biases[i] = numbers(outputs[i], 0, 0.3f);
  }
  p.is_prompt = make_pages(c, chance(c->rows > 150 ? 80 : is_narrow ? 60 : 30), is_narrow);
  snprintf(description, sizeof description,
           "block %s rows %d d_model %d d_ff %d heads %d/%d of %d window %d activation %d planes %d softcap %g rotary %d "
           "bias %d post %d head norms %d cache %d pages %d x %d prompt %d",
           formats[format], (int)c->rows, (int)d, (int)ff, (int)c->num_heads, (int)c->num_kv_heads, (int)c->head_dim, (int)c->window,
           c->activation, c->planes, c->softcap, c->cosine != NULL, has_bias, has_post, has_head_norms, c->cache.kind,
           (int)c->cache.max_pages, (int)c->cache.page_size, p.is_prompt);
  return p;
}

#include "block_cases.h"
#include "draw_cases.h"
#include "product_cases.h"
#include "team_cases.h"

int main(int count, char **arguments) {
  int64_t seed = count > 1 ? atoll(arguments[1]) : 0, cases = count > 2 ? atoll(arguments[2]) : 20;
  for (current_case = 0; current_case < cases; current_case++, release()) {
    random_state = (uint64_t)(seed * 1000003 + current_case); /* a case is the same whatever came before it */
    check_linear();
    check_largest();
    check_external();
    check_norm();
    check_blocks();
    check_draw();
    check_product();
  }
  if (count < 4) check_teams();
  printf("%s: %lld cases from seed %lld, %lld wrong; worst errors: linear %.2e, block %.2e; "
         "blocks of bfloat16: %lld, with many rows: %lld, hash %016llx; hash %016llx\n", INSTRUCTION_SET.name, (long long)cases, (long long)seed,
         (long long)failures, worst_linear, worst_block, (long long)narrow_blocks, (long long)long_narrow_blocks, (unsigned long long)narrow_hash,
         (unsigned long long)hash);
  return failures > 0;
}

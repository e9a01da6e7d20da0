/* Random weights and calls, and the kernels' results in double precision written the plain way. Part of kernels_check.c. */

#include <math.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "native.h"

static uint64_t random_state;

static uint64_t random_bits(void) { /* splitmix64 */
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
static int64_t below(int64_t n) { return (int64_t)(random_bits() % (uint64_t)n); }
static int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
static int chance(int percent) { return below(100) < percent; }
static float number(void) { return (float)(between(-65536, 65536) + between(-65536, 65536)) / 65536.0f; } /* in [-2, 2] */

/* Memory until release(): each piece of its own, so that a sanitizer sees what lies outside it. Large ones end where nothing may be
 * read: a matrix unit's loads are assembly, which no sanitizer sees. */
#define PAGE ((size_t)sysconf(_SC_PAGESIZE))
static struct piece { struct piece *before; void *memory; size_t pages; } *pieces;
static void *guarded(size_t bytes, size_t pages) { /* bytes: a multiple of 16 */
  char *memory = mmap(NULL, (pages + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory + pages * PAGE, PAGE, PROT_NONE)) abort();
  return memory + pages * PAGE - bytes;
}
static void *fresh(int64_t bytes) {
  struct piece *piece = malloc(sizeof *piece);
  size_t size = ((size_t)bytes + 15) / 16 * 16, pages = bytes > 512 ? (size + PAGE - 1) / PAGE : 0;
  void *memory = pages ? guarded(size, pages) : malloc(bytes ? (size_t)bytes : 1);
  if (!piece || !memory) abort();
  *piece = (struct piece){pieces, memory, pages};
  pieces = piece;
  return memory;
}
static void release(void) {
  for (struct piece *piece = pieces, *before; piece; piece = before) {
    before = piece->before;
    if (piece->pages) munmap((void *)((uintptr_t)piece->memory / PAGE * PAGE), (piece->pages + 1) * PAGE);
    else free(piece->memory);
    free(piece);
  }
  pieces = NULL;
}
static float *numbers(int64_t count, float mean, float spread) {
  float *x = fresh(count * 4);
  for (int64_t i = 0; i < count; i++) x[i] = mean + spread * number();
  return x;
}
static void *copied(const void *from, int64_t bytes) { return from ? memcpy(fresh(bytes), from, (size_t)bytes) : NULL; }

/* IEEE halves, by their definition. */
static double half_value(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  return bits >> 15 ? -size : size;
}
static uint16_t some_half(double near) { /* within a factor of two of `near`, now and then subnormal */
  int exponent = chance(5) ? 0 : (int)floor(log2(near)) + 15;
  return (uint16_t)(below(2) << 15 | (exponent < 0 ? 0 : exponent) << 10 | below(1024));
}
static double bf16_value(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static uint16_t bf16_of(float value) { /* cut off */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)(bits >> 16);
}

typedef struct {
  matrix m;
  double *values; /* [outputs, inputs] */
} weights;

static void fill_block(int32_t format, uint8_t *block, double *values, int64_t count, double size) {
  double scale, least = 0.0;
  int bytes = format == FORMAT_Q8_0 ? 32 : 16, head = format == FORMAT_Q4_1 ? 4 : 2;
  uint16_t bits = some_half(size / (format == FORMAT_Q8_0 ? 74 : 5));
  memcpy(block, &bits, 2);
  scale = half_value(bits);
  if (format == FORMAT_Q4_1) {
    bits = some_half(fabs(scale) * 8 + 1e-6);
    memcpy(block + 2, &bits, 2);
    least = half_value(bits);
  }
  for (int i = 0; i < bytes; i++) block[head + i] = (uint8_t)random_bits();
  for (int64_t i = 0; i < count; i++) {
    int nibble = block[head + i % 16] >> (i < 16 ? 0 : 4) & 15;
    if (format == FORMAT_Q8_0) values[i] = scale * (int8_t)block[head + i];
    else values[i] = format == FORMAT_Q4_0 ? scale * (nibble - 8) : scale * nibble + least;
  }
}

static weights make_weights(int32_t format, int64_t inputs, int64_t outputs) {
  weights w = {{NULL, inputs, outputs, format}, fresh(inputs * outputs * 8)};
  int64_t blocks = num_groups(inputs), block = format == FORMAT_Q8_0 ? 34 : format == FORMAT_Q4_0 ? 18 : 20;
  double size = 1 / sqrt((double)inputs);
  float *scales = numbers(outputs, 0.0f, (float)size / 73);
  uint8_t *source = fresh(format >= FORMAT_Q8_0 ? outputs * blocks * block : inputs * outputs * 4);
  for (int64_t o = 0; o < outputs; o++) {
    double *row = w.values + o * inputs;
    if (format >= FORMAT_Q8_0)
      for (int64_t g = 0; g < blocks; g++)
        fill_block(format, source + (o * blocks + g) * block, row + g * 32, inputs - g * 32 < 32 ? inputs - g * 32 : 32, size);
    else
      for (int64_t i = 0, at = o * inputs; i < inputs; i++, at++) {
        float value = (float)size * number();
        if (format == FORMAT_F32) row[i] = ((float *)source)[at] = value;
        else if (format == FORMAT_BF16) row[i] = bf16_value(((uint16_t *)source)[at] = bf16_of(value));
        else row[i] = (double)(((int8_t *)source)[at] = (int8_t)between(-127, 127)) * scales[o];
      }
  }
  pack_matrix(&w.m, fresh(num_tiles(outputs) * tile_bytes(format, inputs)), source, scales);
  return w;
}

/* The reference rounds each step to float32 where this is set: what the same block costs there, sums in sixteen lanes. */
static int in_float32;
static double rounded(double x) { return in_float32 ? (double)(float)x : x; }
static double sum_of(const double *terms, int64_t count) {
  double lanes[16] = {0}, sum = 0;
  for (int64_t i = 0; i < count; i++) lanes[i % 16] = rounded(lanes[i % 16] + rounded(terms[i]));
  for (int i = 0; i < 16; i++) sum = rounded(sum + lanes[i]);
  return sum;
}

/* y [outputs] = W x + bias; where `room` is given, how large the terms are that an output is the sum of. */
static void multiply(const weights *w, const double *x, const float *bias, double *y, double *room) {
  double *terms = fresh(w->m.inputs * 8);
  for (int64_t o = 0; o < w->m.outputs; o++) {
    double squares = bias ? (double)bias[o] * bias[o] : 0;
    const double *row = w->values + o * w->m.inputs;
    for (int64_t first = 0; first < w->m.inputs; first += GROUP) {
      double largest = 0, of_weights = 0;
      for (int64_t i = first; i < w->m.inputs && i < first + GROUP; i++) {
        terms[i] = rounded(row[i]) * x[i];
        largest = fmax(largest, fabs(x[i]));
        of_weights += row[i] * row[i] + (w->m.format == FORMAT_Q4_1 ? 1.0 / (double)w->m.inputs : 0); /* a difference */
      }
      squares += largest * largest * of_weights;
    }
    y[o] = rounded(sum_of(terms, w->m.inputs) + (bias ? bias[o] : 0.0));
    if (room) room[o] = sqrt(squares);
  }
}

/* What one plane makes of a row, in the floats that the kernel rounds with: bfloat16 for such weights, else 8 bits. */
static void narrowed(double *x, int64_t size, int32_t format) {
  for (int64_t i = 0; format == FORMAT_BF16 && i < size; i++) {
    float value = (float)x[i];
    uint32_t bits;
    memcpy(&bits, &value, 4);
    x[i] = bf16_value((uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16));
  }
  for (int64_t first = 0; format >= FORMAT_INT8 && first < size; first += GROUP) {
    float largest = 0;
    int64_t end = first + GROUP < size ? first + GROUP : size;
    for (int64_t i = first; i < end; i++) largest = fmaxf(largest, fabsf((float)x[i]));
    float inverse = 127.0f / largest, scale = largest / 127.0f;
    for (int64_t i = first; i < end; i++) x[i] = largest > 1e-30f ? (double)rintf((float)x[i] * inverse) * scale : 0;
  }
}

static void normalised(double *x, int64_t size, norm n, double eps) {
  double mean = n.bias ? rounded(sum_of(x, size) / (double)size) : 0, *squares = fresh(size * 8);
  for (int64_t i = 0; i < size; i++) squares[i] = rounded(x[i] - mean) * rounded(x[i] - mean);
  double scale = rounded(1 / rounded(sqrt(rounded(sum_of(squares, size) / (double)size + eps))));
  for (int64_t i = 0; i < size; i++)
    x[i] = rounded(rounded(rounded(rounded(x[i] - mean) * scale) * n.scale[i]) + (n.bias ? n.bias[i] : 0));
}

typedef struct {
  block_call call;
  weights w[7];
  int is_prompt; /* rows are neighbours of one text: a row alone is no batch of its own */
} problem;

/* Whether the call's matrices are all bfloat16, so that with one plane its activations are too. */
static int all_bf16(const problem *p) {
  for (int i = 0; i < 7; i++)
    if (p->w[i].m.format != FORMAT_BF16 && (i != 4 || p->call.activation != ACTIVATION_GELU)) return 0;
  return 1;
}

/* A product within a block, with activations as its weights take them. */
static void project(const problem *p, int which, const double *x, const float *bias, double *y) {
  const weights *w = &p->w[which];
  double *narrow = copied(x, w->m.inputs * 8);
  if (p->call.planes == 1 && (all_bf16(p) || w->m.format >= FORMAT_INT8)) narrowed(narrow, w->m.inputs, w->m.format);
  multiply(w, narrow, bias, y, NULL);
}

static int64_t width_of(const block_call *c) { return (c->head_dim + 15) / 16 * 16; }
static int64_t slot_at(const block_call *c, int64_t row, int64_t head, int64_t position) {
  int64_t page = c->cache.table[row * c->cache.max_pages + position / c->cache.page_size];
  return (page * c->num_kv_heads + head) * c->cache.page_size + position % c->cache.page_size;
}
/* Where element i of a slot lies: a page's keys are [width, page_size], its values [page_size, width]. */
static int64_t place_at(const kv_cache *k, int is_key, int64_t slot, int64_t width, int64_t i) {
  int64_t page = slot / k->page_size * k->page_size * width, place = slot % k->page_size;
  return page + (is_key ? i * k->page_size + place : place * width + i);
}
static double cached_at(const kv_cache *k, int is_key, int64_t slot, int64_t width, int64_t i) {
  const void *array = is_key ? k->keys : k->values;
  int64_t at = place_at(k, is_key, slot, width, i);
  if (k->kind == CACHE_F32) return ((const float *)array)[at];
  if (k->kind == CACHE_BF16) return bf16_value(((const uint16_t *)array)[at]);
  return (double)((const int8_t *)array)[at] * (is_key ? k->key_scales : k->value_scales)[slot];
}

/* A head's query or key as attention sees it. */
static void prepared(const block_call *c, int64_t row, double *x, norm n) {
  int64_t half = c->head_dim / 2;
  if (n.scale) normalised(x, c->head_dim, n, c->norm_eps);
  for (int64_t i = 0; c->cosine && i < half; i++) {
    double first = x[i], second = x[i + half], cosine = c->cosine[row * half + i], sine = c->sine[row * half + i];
    x[i] = rounded(rounded(first * cosine) - rounded(second * sine));
    x[i + half] = rounded(rounded(second * cosine) + rounded(first * sine));
  }
}

/* Attention of one head over the cache as the call left it. */
static void attended(const block_call *c, int64_t row, int64_t head, const double *query, double *out) {
  int64_t position = c->positions[row], first = c->window && position >= c->window ? position - c->window + 1 : 0, seen = position + 1 - first;
  int64_t kv_head = head / (c->num_heads / c->num_kv_heads), width = width_of(c);
  double *scores = fresh(seen * 8), *terms = fresh((seen > c->head_dim ? seen : c->head_dim) * 8), largest = -INFINITY;
  for (int64_t p = 0; p < seen; p++) {
    for (int64_t i = 0; i < c->head_dim; i++)
      terms[i] = rounded(c->query_scale * query[i]) * cached_at(&c->cache, 1, slot_at(c, row, kv_head, first + p), width, i);
    scores[p] = sum_of(terms, c->head_dim);
    if (c->softcap > 0) scores[p] = rounded(c->softcap * rounded(tanh(rounded(scores[p] / c->softcap))));
    largest = scores[p] > largest || isnan(scores[p]) ? scores[p] : largest;
  }
  for (int64_t p = 0; p < seen; p++) scores[p] = rounded(exp(rounded(scores[p] - largest)));
  double total = sum_of(scores, seen);
  for (int64_t i = 0; i < c->head_dim; i++) {
    for (int64_t p = 0; p < seen; p++) terms[p] = scores[p] * cached_at(&c->cache, 0, slot_at(c, row, kv_head, first + p), width, i);
    out[i] = rounded(sum_of(terms, seen) / total);
  }
}

static void add_branch(double *residual, double *branch, int64_t size, norm n, double eps) {
  if (n.scale) normalised(branch, size, n, eps);
  for (int64_t i = 0; i < size; i++) residual[i] = rounded(residual[i] + branch[i]);
}

static void feed_forward(const problem *p, const double *normal, double *out) {
  const block_call *c = &p->call;
  double *up = fresh(c->d_ff * 8), *gate = fresh(c->d_ff * 8);
  project(p, 5, normal, c->up_bias, up);
  if (c->activation != ACTIVATION_GELU) project(p, 4, normal, c->gate_bias, gate);
  for (int64_t i = 0; i < c->d_ff; i++) {
    double x = c->activation == ACTIVATION_GELU ? up[i] : gate[i];
    double active = c->activation == ACTIVATION_SWIGLU ? x / rounded(1 + rounded(exp(-x)))
                                                       : x * 0.5 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    active = rounded(active);
    up[i] = c->activation == ACTIVATION_GELU ? active : rounded(active * up[i]);
  }
  project(p, 6, up, c->down_bias, out);
}

/* The block's output of one row, and the keys and values [kv_heads, head_dim] that it should have written. */
static void block_row(const problem *p, int64_t row, double *out, double *keys, double *values) {
  const block_call *c = &p->call;
  int64_t heads = c->num_heads, h = c->head_dim;
  double *normal = fresh(c->d_model * 8), *query = fresh(heads * h * 8), *mixed = fresh(heads * h * 8);
  for (int64_t i = 0; i < c->d_model; i++) out[i] = normal[i] = c->x[row * c->d_model + i];
  normalised(normal, c->d_model, c->attention_norm, c->norm_eps);
  project(p, 0, normal, c->q_bias, query);
  project(p, 1, normal, c->k_bias, keys);
  project(p, 2, normal, c->v_bias, values);
  for (int64_t i = 0; i < c->num_kv_heads; i++) prepared(c, row, keys + i * h, c->k_norm);
  for (int64_t i = 0; i < heads; i++) {
    prepared(c, row, query + i * h, c->q_norm);
    attended(c, row, i, query + i * h, mixed + i * h);
  }
  project(p, 3, mixed, c->o_bias, normal);
  add_branch(out, normal, c->d_model, c->attention_post_norm, c->norm_eps);
  memcpy(normal, out, (size_t)c->d_model * 8);
  normalised(normal, c->d_model, c->mlp_norm, c->norm_eps);
  double *branch = fresh(c->d_model * 8);
  feed_forward(p, normal, branch);
  add_branch(out, branch, c->d_model, c->mlp_post_norm, c->norm_eps);
}

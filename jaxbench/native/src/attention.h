/* Rotary positions, the cache's entry of a call, and attention of one query a row over a paged cache. Part of kernels.h.
 *
 * A row's token at position p lies in slot p % page_size of page table[row][p / page_size]. Attention goes over spans of
 * SPAN positions, counted from position 0 whatever the batch, and joins them from first to last: the same bits in any batch. */

#define SPAN 64 /* positions that one chunk attends to */
#define FEW_ROWS 16 /* of a call: attention is shared out by spans, not by rows, and reads memory */

INLINE int64_t head_width(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
INLINE int64_t num_spans(const block_call *c) { /* up to the last position of the call */
  int64_t longest = 0;
  for (int64_t r = 0; r < c->rows; r++) longest = c->positions[r] > longest ? c->positions[r] : longest;
  return longest / SPAN + 1;
}

static vf exponential(vf x) { /* e^x for x <= 88, e^-87 below -87; Cephes' polynomial */
  vf clipped = vf_min(vf_set1(88.0f), vf_max(vf_set1(-87.0f), x));
  vi n = vi_round(vf_mul(clipped, vf_set1(1.44269504088896341f)));
  vf m = vf_of(n), r = vf_fma(m, vf_set1(-0.693359375f), clipped);
  r = vf_fma(m, vf_set1(2.12194440e-4f), r);
  vf p = vf_set1(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
  p = vf_fma(p, vf_mul(r, r), vf_add(r, vf_set1(1.0f)));
  return vf_mul(p, vf_pow2(n));
}

INLINE vf sigmoid(vf x) {
  return vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), exponential(vf_sub(vf_set1(0.0f), x))));
}

/* A quotient of polynomials, as Eigen's: near 0 nothing is lost, which 2 sigmoid(2 x) - 1 does. */
static vf hyperbolic_tangent(vf x) {
  vf c = vf_min(vf_set1(7.90531110763549805f), vf_max(vf_set1(-7.90531110763549805f), x)), z = vf_mul(c, c);
  vf p = vf_set1(-2.76076847742355e-16f), q = vf_set1(1.19825839466702e-06f);
  p = vf_fma(p, z, vf_set1(2.00018790482477e-13f));
  p = vf_fma(p, z, vf_set1(-8.60467152213735e-11f));
  p = vf_fma(p, z, vf_set1(5.12229709037114e-08f));
  p = vf_fma(p, z, vf_set1(1.48572235717979e-05f));
  p = vf_fma(p, z, vf_set1(6.37261928875436e-04f));
  p = vf_fma(p, z, vf_set1(4.89352455891786e-03f));
  q = vf_fma(q, z, vf_set1(1.18534705686654e-04f));
  q = vf_fma(q, z, vf_set1(2.26843463243900e-03f));
  return vf_div(vf_mul(c, p), vf_fma(q, z, vf_set1(4.89352518554385e-03f)));
}

/* Divide by the root mean square, or standardise, and scale. x and out: `size` floats, which may be the same. */
static void normalise(const float *x, int64_t size, norm n, float eps, float *out) {
  vf total = vf_set1(0.0f);
  float mean = 0.0f, rest = 0.0f;
  int64_t whole = size / 16 * 16;
  if (n.bias) {
    for (int64_t i = 0; i < whole; i += 16) total = vf_add(total, vf_load(x + i));
    for (int64_t i = whole; i < size; i++) rest += x[i];
    mean = (vf_sum(total) + rest) / (float)size;
    total = vf_set1(0.0f);
    rest = 0.0f;
  }
  for (int64_t i = 0; i < whole; i += 16) {
    vf centred = vf_sub(vf_load(x + i), vf_set1(mean));
    total = vf_fma(centred, centred, total);
  }
  for (int64_t i = whole; i < size; i++) rest += (x[i] - mean) * (x[i] - mean);
  float inverse = 1.0f / __builtin_sqrtf((vf_sum(total) + rest) / (float)size + eps);
  for (int64_t i = 0; i < whole; i += 16) {
    vf scaled = vf_mul(vf_mul(vf_sub(vf_load(x + i), vf_set1(mean)), vf_set1(inverse)), vf_load(n.scale + i));
    vf_store(out + i, n.bias ? vf_add(scaled, vf_load(n.bias + i)) : scaled);
  }
  for (int64_t i = whole; i < size; i++) {
    float scaled = (x[i] - mean) * inverse * n.scale[i];
    out[i] = n.bias ? scaled + n.bias[i] : scaled;
  }
}

INLINE void rotate(float *x, const float *restrict cosine, const float *restrict sine, int64_t half) {
  float *restrict first = x, *restrict second = x + half;
  for (int64_t i = 0; i < half; i++) {
    float a = first[i], b = second[i];
    first[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

INLINE int64_t slot_of(const block_call *c, int64_t row, int64_t kv_head, int64_t position) {
  int64_t page = c->cache.table[row * c->cache.max_pages + position / c->cache.page_size];
  return (page * c->num_kv_heads + kv_head) * c->cache.page_size + position % c->cache.page_size;
}

/* Bytes of `count` values of a cache. */
INLINE int64_t cache_bytes(int32_t kind, int64_t count) {
  return count * (kind == CACHE_F32 ? 4 : kind == CACHE_BF16 ? 2 : 1);
}

/* Where element i of a slot's key is: keys lie with positions side by side, so that a vector is that element of sixteen keys. */
INLINE int64_t key_place(const block_call *c, int64_t slot, int64_t i) {
  int64_t size = c->cache.page_size;
  return (slot / size * head_width(c->head_dim) + i) * size + slot % size;
}

INLINE void scatter(char *to, int64_t stride, const char *from, int64_t count, const int bytes) {
  for (int64_t i = 0; i < count; i++) memcpy(to + i * stride * bytes, from + i * bytes, (size_t)bytes);
}

/* Writes a key or a value, and the scale of an 8-bit one. */
static void write_slot(const block_call *c, int64_t slot, const float *x, int is_key) {
  const kv_cache *k = &c->cache;
  int64_t width = head_width(c->head_dim);
  float padded[1024];
  uint16_t narrow[1024];
  int8_t bytes[1024];
  const void *from = padded;
  memset(padded + c->head_dim, 0, sizeof(float) * (size_t)(width - c->head_dim));
  memcpy(padded, x, sizeof(float) * (size_t)c->head_dim);
  if (k->kind == CACHE_BF16) {
    for (int64_t i = 0; i < width; i++) narrow[i] = rounded_bf16(padded[i]);
    from = narrow;
  } else if (k->kind == CACHE_INT8) {
    vf largest = vf_set1(0.0f), bad = vf_set1(0.0f);
    for (int64_t i = 0; i < width; i += 16) {
      vf value = vf_load(padded + i);
      largest = vf_max(largest, vf_abs(value));
      bad = vf_add(bad, vf_sub(value, value));
    }
    float top = vf_largest(largest);
    int is_fine = vf_sum(bad) == 0.0f && top > 1e-35f;
    (is_key ? k->key_scales : k->value_scales)[slot] = vf_sum(bad) == 0.0f ? top / 127.0f : __builtin_nanf("");
    for (int64_t i = 0; i < width; i += 16)
      vi_store_i8(bytes + i, vi_round(vf_mul(vf_load(padded + i), vf_set1(is_fine ? 127.0f / top : 0.0f))));
    from = bytes;
  }
  if (!is_key) {
    memcpy((char *)k->values + cache_bytes(k->kind, slot * width), from, (size_t)cache_bytes(k->kind, width));
    return;
  }
  char *to = (char *)k->keys + cache_bytes(k->kind, key_place(c, slot, 0));
  if (k->kind == CACHE_F32) scatter(to, k->page_size, from, width, 4);
  else if (k->kind == CACHE_BF16) scatter(to, k->page_size, from, width, 2);
  else scatter(to, k->page_size, from, width, 1);
}

INLINE vf load_cached(const void *values, int32_t kind, int64_t at) {
  if (kind == CACHE_F32) return vf_load((const float *)values + at);
  if (kind == CACHE_BF16) return vf_load_bf16((const uint16_t *)values + at);
  return vf_load_i8((const int8_t *)values + at);
}

#ifndef ATTEND_VECTORS
#define ATTEND_VECTORS 1 /* of keys or values at once: the sums of six queries stay in registers */
#endif
#define MOST_QUERIES 6 /* that one pass over a span's keys and values serves */

/* A query head, and what it makes of a span: largest score, sum of weights, weighted values. */
typedef struct {
  const float *query;
  float *largest, *total, *mixed;
} span_query;

#define SUMMED 32 /* elements of a head that one sum takes before it is added to the score: a sum of all of them is less exact */

/* Scores of `vectors` times sixteen positions from `first` on, for each query. */
INLINE void score_keys(const block_call *c, int64_t slot, int64_t first, const span_query *q, float scores[MOST_QUERIES][SPAN],
                       const int queries, const int vectors, const int32_t kind) {
  const int64_t stride = c->cache.page_size, bytes = cache_bytes(kind, 16 * vectors);
  int64_t at = key_place(c, slot + first, 0);
  for (int64_t start = 0; start < c->head_dim; start += SUMMED) {
    int64_t end = start + SUMMED < c->head_dim ? start + SUMMED : c->head_dim;
    vf sums[MOST_QUERIES][4];
    for (int i = 0; i < queries; i++)
      for (int v = 0; v < vectors; v++) sums[i][v] = vf_set1(0.0f);
    for (int64_t d = start; d < end; d++, at += stride) {
      vf keys[4];
      if (c->rows < FEW_ROWS) /* many rows find the span in a cache of the processor */
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)c->cache.keys + cache_bytes(kind, at) + AHEAD + line);
      for (int v = 0; v < vectors; v++) keys[v] = load_cached(c->cache.keys, kind, at + 16 * v);
      for (int i = 0; i < queries; i++) {
        vf one = vf_set1(q[i].query[d]);
        for (int v = 0; v < vectors; v++) sums[i][v] = vf_fma(keys[v], one, sums[i][v]);
      }
    }
    for (int i = 0; i < queries; i++)
      for (int v = 0; v < vectors; v++) {
        float *to = scores[i] + first + 16 * v;
        vf_store(to, start ? vf_add(vf_load(to), sums[i][v]) : sums[i][v]);
      }
  }
}

/* Sets what a vector of scores holds of positions outside [from, to): they were never written, or are not seen. */
INLINE void hide(float *scores, int64_t at, int64_t from, int64_t to, float value) {
  for (int64_t s = at; s < at + 16; s++)
    if (s < from || s >= to) scores[s] = value;
}

/* Weights of one query over positions [from, to) of a span from its scores: e^(score - largest), and their sum. */
INLINE float weigh(float *scores, int64_t from, int64_t to, float softcap, float *largest) {
  const int64_t start = from / 16 * 16, end = (to + 15) / 16 * 16;
  vf top = vf_set1(-__builtin_inff()), sum = vf_set1(0.0f);
  for (int64_t s = start; s < end; s += 16) {
    if (softcap > 0.0f) vf_store(scores + s, vf_mul(vf_set1(softcap), hyperbolic_tangent(vf_div(vf_load(scores + s), vf_set1(softcap)))));
    if (s < from || s + 16 > to) hide(scores, s, from, to, -__builtin_inff());
    top = vf_max(top, vf_load(scores + s));
  }
  *largest = vf_largest(top);
  for (int64_t s = start; s < end; s += 16) {
    vf_store(scores + s, exponential(vf_sub(vf_load(scores + s), vf_set1(*largest))));
    if (s < from || s + 16 > to) hide(scores, s, from, to, 0.0f);
    sum = vf_add(sum, vf_load(scores + s));
  }
  return vf_sum(sum);
}

/* Weighted values of positions [from, to) of a span, `vectors` vectors of a head from element `at` on. */
INLINE void add_values(const block_call *c, int64_t slot, int64_t from, int64_t to, const float scores[MOST_QUERIES][SPAN], int64_t at,
                       const span_query *q, const int queries, const int vectors, const int32_t kind) {
  const int64_t width = head_width(c->head_dim);
  vf sums[MOST_QUERIES][4];
  for (int i = 0; i < queries; i++)
    for (int v = 0; v < vectors; v++) sums[i][v] = vf_set1(0.0f);
  for (int64_t s = from; s < to; s++) {
    vf values[4];
    for (int v = 0; v < vectors; v++) values[v] = load_cached(c->cache.values, kind, (slot + s) * width + at + 16 * v);
    for (int i = 0; i < queries; i++) {
      vf one = vf_set1(scores[i][s]);
      for (int v = 0; v < vectors; v++) sums[i][v] = vf_fma(values[v], one, sums[i][v]);
    }
  }
  for (int i = 0; i < queries; i++)
    for (int v = 0; v < vectors; v++) vf_store(q[i].mixed + at + 16 * v, sums[i][v]);
}

/* Queries of one key-value head over positions [from, to) of the span that starts at `slot`. */
INLINE void attend_queries(const block_call *c, int64_t slot, int64_t from, int64_t to, const span_query *q, const int queries,
                           const int32_t kind) {
  const int64_t width = head_width(c->head_dim), end = (to + 15) / 16 * 16;
  float scores[MOST_QUERIES][SPAN];
  int64_t at = from / 16 * 16;
  if (c->rows < FEW_ROWS)
    for (int64_t line = 0; line < cache_bytes(kind, (to - from) * width); line += 64)
      __builtin_prefetch((const char *)c->cache.values + cache_bytes(kind, (slot + from) * width) + line);
  for (; at + 16 * ATTEND_VECTORS <= end; at += 16 * ATTEND_VECTORS) score_keys(c, slot, at, q, scores, queries, ATTEND_VECTORS, kind);
  for (; at < end; at += 16) score_keys(c, slot, at, q, scores, queries, 1, kind);
  for (int i = 0; i < queries; i++) {
    for (int64_t s = from / 16 * 16; kind == CACHE_INT8 && s < end; s += 16)
      vf_store(scores[i] + s, vf_mul(vf_load(scores[i] + s), vf_load(c->cache.key_scales + slot + s)));
    *q[i].total = weigh(scores[i], from, to, c->softcap, q[i].largest);
    for (int64_t s = from / 16 * 16; kind == CACHE_INT8 && s < end; s += 16)
      vf_store(scores[i] + s, vf_mul(vf_load(scores[i] + s), vf_load(c->cache.value_scales + slot + s)));
  }
  for (at = 0; at + 16 * ATTEND_VECTORS <= width; at += 16 * ATTEND_VECTORS)
    add_values(c, slot, from, to, scores, at, q, queries, ATTEND_VECTORS, kind);
  for (; at < width; at += 16) add_values(c, slot, from, to, scores, at, q, queries, 1, kind);
}

/* Adds a span to what was attended to before it: of each head largest score, sum of weights and weighted values; eight heads'
 * factors at once. */
INLINE void join_heads(float *largest, float *total, float *mixed, const float *span_largest, const float *span_total,
                       const float *span_mixed, int64_t heads, int64_t width) {
  float factors[16];
  for (int h = 0; h < 8; h++) {
    float before = h < heads ? largest[h] : 0.0f, here = h < heads ? span_largest[h] : 0.0f;
    float top = here > before || here != here ? here : before;
    factors[2 * h] = before == -__builtin_inff() ? -100.0f : before - top; /* nothing before: its values are zeros */
    factors[2 * h + 1] = here - top;
    if (h < heads) largest[h] = top;
  }
  vf_store(factors, exponential(vf_load(factors)));
  for (int64_t h = 0; h < heads; h++) {
    vf before = vf_set1(factors[2 * h]), here = vf_set1(factors[2 * h + 1]);
    total[h] = total[h] * factors[2 * h] + span_total[h] * factors[2 * h + 1];
    for (int64_t i = h * width; i < (h + 1) * width; i += 16)
      vf_store(mixed + i, vf_fma(vf_load(span_mixed + i), here, vf_mul(vf_load(mixed + i), before)));
  }
}

#define ATTEND(queries, kind, suffix)                                                                                       \
  static __attribute__((noinline)) void NAME(attend_##suffix)(const block_call *c, int64_t slot, int64_t from, int64_t to, \
                                                              const span_query *q) {                                       \
    attend_queries(c, slot, from, to, q, queries, kind);                                                                    \
  }
#define ATTEND_KIND(kind, name) \
  ATTEND(1, kind, name##_1) ATTEND(2, kind, name##_2) ATTEND(3, kind, name##_3) ATTEND(4, kind, name##_4) ATTEND(6, kind, name##_6)
ATTEND_KIND(CACHE_F32, f32)
ATTEND_KIND(CACHE_BF16, bf16)
ATTEND_KIND(CACHE_INT8, int8)

#define OF_KIND(name) {NULL, NAME(attend_##name##_1), NAME(attend_##name##_2), NAME(attend_##name##_3), NAME(attend_##name##_4), NULL, NAME(attend_##name##_6)}
typedef void (*attend_function)(const block_call *, int64_t, int64_t, int64_t, const span_query *);
static attend_function NAME(attend_functions)[3][MOST_QUERIES + 1] = {OF_KIND(f32), OF_KIND(bf16), OF_KIND(int8)}; /* by queries */

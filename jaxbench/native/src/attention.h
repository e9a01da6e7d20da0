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

static void write_slot(const block_call *c, void *values, float *scales, int64_t slot, const float *x) {
  int64_t width = head_width(c->head_dim);
  char *to = (char *)values + cache_bytes(c->cache.kind, slot * width);
  float padded[1024];
  memset(padded + c->head_dim, 0, sizeof(float) * (size_t)(width - c->head_dim));
  memcpy(padded, x, sizeof(float) * (size_t)c->head_dim);
  if (c->cache.kind == CACHE_F32) {
    memcpy(to, padded, sizeof(float) * (size_t)width);
  } else if (c->cache.kind == CACHE_BF16) {
    for (int64_t i = 0; i < width; i++) ((uint16_t *)to)[i] = rounded_bf16(padded[i]);
  } else {
    vf largest = vf_set1(0.0f), bad = vf_set1(0.0f);
    for (int64_t i = 0; i < width; i += 16) {
      vf value = vf_load(padded + i);
      largest = vf_max(largest, vf_abs(value));
      bad = vf_add(bad, vf_sub(value, value));
    }
    float top = vf_largest(largest);
    int is_fine = vf_sum(bad) == 0.0f && top > 1e-35f;
    scales[slot] = vf_sum(bad) == 0.0f ? top / 127.0f : __builtin_nanf("");
    for (int64_t i = 0; i < width; i += 16)
      vi_store_i8((int8_t *)to + i, vi_round(vf_mul(vf_load(padded + i), vf_set1(is_fine ? 127.0f / top : 0.0f))));
  }
}

INLINE vf load_cached(const void *values, int32_t kind, int64_t at) {
  if (kind == CACHE_F32) return vf_load((const float *)values + at);
  if (kind == CACHE_BF16) return vf_load_bf16((const uint16_t *)values + at);
  return vf_load_i8((const int8_t *)values + at);
}

#ifndef VECTOR_HAS_SUM16
INLINE vf vf_sum16(const vf *x) { /* lane i: vf_sum(x[i]) */
  float sums[16];
  for (int i = 0; i < 16; i++) sums[i] = vf_sum(x[i]);
  return vf_load(sums);
}
#endif

/* Weighted values of one span, `vectors` vectors of a head at a time. */
INLINE void add_values(const block_call *c, int64_t slot, int64_t count, float scores[4][SPAN], int64_t at, float *mixed,
                       const int heads, const int vectors, const int32_t kind) {
  const int64_t width = head_width(c->head_dim);
  vf sums[4][4];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) sums[h][v] = vf_set1(0.0f);
  for (int64_t s = 0; s < count; s++)
    for (int v = 0; v < vectors; v++) {
      vf value = load_cached(c->cache.values, kind, (slot + s) * width + at + 16 * v);
      for (int h = 0; h < heads; h++) sums[h][v] = vf_fma(vf_set1(scores[h][s]), value, sums[h][v]);
    }
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) vf_store(mixed + h * width + at + 16 * v, sums[h][v]);
}

/* Weights of one head over a span from its scores: e^(score - largest), and their sum. */
INLINE float weigh(float *scores, int64_t count, float softcap, float *largest) {
  vf top = vf_set1(-__builtin_inff());
  int64_t end = (count + 15) / 16 * 16;
  for (int64_t s = 0; s < end; s += 16) {
    if (softcap > 0.0f) vf_store(scores + s, vf_mul(vf_set1(softcap), hyperbolic_tangent(vf_div(vf_load(scores + s), vf_set1(softcap)))));
    for (int64_t j = s > count ? s : count; j < s + 16; j++) scores[j] = -__builtin_inff();
    top = vf_max(top, vf_load(scores + s));
  }
  *largest = vf_largest(top);
  float sum = 0.0f;
  for (int64_t s = 0; s < end; s += 16) {
    vf_store(scores + s, exponential(vf_sub(vf_load(scores + s), vf_set1(*largest))));
    for (int64_t j = s > count ? s : count; j < s + 16; j++) scores[j] = 0.0f;
    sum += vf_sum(vf_load(scores + s));
  }
  return sum;
}

/* Scores of sixteen positions for each head. vectors: of a head, a constant where queries fit the registers; 0: any. */
INLINE void score_sixteen(const block_call *c, int64_t slot, int64_t count, const float *query, float scores[4][SPAN],
                          int64_t first, const int heads, const int vectors, const int32_t kind) {
  const int64_t width = vectors ? 16 * vectors : head_width(c->head_dim);
  vf sums[4][16], kept[4][4];
  for (int h = 0; h < heads; h++)
    for (int v = 0; v < vectors; v++) kept[h][v] = vf_load(query + h * width + 16 * v);
  for (int s = 0; s < 16; s++) { /* behind the end the last one again: never read */
    int64_t at = (slot + (first + s < count ? first + s : count - 1)) * width;
    if (c->rows < FEW_ROWS) /* many rows find the span in a cache of the processor */
      for (int64_t line = 0; line < cache_bytes(kind, width); line += 64) {
        __builtin_prefetch((const char *)c->cache.keys + cache_bytes(kind, at) + AHEAD + line);
        __builtin_prefetch((const char *)c->cache.values + cache_bytes(kind, at) + line);
      }
    vf one[4];
    for (int h = 0; h < heads; h++) one[h] = vf_set1(0.0f);
    if (vectors) {
      for (int v = 0; v < vectors; v++) {
        vf key = load_cached(c->cache.keys, kind, at + 16 * v);
        for (int h = 0; h < heads; h++) one[h] = vf_fma(key, kept[h][v], one[h]);
      }
    } else {
      for (int64_t i = 0; i < width; i += 16) {
        vf key = load_cached(c->cache.keys, kind, at + i);
        for (int h = 0; h < heads; h++) one[h] = vf_fma(key, vf_load(query + h * width + i), one[h]);
      }
    }
    for (int h = 0; h < heads; h++) sums[h][s] = one[h];
  }
  for (int h = 0; h < heads; h++) vf_store(scores[h] + first, vf_sum16(sums[h]));
}

/* Query heads of one key-value head over one span: largest score, sum of weights, weighted values [heads, width]. */
INLINE void attend_heads(const block_call *c, int64_t row, int64_t kv_head, int64_t start, int64_t end, const float *query,
                         float *largest, float *total, float *mixed, const int heads, const int32_t kind) {
  const int64_t width = head_width(c->head_dim), count = end - start, slot = slot_of(c, row, kv_head, start);
  float scores[4][SPAN];
  for (int64_t first = 0; first < count; first += 16) {
    if (width == 64) score_sixteen(c, slot, count, query, scores, first, heads, 4, kind);
    else score_sixteen(c, slot, count, query, scores, first, heads, 0, kind);
  }
  for (int h = 0; h < heads; h++) {
    if (kind == CACHE_INT8)
      for (int64_t s = 0; s < count; s++) scores[h][s] *= c->cache.key_scales[slot + s];
    total[h] = weigh(scores[h], count, c->softcap, largest + h);
    if (kind == CACHE_INT8)
      for (int64_t s = 0; s < count; s++) scores[h][s] *= c->cache.value_scales[slot + s];
  }
  int64_t at = 0;
  for (; at + 64 <= width; at += 64) add_values(c, slot, count, scores, at, mixed, heads, 4, kind);
  for (; at < width; at += 16) add_values(c, slot, count, scores, at, mixed, heads, 1, kind);
}

/* Adds a span to what was attended to before it: largest score, sum of weights and weighted values of a head. */
INLINE void join_span(float *largest, float *total, float *mixed, float span_largest, float span_total, const float *span_mixed,
                      int64_t width) {
  float weights[16], top = span_largest > *largest || span_largest != span_largest ? span_largest : *largest;
  for (int i = 0; i < 16; i++) weights[i] = 0.0f;
  weights[0] = *largest - top, weights[1] = span_largest - top;
  if (*largest == -__builtin_inff()) weights[0] = -100.0f; /* nothing before: its values are zeros */
  vf_store(weights, exponential(vf_load(weights)));
  *total = *total * weights[0] + span_total * weights[1];
  for (int64_t i = 0; i < width; i += 16)
    vf_store(mixed + i, vf_fma(vf_load(span_mixed + i), vf_set1(weights[1]), vf_mul(vf_load(mixed + i), vf_set1(weights[0]))));
  *largest = top;
}

#define ATTEND(heads, kind, suffix)                                                                                  \
  static __attribute__((noinline)) void NAME(attend_##suffix)(                                                       \
      const block_call *c, int64_t row, int64_t kv_head, int64_t start, int64_t end, const float *query,             \
      float *largest, float *total, float *mixed) {                                                                  \
    attend_heads(c, row, kv_head, start, end, query, largest, total, mixed, heads, kind);                            \
  }
#define ATTEND_KIND(kind, name) ATTEND(1, kind, name##_1) ATTEND(2, kind, name##_2) ATTEND(3, kind, name##_3) ATTEND(4, kind, name##_4)
ATTEND_KIND(CACHE_F32, f32)
ATTEND_KIND(CACHE_BF16, bf16)
ATTEND_KIND(CACHE_INT8, int8)

typedef void (*attend_function)(const block_call *, int64_t, int64_t, int64_t, int64_t, const float *, float *, float *, float *);
static attend_function NAME(attend_functions)[3][4] = {
    {NAME(attend_f32_1), NAME(attend_f32_2), NAME(attend_f32_3), NAME(attend_f32_4)},
    {NAME(attend_bf16_1), NAME(attend_bf16_2), NAME(attend_bf16_3), NAME(attend_bf16_4)},
    {NAME(attend_int8_1), NAME(attend_int8_2), NAME(attend_int8_3), NAME(attend_int8_4)},
};

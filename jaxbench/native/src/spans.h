/* Two phases of a block: keys and values into the cache, and attention, shared out by rows and spans. Part of kernels.h. */

#define ROWS_WRITTEN 64 /* of one key-value head by one thread: neighbours' keys share lines of the processor's cache */

INLINE int64_t write_chunks(const block_call *c) { return (c->rows + ROWS_WRITTEN - 1) / ROWS_WRITTEN * c->num_kv_heads; }

INLINE void normalise_and_rotate(const block_call *c, int64_t row, float *one, norm n) {
  int64_t half = c->head_dim / 2;
  if (n.scale) normalise(one, c->head_dim, n, c->norm_eps, one);
  if (c->cosine) rotate(one, c->cosine + row * half, c->sine + row * half, half);
}

/* Keys and values of one key-value head, written to the cache. */
INLINE void write_rows(block_state *s, int64_t kv_head, int64_t first) {
  const block_call *c = s->call;
  int64_t stride = up_to(s->kv_width, TILE), end = first + ROWS_WRITTEN < c->rows ? first + ROWS_WRITTEN : c->rows;
  for (int64_t row = first; row < end; row++) {
    if (c->positions[row] < 0) continue;
    float *key = s->key + row * stride + kv_head * c->head_dim;
    int64_t slot = slot_of(c, row, kv_head, c->positions[row]);
    normalise_and_rotate(c, row, key, c->k_norm);
    write_slot(c, slot, key, 1);
    write_slot(c, slot, s->value + row * stride + kv_head * c->head_dim, 0);
  }
}

#ifdef VECTOR_HAS_UNIT
/* Queries in bfloat16, those of all rows of a key-value head one after another. */
INLINE uint16_t *narrow_query(const block_state *s, int64_t row, int64_t kv_head) {
  const int64_t heads = s->call->num_heads / s->call->num_kv_heads;
  return (uint16_t *)s->rotated + (kv_head * s->call->rows + row) * heads * up_to(s->width, 32);
}

INLINE void write_narrow_query(const block_state *s, int64_t row, int64_t h, const float *x) {
  const int64_t heads = s->call->num_heads / s->call->num_kv_heads, padded = up_to(s->width, 32);
  uint16_t *to = narrow_query(s, row, h / heads) + h % heads * padded;
  for (int64_t at = 0; at < padded; at += 32) {
    float some[32];
    for (int64_t i = 0; i < 32; i++) some[i] = at + i < s->call->head_dim ? x[at + i] * s->call->query_scale : 0.0f;
    store_bf16(to + at, vf_load(some), vf_load(some + 16));
  }
}
#endif

/* First the chunks that write to the cache, then a row's queries each. */
static void NAME(position)(void *context, int64_t chunk) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t row = chunk - write_chunks(c);
  if (row < 0) {
    write_rows(s, chunk % c->num_kv_heads, chunk / c->num_kv_heads * ROWS_WRITTEN);
    return;
  }
  if (c->positions[row] < 0) return;
  for (int64_t h = 0; h < c->num_heads; h++) {
    float *one = s->query + row * up_to(s->query_width, TILE) + h * c->head_dim, *to = s->rotated + (row * c->num_heads + h) * s->width;
    normalise_and_rotate(c, row, one, c->q_norm);
#ifdef VECTOR_HAS_UNIT
    if (s->is_by_unit) {
      write_narrow_query(s, row, h, one);
      continue;
    }
#endif
    for (int64_t i = 0; i < c->head_dim; i++) to[i] = one[i] * c->query_scale;
    for (int64_t i = c->head_dim; i < s->width; i++) to[i] = 0.0f;
  }
}

/* First position that a row sees, and the spans that it needs. */
INLINE int64_t first_seen(const block_call *c, int64_t row) {
  int64_t first = c->window ? c->positions[row] - c->window + 1 : 0;
  return first > 0 ? first : 0;
}

INLINE float *partial_of(const block_state *s, int64_t row, int64_t kv_head, int64_t span) {
  const block_call *c = s->call;
  int64_t heads = c->num_heads / c->num_kv_heads;
  return s->partial + ((row * c->num_kv_heads + kv_head) * s->spans + span) * heads * (16 + s->width);
}

/* Some query heads of one key-value head, and where `to`, as `partial` has it, holds what they make of a span. */
INLINE void span_queries(const block_state *s, int64_t row, int64_t kv_head, int64_t first, int64_t count, float *to, span_query *q) {
  int64_t heads = s->call->num_heads / s->call->num_kv_heads;
  for (int64_t h = first; h < first + count; h++)
    *q++ = (span_query){s->rotated + (row * s->call->num_heads + kv_head * heads + h) * s->width, to + h, to + heads + h,
                        to + 16 * heads + h * s->width};
}

/* One row over one span, four heads at a time: largest of all, total of all, then values, as `partial` has them. */
INLINE void attend_span(const block_state *s, int64_t row, int64_t kv_head, int64_t span, float *to) {
  const block_call *c = s->call;
  int64_t heads = c->num_heads / c->num_kv_heads, start = span * SPAN, first = first_seen(c, row) - start, last = c->positions[row] + 1 - start;
  for (int64_t h = 0; h < heads; h += 4) {
    span_query q[4];
    int64_t count = heads - h < 4 ? heads - h : 4;
    span_queries(s, row, kv_head, h, count, to, q);
    NAME(attend_functions)[c->cache.kind][count](c, slot_of(c, row, kv_head, start), first > 0 ? first : 0, last < SPAN ? last : SPAN, q);
  }
}

/* Rows from `row` on that see all of a span in the same page, whose heads one pass over it serves: how many, or 1. */
INLINE int64_t rows_of_a_pass(const block_state *s, int64_t row, int64_t end, int64_t span) {
  const block_call *c = s->call;
  int64_t heads = c->num_heads / c->num_kv_heads, wanted = heads > 3 ? 1 : heads == 1 ? 4 : MOST_QUERIES / heads;
  if (row + wanted > end) return 1;
  for (int64_t r = row; r < row + wanted; r++)
    if (c->positions[r] < span * SPAN + SPAN - 1 || first_seen(c, r) > span * SPAN || slot_of(c, r, 0, span * SPAN) != slot_of(c, row, 0, span * SPAN))
      return 1;
  return wanted;
}

INLINE void clear_part(const block_state *s, float *to) {
  int64_t heads = s->call->num_heads / s->call->num_kv_heads;
  memset(to, 0, sizeof(float) * (size_t)(heads * (16 + s->width)));
  for (int64_t h = 0; h < heads; h++) to[h] = -__builtin_inff();
}

INLINE void join_part(const block_state *s, float *to, const float *largest, const float *total, const float *mixed) {
  int64_t heads = s->call->num_heads / s->call->num_kv_heads, width = s->width;
  for (int64_t h = 0; h < heads; h += 8)
    join_heads(to + h, to + heads + h, to + 16 * heads + h * width, largest + h, total + h, mixed + h * width,
               heads - h < 8 ? heads - h : 8, width);
}

INLINE void join_span(const block_state *s, float *to, const float *span) { /* both as `partial` has them */
  int64_t heads = s->call->num_heads / s->call->num_kv_heads;
  join_part(s, to, span, span + heads, span + 16 * heads);
}

/* Whether a row sees a position of a span. */
INLINE int sees(const block_call *c, int64_t row, int64_t span) {
  return c->positions[row] >= 0 && span >= first_seen(c, row) / SPAN && span <= c->positions[row] / SPAN;
}

#ifdef VECTOR_HAS_UNIT
#include "spans_unit.h"
#endif

/* Few rows: one span of one row and key-value head. Joined in `join`. */
static void NAME(attend)(void *context, int64_t chunk) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t span = chunk / (c->rows * c->num_kv_heads), row = chunk % (c->rows * c->num_kv_heads) / c->num_kv_heads;
  int64_t kv_head = chunk % c->num_kv_heads;
  if (!sees(c, row, span)) return;
#ifdef VECTOR_HAS_UNIT
  if (s->is_by_unit) {
    NAME(unit_attend)(s, row, kv_head, span, partial_of(s, row, kv_head, span));
    return;
  }
#endif
  attend_span(s, row, kv_head, span, partial_of(s, row, kv_head, span));
}

/* Many rows: all spans of a few rows and one key-value head, joined at once in the same order. */
static void NAME(attend_rows)(void *context, int64_t chunk) {
  block_state *s = context;
#ifdef VECTOR_HAS_UNIT
  if (s->is_by_unit) {
    NAME(unit_attend_rows)(s, chunk);
    return;
  }
#endif
  const block_call *c = s->call;
  int64_t kv_head = chunk % c->num_kv_heads, start = chunk / c->num_kv_heads * s->rows_together, heads = c->num_heads / c->num_kv_heads;
  int64_t end = start + s->rows_together < c->rows ? start + s->rows_together : c->rows, longest = -1, size = heads * (16 + s->width);
  float *span_parts = s->span_parts + chunk * s->rows_together * size;
  for (int64_t row = start; row < end; row++) {
    clear_part(s, partial_of(s, row, kv_head, 0));
    longest = c->positions[row] > longest ? c->positions[row] : longest;
  }
  for (int64_t span = 0; span * SPAN <= longest; span++)
    for (int64_t row = start, rows; row < end; row += rows) {
      rows = 1;
      if (!sees(c, row, span)) continue;
      rows = rows_of_a_pass(s, row, end, span);
      if (rows == 1) {
        attend_span(s, row, kv_head, span, span_parts);
      } else {
        span_query q[MOST_QUERIES];
        for (int64_t r = 0; r < rows; r++) span_queries(s, row + r, kv_head, 0, heads, span_parts + r * size, q + r * heads);
        NAME(attend_functions)[c->cache.kind][rows * heads](c, slot_of(c, row, kv_head, span * SPAN), 0, SPAN, q);
      }
      for (int64_t r = 0; r < rows; r++) join_span(s, partial_of(s, row + r, kv_head, 0), span_parts + r * size);
    }
}

/* A row's attention output, from its parts. */
static void NAME(join)(void *context, int64_t row) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t heads = c->num_heads / c->num_kv_heads, q = up_to(s->query_width, GROUP), position = c->positions[row];
  float *out = s->mixed + row * q;
  memset(out, 0, sizeof(float) * (size_t)q);
  for (int64_t kv_head = 0; position >= 0 && kv_head < c->num_kv_heads; kv_head++) {
    float *all = partial_of(s, row, kv_head, 0);
    if (s->is_split) {
      all = s->span_parts + row * heads * (16 + s->width);
      clear_part(s, all);
      for (int64_t span = first_seen(c, row) / SPAN; span <= position / SPAN; span++)
        join_span(s, all, partial_of(s, row, kv_head, span));
    }
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < c->head_dim; i++)
        out[(kv_head * heads + h) * c->head_dim + i] = all[16 * heads + h * s->width + i] / all[heads + h];
  }
  narrow_row(out, s->query_width, s->mixed_groups + row * num_groups(q) * group_bytes(c->planes), c->planes, s->is_bf16);
}

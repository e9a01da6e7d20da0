/* Attention in bfloat16 with the matrix unit (unit_amx.h): queries, weights and a bfloat16 cache, sums in float32. Part of spans.h.
 *
 * Keys and values of a span are packed into pairs of elements and of positions, and then serve up to 32 queries at once. A query's
 * results are the same bits in any company: what it does not see has weight 0, and is never multiplied where it is not finite. */

typedef struct {
  uint32_t keys[SPAN / 32][UNIT_WIDTH / 2][32];   /* of positions in tiles of 32: pairs of elements */
  uint32_t values[UNIT_WIDTH / 32][SPAN / 2][32]; /* of elements in tiles of 32: pairs of positions */
  uint16_t weights[UNIT_ROWS][SPAN];
  float scores[UNIT_ROWS][SPAN];
  int64_t configured; /* rows, of configure_unit */
} __attribute__((aligned(64))) unit_buffers;

/* What queries make of a span: one largest score, one sum of weights and `width` weighted values each. */
typedef struct { float *largest, *total, *mixed; } unit_parts;

/* What a row sees of a span: positions [from, to). */
typedef struct { int64_t row, from, to; } unit_view;

INLINE unit_view view_of(const block_call *c, int64_t row, int64_t span) {
  int64_t first = first_seen(c, row) - span * SPAN, last = c->positions[row] + 1 - span * SPAN;
  return (unit_view){row, first > 0 ? first : 0, last < SPAN ? last : SPAN};
}

INLINE void pack_keys(const block_call *c, int64_t slot, int64_t width, unit_buffers *buffers) {
  const int64_t stride = c->cache.page_size, pairs = up_to(width, 32) / 2;
  const uint16_t *from = (const uint16_t *)c->cache.keys + key_place(c, slot, 0);
  for (int64_t p = 0; p < pairs; p++)
    for (int64_t at = 0; at < SPAN; at += 16) {
      const uint16_t *even = from + 2 * p * stride + at;
      vi_store(buffers->keys[at / 32][p] + at % 32, 2 * p < width ? vi_pairs(even, even + stride, 16) : vi_set1(0));
    }
}

/* Values of positions [from, to), zeros elsewhere; whether all are finite. */
INLINE int pack_values(const block_call *c, int64_t slot, int64_t width, int64_t from, int64_t to, unit_buffers *buffers) {
  const uint16_t *values = (const uint16_t *)c->cache.values + slot * width;
  int is_bad = 0;
  for (int64_t p = 0; p < SPAN / 2; p++)
    for (int64_t at = 0; at < up_to(width, 32); at += 16) {
      const int has_even = 2 * p >= from && 2 * p < to, has_odd = 2 * p + 1 >= from && 2 * p + 1 < to;
      const uint16_t *even = values + 2 * p * width + at;
      vi pair = at < width ? vi_pairs(has_even ? even : NULL, has_odd ? even + width : NULL, 16) : vi_set1(0);
      is_bad |= has_nonfinite_bf16(pair);
      vi_store(buffers->values[at / 32][p] + at % 32, pair);
    }
  return !is_bad;
}

/* Weights of one query over the positions that it sees, others 0: e^(score - largest), rounded to bfloat16. Their sum is taken
 * before that, in float32. */
INLINE float unit_weigh(const float *scores, const unit_view *view, float softcap, float *largest, uint16_t *weights) {
  const vf hidden = vf_set1(-__builtin_inff());
  const uint64_t seen = (~0ull >> (SPAN - view->to)) & (~0ull << view->from);
  vf x[SPAN / 16], top = hidden, sum = vf_set1(0.0f);
  for (int v = 0; v < SPAN / 16; v++) {
    x[v] = vf_load(scores + 16 * v);
    if (softcap > 0.0f) x[v] = vf_mul(vf_set1(softcap), hyperbolic_tangent(vf_div(x[v], vf_set1(softcap))));
    x[v] = vf_where((uint16_t)(seen >> 16 * v), x[v], hidden);
    top = vf_max(top, x[v]);
  }
  *largest = vf_largest(top);
  for (int v = 0; v < SPAN / 16; v++) {
    x[v] = vf_where((uint16_t)(seen >> 16 * v), exponential(vf_sub(x[v], vf_set1(*largest))), vf_set1(0.0f));
    sum = vf_add(sum, x[v]);
  }
  for (int v = 0; v < SPAN / 16; v += 2) store_bf16(weights + 16 * v, x[v], x[v + 1]);
  return vf_sum(sum);
}

/* Up to 32 queries from the first one of `views` on; a row has `heads` of them. */
static void NAME(unit_queries)(const block_state *s, int64_t kv_head, const unit_view *views, int64_t first, int64_t count, unit_parts out,
                               unit_buffers *buffers) {
  const block_call *c = s->call;
  const int64_t heads = c->num_heads / c->num_kv_heads, padded = up_to(s->width, 32);
  const uint16_t *queries = narrow_query(s, views->row, kv_head) + first * padded;
  configure_unit(&buffers->configured, count, 64, 16);
  for (int tile = 0; tile < SPAN / 32; tile++) {
    unit_begin(NULL, count, SPAN);
    unit_bf16((const uint8_t *)buffers->keys[tile], (const uint8_t *)queries, 2 * padded, padded / 32, count, 0);
    unit_end(buffers->scores[0] + 32 * tile, count, SPAN, 32);
  }
  for (int64_t i = 0; i < count; i++)
    out.total[first + i] = unit_weigh(buffers->scores[i], views + (first + i) / heads, c->softcap, out.largest + first + i, buffers->weights[i]);
  for (int64_t at = 0; at < s->width; at += 32) {
    float *mixed = out.mixed + first * s->width + at;
    unit_begin(NULL, count, s->width);
    unit_bf16((const uint8_t *)buffers->values[at / 32], (const uint8_t *)buffers->weights, 2 * SPAN, SPAN / 32, count, 0);
    unit_end(mixed, count, s->width, s->width - at);
  }
}

/* Rows that have a span in the same page. Where a value is not finite, rows that do not see it must not multiply it: each alone. */
static void NAME(unit_span)(const block_state *s, int64_t kv_head, int64_t span, const unit_view *views, int64_t count, unit_parts out,
                            unit_buffers *buffers) {
  const block_call *c = s->call;
  const int64_t heads = c->num_heads / c->num_kv_heads, slot = slot_of(c, views->row, kv_head, span * SPAN);
  int64_t from = SPAN, to = 0, together = count, is_same = 1;
  for (int64_t i = 0; i < count; i++) {
    is_same &= views[i].from == views->from && views[i].to == views->to;
    from = min_of(from, views[i].from), to = views[i].to > to ? views[i].to : to;
  }
  pack_keys(c, slot, s->width, buffers);
  if (!pack_values(c, slot, s->width, from, to, buffers) && !is_same) together = 1;
  for (int64_t i = 0; i < count; i += together) {
    const int64_t queries = together * heads, before = i * heads;
    const unit_parts own = {out.largest + before, out.total + before, out.mixed + before * s->width};
    if (together < count) pack_values(c, slot, s->width, views[i].from, views[i].to, buffers);
    for (int64_t first = 0; first < queries; first += UNIT_ROWS)
      NAME(unit_queries)(s, kv_head, views + i, first, min_of(queries - first, UNIT_ROWS), own, buffers);
  }
}

/* One row over one span; `to` as `partial` has it. */
static void NAME(unit_attend)(const block_state *s, int64_t row, int64_t kv_head, int64_t span, float *to) {
  const int64_t heads = s->call->num_heads / s->call->num_kv_heads;
  const unit_view view = view_of(s->call, row, span);
  unit_buffers buffers;
  buffers.configured = 0;
  NAME(unit_span)(s, kv_head, span, &view, 1, (unit_parts){to, to + heads, to + 16 * heads}, &buffers);
  _tile_release();
}

/* Many rows: all spans of a few rows and one key-value head, joined at once in the same order. */
static void NAME(unit_attend_rows)(const block_state *s, int64_t chunk) {
  const block_call *c = s->call;
  const int64_t kv_head = chunk % c->num_kv_heads, start = chunk / c->num_kv_heads * s->rows_together, end = min_of(start + s->rows_together, c->rows);
  const int64_t heads = c->num_heads / c->num_kv_heads, most = s->rows_together * heads;
  float *parts = s->span_parts + chunk * most * (16 + s->width);
  const unit_parts out = {parts, parts + most, parts + 16 * most};
  int64_t longest = -1;
  unit_buffers buffers;
  buffers.configured = 0;
  for (int64_t row = start; row < end; row++) {
    clear_part(s, partial_of(s, row, kv_head, 0));
    longest = c->positions[row] > longest ? c->positions[row] : longest;
  }
  for (int64_t span = 0; span * SPAN <= longest; span++)
    for (int64_t row = start, count; row < end; row += count > 1 ? count : 1) {
      unit_view views[UNIT_ROWS];
      for (count = 0; row + count < end && sees(c, row + count, span); count++) {
        if (slot_of(c, row + count, 0, span * SPAN) != slot_of(c, row, 0, span * SPAN)) break;
        views[count] = view_of(c, row + count, span);
      }
      if (!count) continue;
      NAME(unit_span)(s, kv_head, span, views, count, out, &buffers);
      for (int64_t r = 0; r < count; r++) {
        const unit_parts own = {out.largest + r * heads, out.total + r * heads, out.mixed + r * heads * s->width};
        join_part(s, partial_of(s, row + r, kv_head, 0), own.largest, own.total, own.mixed);
      }
    }
  _tile_release();
}

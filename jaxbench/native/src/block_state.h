/* What a block's phases share: its call, its scratch, and how their work goes to threads. Part of kernels.h. */

#define ROWS_TOGETHER 8 /* that a thread attends with: neighbours, often tokens of one text, which read the same spans */

typedef struct {
  const block_call *call;
  team *team;
  int64_t query_width, kv_width, width, spans, rows_together, tiles_a_chunk;
  int is_bf16;
  int is_by_unit;       /* attention goes through the matrix unit */
  int is_split;         /* attention by spans: rows alone are too few for all threads */
  float *residual;      /* [rows, d_model]: x, then x + attention */
  float *normal;        /* [rows, d_model up to groups], input of projections */
  float *query, *key, *value; /* [rows, heads up to tiles] */
  float *rotated;       /* [rows, num_heads, width]: queries as attention reads them; the unit's: narrow_query */
  float *partial;       /* [rows, kv_heads, spans, G (16 + width)]; one span where attention is not split */
  float *span_parts;    /* room for one span of one key-value head and a chunk's rows */
  float *mixed;         /* [rows, query_width up to groups] */
  float *fed;           /* [rows, d_ff up to groups] */
  float *added;         /* [rows, d_model up to tiles]: what a branch adds */
  uint8_t *normal_groups, *mixed_groups, *fed_groups;
} block_state;

INLINE int64_t up_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

/* Hands out aligned parts of the scratch; without a base it counts only. */
INLINE void *part(char *base, int64_t *at, int64_t bytes) {
  void *p = base ? base + *at : NULL;
  *at += up_to(bytes, 64);
  return p;
}

INLINE void narrow_row(const float *x, int64_t size, uint8_t *groups, int planes, int is_bf16) {
  for (int64_t g = 0; g < num_groups(size); g++) narrow_group(x + g * GROUP, groups + g * group_bytes(planes), planes, is_bf16);
}

/* One plane is bfloat16 where all of a block's weights are. */
INLINE int takes_bf16(const block_call *c) {
  const matrix *m = &c->q_proj;
  int is_all = c->planes == 1;
  for (int i = 0; i < 7; i++) is_all &= m[i].format == FORMAT_BF16 || (i == 4 && c->activation == ACTIVATION_GELU);
  return is_all;
}

static int64_t lay_out(block_state *s, const block_call *c, char *base) {
  int64_t at = 0, rows = c->rows, f = sizeof(float);
  s->call = c;
  s->query_width = c->num_heads * c->head_dim;
  s->kv_width = c->num_kv_heads * c->head_dim;
  s->width = head_width(c->head_dim);
  s->is_bf16 = takes_bf16(c);
  s->is_split = c->rows < FEW_ROWS;
  s->spans = s->is_split ? num_spans(c) : 1;
  s->is_by_unit = 0;
  s->rows_together = ROWS_TOGETHER;
#ifdef VECTOR_HAS_UNIT
  s->is_by_unit = has_unit && s->is_bf16 && c->cache.kind == CACHE_BF16 && s->width <= UNIT_WIDTH;
  if (s->is_by_unit && c->rows * c->num_kv_heads >= 16 * UNIT_ROWS) s->rows_together = UNIT_ROWS; /* a span is packed once for them */
#endif
  int64_t d = up_to(c->d_model, GROUP), q = up_to(s->query_width, TILE), kv = up_to(s->kv_width, TILE), ff = up_to(c->d_ff, TILE);
  int64_t group = group_bytes(c->planes), heads = c->num_heads / c->num_kv_heads;
  s->residual = part(base, &at, rows * d * f);
  s->normal = part(base, &at, rows * d * f);
  s->query = part(base, &at, rows * q * f);
  s->key = part(base, &at, rows * kv * f);
  s->value = part(base, &at, rows * kv * f);
  s->rotated = part(base, &at, rows * c->num_heads * s->width * f);
  s->partial = part(base, &at, rows * c->num_kv_heads * s->spans * heads * (16 + s->width) * f);
  s->span_parts = part(base, &at, up_to(rows, s->rows_together) * c->num_kv_heads * heads * (16 + s->width) * f);
  s->mixed = part(base, &at, rows * q * f);
  s->fed = part(base, &at, rows * ff * f);
  s->added = part(base, &at, rows * d * f);
  s->normal_groups = part(base, &at, rows * d / GROUP * group);
  s->mixed_groups = part(base, &at, rows * q / GROUP * group);
  s->fed_groups = part(base, &at, rows * ff / GROUP * group);
  return at;
}

INLINE operand operand_of(const block_state *s, const float *values, const uint8_t *groups, int64_t inputs) {
  return (operand){values, groups, s->call->rows, up_to(inputs, GROUP), num_groups(inputs), s->call->planes, s->is_bf16};
}

/* Rows few enough are done by the caller: handing them over takes longer. */
INLINE void for_rows(block_state *s, chunk_function run) {
  if (s->call->rows <= 2)
    for (int64_t row = 0; row < s->call->rows; row++) run(s, row);
  else
    team_run(s->team, run, s, s->call->rows);
}

/* Tiles in chunks: whole streams for few rows, single tiles where each is much work. */
INLINE void for_tiles(block_state *s, chunk_function run, int64_t tiles) {
  int64_t chunks = s->call->rows >= 8 ? tiles : 3 * team_threads(s->team);
  s->tiles_a_chunk = (tiles + chunks - 1) / chunks;
  team_run(s->team, run, s, (tiles + s->tiles_a_chunk - 1) / s->tiles_a_chunk);
}

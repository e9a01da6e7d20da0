/* One block of a decoder for one token a row, and one linear layer. Part of kernels.h.
 *
 * Phases of a block: norm -> query, key, value -> rotary positions and cache -> attention by spans -> output projection
 * -> norm -> gate and up -> down. Within a phase, chunks (rows, tiles or spans) go to whichever thread is free. */

typedef struct {
  const block_call *call;
  team *team;
  int64_t query_width, kv_width, width, spans, tiles_a_chunk;
  int is_bf16;
  int is_split;         /* attention by spans: rows alone are too few for all threads */
  float *residual;      /* [rows, d_model]: x, then x + attention */
  float *normal;        /* [rows, d_model up to groups], input of projections */
  float *query, *key, *value; /* [rows, heads up to tiles] */
  float *rotated;       /* [rows, num_heads, width]: queries as attention reads them */
  float *partial;       /* [rows, kv_heads, spans, G (16 + width)]; one span where attention is not split */
  float *span_parts;    /* room for one span of one key-value head in each chunk at work */
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
  int64_t d = up_to(c->d_model, GROUP), q = up_to(s->query_width, TILE), kv = up_to(s->kv_width, TILE), ff = up_to(c->d_ff, TILE);
  int64_t group = group_bytes(c->planes), heads = c->num_heads / c->num_kv_heads;
  s->residual = part(base, &at, rows * d * f);
  s->normal = part(base, &at, rows * d * f);
  s->query = part(base, &at, rows * q * f);
  s->key = part(base, &at, rows * kv * f);
  s->value = part(base, &at, rows * kv * f);
  s->rotated = part(base, &at, rows * c->num_heads * s->width * f);
  s->partial = part(base, &at, rows * c->num_kv_heads * s->spans * heads * (16 + s->width) * f);
  s->span_parts = part(base, &at, rows * c->num_kv_heads * heads * (16 + s->width) * f);
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

static void NAME(enter)(void *context, int64_t row) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t d = up_to(c->d_model, GROUP);
  memcpy(s->residual + row * d, c->x + row * c->d_model, sizeof(float) * (size_t)c->d_model);
  normalise(s->residual + row * d, c->d_model, c->attention_norm, c->norm_eps, s->normal + row * d);
  memset(s->normal + row * d + c->d_model, 0, sizeof(float) * (size_t)(d - c->d_model));
  narrow_row(s->normal + row * d, c->d_model, s->normal_groups + row * num_groups(d) * group_bytes(c->planes), c->planes, s->is_bf16);
}

#define ROW_BLOCK 96 /* rows of a tile that are computed together: whole ones of every product's number */
#define FOR_ROW_BLOCKS(c) \
  for (int64_t first = 0, rows; first < (c)->rows && (rows = (c)->rows - first < ROW_BLOCK ? (c)->rows - first : ROW_BLOCK); first += ROW_BLOCK)

static void NAME(project_tile)(block_state *s, int64_t tile) {
  const block_call *c = s->call;
  const matrix *parts[3] = {&c->q_proj, &c->k_proj, &c->v_proj};
  const float *biases[3] = {c->q_bias, c->k_bias, c->v_bias};
  float *outs[3] = {s->query, s->key, s->value}, out[ROW_BLOCK * TILE];
  operand x = operand_of(s, s->normal, s->normal_groups, c->d_model);
  int which = 0;
  while (tile >= num_tiles(parts[which]->outputs)) tile -= num_tiles(parts[which++]->outputs);
  int64_t stride = up_to(parts[which]->outputs, TILE);
  FOR_ROW_BLOCKS(c) {
    product_tile(parts[which], &x, tile, first, rows, out);
    add_bias(out, biases[which], tile, parts[which]->outputs, rows);
    for (int64_t r = 0; r < rows; r++)
      memcpy(outs[which] + (first + r) * stride + tile * TILE, out + r * TILE, sizeof(float) * TILE);
  }
}

#define TILES(name, one, tiles)                                                                    \
  static void NAME(name)(void *context, int64_t chunk) {                                           \
    block_state *s = context;                                                                      \
    int64_t first = chunk * s->tiles_a_chunk, end = first + s->tiles_a_chunk, all = (tiles);       \
    for (int64_t tile = first; tile < (end < all ? end : all); tile++) one(s, tile);               \
  }
TILES(project, NAME(project_tile), num_tiles(s->query_width) + 2 * num_tiles(s->kv_width))

static void NAME(position)(void *context, int64_t row) {
  block_state *s = context;
  const block_call *c = s->call;
  if (c->positions[row] < 0) return;
  int64_t half = c->head_dim / 2, position = c->positions[row];
  float *query = s->query + row * up_to(s->query_width, TILE), *key = s->key + row * up_to(s->kv_width, TILE);
  const float *value = s->value + row * up_to(s->kv_width, TILE);
  for (int64_t h = 0; h < c->num_heads; h++) {
    float *one = query + h * c->head_dim, *to = s->rotated + (row * c->num_heads + h) * s->width;
    if (c->q_norm.scale) normalise(one, c->head_dim, c->q_norm, c->norm_eps, one);
    if (c->cosine) rotate(one, c->cosine + row * half, c->sine + row * half, half);
    for (int64_t i = 0; i < c->head_dim; i++) to[i] = one[i] * c->query_scale;
    for (int64_t i = c->head_dim; i < s->width; i++) to[i] = 0.0f;
  }
  for (int64_t h = 0; h < c->num_kv_heads; h++) {
    float *one = key + h * c->head_dim;
    int64_t slot = slot_of(c, row, h, position);
    if (c->k_norm.scale) normalise(one, c->head_dim, c->k_norm, c->norm_eps, one);
    if (c->cosine) rotate(one, c->cosine + row * half, c->sine + row * half, half);
    write_slot(c, c->cache.keys, c->cache.key_scales, slot, one);
    write_slot(c, c->cache.values, c->cache.value_scales, slot, value + h * c->head_dim);
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

/* The query heads of one key-value head, four at a time: largest of all, total of all, then values, as `partial` has them. */
INLINE void attend_span(const block_state *s, int64_t row, int64_t kv_head, int64_t span, float *to) {
  const block_call *c = s->call;
  int64_t heads = c->num_heads / c->num_kv_heads, first = first_seen(c, row), last = c->positions[row] + 1;
  int64_t start = span * SPAN > first ? span * SPAN : first, end = span * SPAN + SPAN < last ? span * SPAN + SPAN : last;
  for (int64_t h = 0; h < heads; h += 4) {
    int64_t count = heads - h < 4 ? heads - h : 4;
    const float *query = s->rotated + (row * c->num_heads + kv_head * heads + h) * s->width;
    NAME(attend_functions)[c->cache.kind][count - 1](c, row, kv_head, start, end, query, to + h, to + heads + h,
                                                     to + 16 * heads + h * s->width);
  }
}

INLINE void clear_part(const block_state *s, float *to) {
  int64_t heads = s->call->num_heads / s->call->num_kv_heads;
  memset(to, 0, sizeof(float) * (size_t)(heads * (16 + s->width)));
  for (int64_t h = 0; h < heads; h++) to[h] = -__builtin_inff();
}

INLINE void join_part(const block_state *s, float *to, const float *span) {
  int64_t heads = s->call->num_heads / s->call->num_kv_heads, width = s->width;
  for (int64_t h = 0; h < heads; h++)
    join_span(to + h, to + heads + h, to + 16 * heads + h * width, span[h], span[heads + h], span + 16 * heads + h * width, width);
}

/* Few rows: one span of one row and key-value head. Joined in `join`. */
static void NAME(attend)(void *context, int64_t chunk) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t span = chunk / (c->rows * c->num_kv_heads), row = chunk % (c->rows * c->num_kv_heads) / c->num_kv_heads;
  int64_t kv_head = chunk % c->num_kv_heads;
  if (c->positions[row] < 0 || span < first_seen(c, row) / SPAN || span > c->positions[row] / SPAN) return;
  attend_span(s, row, kv_head, span, partial_of(s, row, kv_head, span));
}

#define ROWS_TOGETHER 8 /* neighbours, which often are tokens of one row and read the same span */

/* Many rows: all spans of a few rows and one key-value head, joined at once in the same order. */
static void NAME(attend_rows)(void *context, int64_t chunk) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t kv_head = chunk % c->num_kv_heads, start = chunk / c->num_kv_heads * ROWS_TOGETHER;
  int64_t end = start + ROWS_TOGETHER < c->rows ? start + ROWS_TOGETHER : c->rows, longest = -1;
  float *span_part = s->span_parts + chunk * (c->num_heads / c->num_kv_heads) * (16 + s->width);
  for (int64_t row = start; row < end; row++) {
    clear_part(s, partial_of(s, row, kv_head, 0));
    longest = c->positions[row] > longest ? c->positions[row] : longest;
  }
  for (int64_t span = 0; span * SPAN <= longest; span++)
    for (int64_t row = start; row < end; row++) {
      if (c->positions[row] < 0 || span < first_seen(c, row) / SPAN || span > c->positions[row] / SPAN) continue;
      attend_span(s, row, kv_head, span, span_part);
      join_part(s, partial_of(s, row, kv_head, 0), span_part);
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
        join_part(s, all, partial_of(s, row, kv_head, span));
    }
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < c->head_dim; i++)
        out[(kv_head * heads + h) * c->head_dim + i] = all[16 * heads + h * s->width + i] / all[heads + h];
  }
  narrow_row(out, s->query_width, s->mixed_groups + row * num_groups(q) * group_bytes(c->planes), c->planes, s->is_bf16);
}

/* Adds a tile of a branch's projection to the residual, or keeps it for the norm behind the branch. */
INLINE void add_tile(block_state *s, const matrix *m, const operand *x, const float *bias, int is_kept, int64_t tile) {
  const block_call *c = s->call;
  int64_t d = up_to(c->d_model, GROUP), width = c->d_model - tile * TILE < TILE ? c->d_model - tile * TILE : TILE;
  float out[ROW_BLOCK * TILE];
  FOR_ROW_BLOCKS(c) {
    product_tile(m, x, tile, first, rows, out);
    add_bias(out, bias, tile, m->outputs, rows);
    for (int64_t r = 0; r < rows; r++) {
      float *to = (is_kept ? s->added : s->residual) + (first + r) * d + tile * TILE;
      for (int64_t i = 0; i < width; i++) to[i] = is_kept ? out[r * TILE + i] : to[i] + out[r * TILE + i];
    }
  }
}

static void NAME(output_tile)(block_state *s, int64_t tile) {
  operand x = operand_of(s, s->mixed, s->mixed_groups, s->query_width);
  add_tile(s, &s->call->o_proj, &x, s->call->o_bias, s->call->attention_post_norm.scale != NULL, tile);
}
TILES(output, NAME(output_tile), num_tiles(s->call->d_model))

static void NAME(middle)(void *context, int64_t row) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t d = up_to(c->d_model, GROUP);
  float *residual = s->residual + row * d, *normal = s->normal + row * d, *added = s->added + row * d;
  if (c->attention_post_norm.scale) {
    normalise(added, c->d_model, c->attention_post_norm, c->norm_eps, added);
    for (int64_t i = 0; i < c->d_model; i++) residual[i] += added[i];
  }
  normalise(residual, c->d_model, c->mlp_norm, c->norm_eps, normal);
  narrow_row(normal, c->d_model, s->normal_groups + row * num_groups(d) * group_bytes(c->planes), c->planes, s->is_bf16);
}

INLINE vf activated(vf x, int32_t activation) {
  if (activation == ACTIVATION_SWIGLU) return vf_mul(x, sigmoid(x));
  vf cube = vf_mul(vf_mul(x, x), x), inner = vf_fma(cube, vf_set1(0.044715f), x);
  return vf_mul(x, sigmoid(vf_mul(inner, vf_set1(2.0f * 0.7978845608028654f))));
}

static void NAME(feed_tile)(block_state *s, int64_t tile) {
  const block_call *c = s->call;
  operand x = operand_of(s, s->normal, s->normal_groups, c->d_model);
  int64_t ff = up_to(c->d_ff, TILE), groups = ff / GROUP, width = c->d_ff - tile * TILE < TILE ? c->d_ff - tile * TILE : TILE;
  float up[ROW_BLOCK * TILE], gate[ROW_BLOCK * TILE];
  FOR_ROW_BLOCKS(c) {
    product_tile(&c->up_proj, &x, tile, first, rows, up);
    add_bias(up, c->up_bias, tile, c->d_ff, rows);
    if (c->activation != ACTIVATION_GELU) {
      product_tile(&c->gate_proj, &x, tile, first, rows, gate);
      add_bias(gate, c->gate_bias, tile, c->d_ff, rows);
    }
    for (int64_t r = 0; r < rows; r++) {
      float *to = s->fed + (first + r) * ff + tile * TILE;
      for (int half = 0; half < 32; half += 16) {
        vf u = vf_load(up + r * TILE + half);
        vf_store(to + half, c->activation == ACTIVATION_GELU
                                ? activated(u, c->activation)
                                : vf_mul(activated(vf_load(gate + r * TILE + half), c->activation), u));
      }
      for (int64_t i = width; i < TILE; i++) to[i] = 0.0f;
      narrow_group(to, s->fed_groups + ((first + r) * groups + tile) * group_bytes(c->planes), c->planes, s->is_bf16);
    }
  }
}
TILES(feed, NAME(feed_tile), num_tiles(s->call->d_ff))

static void NAME(down_tile)(block_state *s, int64_t tile) {
  operand x = operand_of(s, s->fed, s->fed_groups, s->call->d_ff);
  add_tile(s, &s->call->down_proj, &x, s->call->down_bias, s->call->mlp_post_norm.scale != NULL, tile);
}
TILES(down, NAME(down_tile), num_tiles(s->call->d_model))

static void NAME(leave)(void *context, int64_t row) {
  block_state *s = context;
  const block_call *c = s->call;
  int64_t d = up_to(c->d_model, GROUP);
  float *residual = s->residual + row * d, *added = s->added + row * d, *out = c->out + row * c->d_model;
  if (c->positions[row] < 0) {
    memmove(out, c->x + row * c->d_model, sizeof(float) * (size_t)c->d_model);
    return;
  }
  if (c->mlp_post_norm.scale) normalise(added, c->d_model, c->mlp_post_norm, c->norm_eps, added);
  for (int64_t i = 0; i < c->d_model; i++) out[i] = c->mlp_post_norm.scale ? residual[i] + added[i] : residual[i];
}

/* The call without padding at its end, which then costs nothing. */
INLINE block_call without_padding(const block_call *whole) {
  block_call c = *whole;
  while (c.rows > 0 && c.positions[c.rows - 1] < 0) c.rows--;
  return c;
}

static int64_t NAME(block_scratch)(const block_call *whole) {
  block_call c = without_padding(whole); /* fewer rows may take more room: attention is split then */
  block_state s;
  return lay_out(&s, &c, NULL);
}

static void NAME(block)(const block_call *whole, team *t) {
  const block_call call = without_padding(whole), *c = &call;
  if (call.out != call.x)
    memcpy(call.out + call.rows * call.d_model, call.x + call.rows * call.d_model,
           sizeof(float) * (size_t)((whole->rows - call.rows) * call.d_model));
  if (!call.rows) return;
  block_state s;
  lay_out(&s, c, team_scratch(t));
  s.team = t;
  for_rows(&s, NAME(enter));
  for_tiles(&s, NAME(project), num_tiles(s.query_width) + 2 * num_tiles(s.kv_width));
  for_rows(&s, NAME(position));
  if (s.is_split) team_run(t, NAME(attend), &s, s.spans * c->rows * c->num_kv_heads);
  else team_run(t, NAME(attend_rows), &s, (c->rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER * c->num_kv_heads);
  for_rows(&s, NAME(join));
  for_tiles(&s, NAME(output), num_tiles(c->d_model));
  for_rows(&s, NAME(middle));
  for_tiles(&s, NAME(feed), num_tiles(c->d_ff));
  for_tiles(&s, NAME(down), num_tiles(c->d_model));
  for_rows(&s, NAME(leave));
}

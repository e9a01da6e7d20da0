/* One block of a decoder for one token a row. Part of kernels.h.
 *
 * Phases of a block: norm -> query, key, value -> rotary positions and cache -> attention by spans -> output projection
 * -> norm -> gate and up -> down. Within a phase, chunks (rows, tiles or spans) go to whichever thread is free. */

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
  int64_t chunks = write_chunks(c) + c->rows;
  if (c->rows > 2) team_run(t, NAME(position), &s, chunks);
  else for (int64_t chunk = 0; chunk < chunks; chunk++) NAME(position)(&s, chunk);
  if (s.is_split) team_run(t, NAME(attend), &s, s.spans * c->rows * c->num_kv_heads);
  else team_run(t, NAME(attend_rows), &s, (c->rows + s.rows_together - 1) / s.rows_together * c->num_kv_heads);
  for_rows(&s, NAME(join));
  for_tiles(&s, NAME(output), num_tiles(c->d_model));
  for_rows(&s, NAME(middle));
  for_tiles(&s, NAME(feed), num_tiles(c->d_ff));
  for_tiles(&s, NAME(down), num_tiles(c->d_model));
  for_rows(&s, NAME(leave));
}

/* A linear layer on any number of rows, the largest of a row, and its k-th largest. Part of kernels.h. */

typedef struct {
  const matrix *w;
  const float *source, *bias;
  float *values, *out; /* values: rows padded to whole groups; NULL where the source is used as it lies */
  uint8_t *groups;
  operand x;
  int64_t tiles_a_chunk;
} linear_state;

static int64_t NAME(linear_scratch)(const matrix *w, int64_t rows, int planes) {
  int64_t floats = rows * up_to(w->inputs, GROUP) * (int64_t)sizeof(float);
  int64_t groups = w->format >= FORMAT_INT8 || planes == 1 ? rows * num_groups(w->inputs) * group_bytes(planes) : 0;
  return up_to(floats, 64) + up_to(groups, 64);
}

static void NAME(prepare_row)(void *context, int64_t row) {
  linear_state *s = context;
  int64_t inputs = s->w->inputs, stride = s->x.stride;
  const float *from = s->source + row * inputs;
  if (s->values) {
    float *to = s->values + row * stride;
    memcpy(to, from, sizeof(float) * (size_t)inputs);
    memset(to + inputs, 0, sizeof(float) * (size_t)(stride - inputs));
    from = to;
  }
  if (!s->groups) return;
  narrow_row(from, inputs, s->groups + row * s->x.num_groups * group_bytes(s->x.planes), s->x.planes, s->x.is_bf16);
}

static void NAME(linear_chunk)(void *context, int64_t chunk) {
  linear_state *s = context;
  const matrix *w = s->w;
  int64_t first = chunk * s->tiles_a_chunk, last = first + s->tiles_a_chunk, all = num_tiles(w->outputs);
  float out[ROW_BLOCK * TILE];
  for (int64_t tile = first; tile < (last < all ? last : all); tile++) {
    int64_t width = w->outputs - tile * TILE < TILE ? w->outputs - tile * TILE : TILE;
    for (int64_t row = 0; row < s->x.rows; row += ROW_BLOCK) {
      int64_t rows = s->x.rows - row < ROW_BLOCK ? s->x.rows - row : ROW_BLOCK;
      product_tile(w, &s->x, tile, row, rows, out);
      add_bias(out, s->bias, tile, w->outputs, rows);
      for (int64_t r = 0; r < rows; r++)
        memcpy(s->out + (row + r) * w->outputs + tile * TILE, out + r * TILE, sizeof(float) * (size_t)width);
    }
  }
}

static void NAME(linear)(const matrix *w, const float *x, int64_t rows, const float *bias, int planes, float *out, team *t) {
  int is_bf16 = w->format == FORMAT_BF16 && planes == 1, is_narrow = w->format >= FORMAT_INT8 || is_bf16, is_padded = w->inputs % GROUP != 0;
  int64_t stride = up_to(w->inputs, GROUP);
  char *scratch = team_scratch(t);
  linear_state s = {.w = w, .source = x, .bias = bias, .out = out};
  if (is_padded) s.values = (float *)scratch;
  if (is_narrow) s.groups = (uint8_t *)scratch + up_to(rows * stride * (int64_t)sizeof(float), 64);
  s.x = (operand){is_padded ? s.values : x, s.groups, rows, stride, num_groups(w->inputs), planes, is_bf16};
  if (is_padded || is_narrow) {
    if (rows <= 2)
      for (int64_t row = 0; row < rows; row++) NAME(prepare_row)(&s, row);
    else
      team_run(t, NAME(prepare_row), &s, rows);
  }
  int64_t tiles = num_tiles(w->outputs), chunks = rows >= 8 ? tiles : 4 * team_threads(t);
  s.tiles_a_chunk = (tiles + chunks - 1) / chunks;
  team_run(t, NAME(linear_chunk), &s, (tiles + s.tiles_a_chunk - 1) / s.tiles_a_chunk);
}

typedef struct {
  const float *x;
  int64_t size;
  norm n;
  float eps;
  float *out;
} norm_state;

static void NAME(norm_row)(void *context, int64_t row) {
  norm_state *s = context;
  normalise(s->x + row * s->size, s->size, s->n, s->eps, s->out + row * s->size);
}

static void NAME(norm_rows)(const float *x, int64_t rows, int64_t size, norm n, float eps, float *out, team *t) {
  norm_state s = {x, size, n, eps, out};
  if (rows <= 2)
    for (int64_t row = 0; row < rows; row++) NAME(norm_row)(&s, row);
  else
    team_run(t, NAME(norm_row), &s, rows);
}

#define LARGEST_BLOCK 256

typedef struct {
  const float *logits;
  int64_t size;
  int32_t *out;
} largest_state;

/* The lowest index of the largest value, or of the first NaN: first the best block, then the place in it. */
static void NAME(largest_row)(void *context, int64_t row) {
  largest_state *s = context;
  const float *x = s->logits + row * s->size;
  int64_t best_block = 0;
  float best = -__builtin_inff();
  for (int64_t start = 0; start < s->size; start += LARGEST_BLOCK) {
    int64_t end = start + LARGEST_BLOCK < s->size ? start + LARGEST_BLOCK : s->size, i = start;
    vf top[4];
    for (int v = 0; v < 4; v++) top[v] = vf_set1(-__builtin_inff());
    int is_nan = 0;
    for (; i + 64 <= end; i += 64)
      for (int v = 0; v < 4; v++) top[v] = vf_max(vf_load(x + i + 16 * v), top[v]);
    float value = vf_largest(vf_max(vf_max(top[0], top[1]), vf_max(top[2], top[3])));
    for (; i < end; i++) value = x[i] > value ? x[i] : value;
    for (int64_t j = start; j < end; j++) is_nan |= x[j] != x[j];
    if (is_nan) {
      for (i = start; x[i] == x[i]; i++) {}
      s->out[row] = (int32_t)i;
      return;
    }
    if (value > best) {
      best = value;
      best_block = start;
    }
  }
  for (int64_t i = best_block; i < s->size; i++)
    if (x[i] == best) {
      s->out[row] = (int32_t)i;
      return;
    }
  s->out[row] = 0; /* all -inf */
}

static void NAME(largest)(const float *logits, int64_t rows, int64_t size, int32_t *out, team *t) {
  largest_state s = {logits, size, out};
  team_run(t, NAME(largest_row), &s, rows);
}

/* External context scores: cosine of a slot's hidden state and the sum of those attended to most. Part of kernels.h.
 *
 * A row is one head at one slot. Its tokens are found first, then their states are added up a strip of columns at a
 * time, so that a strip of all tokens stays in the cache for the rows of a block. */

#define STRIP 64        /* columns */
#define EXTERNAL_ROWS 32 /* of a block: slots of one head */

typedef struct {
  external_call call;
  int64_t parts;
  int32_t *room; /* [parts, EXTERNAL_ROWS, tokens] */
} external_state;

/* A limit that the k largest of values that are not negative are not below, and their ties: bits from the highest on, as
 * long as k values are not below. It is found early where no other value lies between. */
static float NAME(limit_of)(const float *restrict x, int64_t size, int64_t k) {
  int32_t found = 0;
  float limit;
  for (int bit = 30; bit >= 0; bit--) {
    int32_t candidate = found | 1 << bit, count = 0;
    memcpy(&limit, &candidate, 4);
    for (int64_t i = 0; i < size; i++) count += x[i] >= limit;
    if (count == k) return limit;
    if (count > k) found = candidate;
  }
  memcpy(&limit, &found, 4);
  return limit;
}

/* Tokens of a row that count, and how many. */
static int64_t NAME(attended)(const float *restrict x, int64_t size, int64_t k, int32_t *restrict chosen) {
  int64_t count = 0;
  float limit = NAME(limit_of)(x, size, k);
  for (int64_t i = 0; i < size; i++) {
    chosen[count] = (int32_t)i;
    count += x[i] >= limit && x[i] > 0;
  }
  return count;
}

/* Adds a strip's part to dot products and squares: sums[0] of both, [1] of the attended, [2] of the slot's own. */
static void NAME(add_strip)(const float *states, int64_t width, const int32_t *chosen, int64_t count, const float *hidden,
                            int64_t columns, float *sums) {
  if (columns == STRIP) {
    vf s[STRIP / 16], dot = vf_set1(0), square = vf_set1(0), own = vf_set1(0);
    for (int v = 0; v < STRIP / 16; v++) s[v] = vf_set1(0);
    for (int64_t i = 0; i < count; i++) {
      const float *row = states + chosen[i] * width;
      for (int v = 0; v < STRIP / 16; v++) s[v] = vf_add(s[v], vf_load(row + 16 * v));
    }
    for (int v = 0; v < STRIP / 16; v++) {
      vf h = vf_load(hidden + 16 * v);
      dot = vf_fma(s[v], h, dot);
      square = vf_fma(s[v], s[v], square);
      own = vf_fma(h, h, own);
    }
    sums[0] += vf_sum(dot);
    sums[1] += vf_sum(square);
    sums[2] += vf_sum(own);
    return;
  }
  for (int64_t j = 0; j < columns; j++) {
    float s = 0;
    for (int64_t i = 0; i < count; i++) s += states[chosen[i] * width + j];
    sums[0] += s * hidden[j];
    sums[1] += s * s;
    sums[2] += hidden[j] * hidden[j];
  }
}

static void NAME(external_part)(void *context, int64_t part) {
  const external_state *s = context;
  const external_call *c = &s->call;
  int32_t *room = s->room + part * EXTERNAL_ROWS * c->tokens;
  int64_t blocks = (c->slots + EXTERNAL_ROWS - 1) / EXTERNAL_ROWS, all = c->batch * c->heads * blocks;
  for (int64_t block = part; block < all; block += s->parts) {
    int64_t row = block / blocks, first = block % blocks * EXTERNAL_ROWS, batch = row / c->heads;
    int64_t rows = c->slots - first < EXTERNAL_ROWS ? c->slots - first : EXTERNAL_ROWS, count[EXTERNAL_ROWS];
    const float *weights = c->weights + (row * c->slots + first) * c->tokens;
    const float *states = c->states + batch * c->tokens * c->width, *hidden = c->hidden + (batch * c->slots + first) * c->width;
    float sums[EXTERNAL_ROWS][3] = {{0}};
    for (int64_t r = 0; r < rows; r++)
      count[r] = NAME(attended)(weights + r * c->tokens, c->tokens, c->k[batch], room + r * c->tokens);
    for (int64_t column = 0; column < c->width; column += STRIP)
      for (int64_t r = 0; r < rows; r++)
        if (count[r])
          NAME(add_strip)(states + column, c->width, room + r * c->tokens, count[r], hidden + r * c->width + column,
                          c->width - column < STRIP ? c->width - column : STRIP, sums[r]);
    for (int64_t r = 0; r < rows; r++) {
      float length = __builtin_sqrtf(sums[r][1]) * __builtin_sqrtf(sums[r][2]);
      c->out[row * c->slots + first + r] = length > 0 ? sums[r][0] / length : 0;
    }
  }
}

static int64_t NAME(external_scratch)(const external_call *call, int64_t threads) {
  return threads * EXTERNAL_PARTS * EXTERNAL_ROWS * call->tokens * (int64_t)sizeof(int32_t);
}

static void NAME(external)(const external_call *call, int64_t threads, team *t) {
  external_state s = {*call, threads * EXTERNAL_PARTS, team_scratch(t)};
  team_run(t, NAME(external_part), &s, s.parts);
}

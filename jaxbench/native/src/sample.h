/* A token of each row: temperature, top-k, top-p, min-p and the largest sum of logit and Gumbel noise, as jaxbench/sample.py's
 * draw computes it, in one pass over what can win. Part of kernels.h.
 *
 * Noise is named by (key, site, step, row, token), so it is computed for single tokens only: those the filters keep and whose
 * logit is not too far below the best sum so far for any noise to reach it. */

#include <math.h>

#define MOST_NOISE 17.33f /* -log of the least exponential, -log1p(-2^-25) */

typedef struct {
  const float *logits;
  int64_t size;
  const uint32_t *key; /* two halves */
  uint32_t step;
  const int32_t *row_ids;
  sampling how;
  int32_t *out;
  float *scratch; /* [threads, 3 size]: logits over the temperature; candidates and their weights */
  int64_t rows;
  _Atomic int64_t next;
} draw_state;

/* Word of one token: jaxbench/philox.py. */
static uint32_t NAME(word_of)(const draw_state *s, int64_t row, int64_t token) {
  uint32_t c[4] = {(uint32_t)(token / 4), (uint32_t)s->row_ids[row], s->step, s->how.site}, k[2] = {s->key[0], s->key[1]};
  for (int round = 0; round < 10; round++) {
    uint64_t first = (uint64_t)0xD2511F53u * c[0], second = (uint64_t)0xCD9E8D57u * c[2];
    uint32_t next[4] = {(uint32_t)(second >> 32) ^ c[1] ^ k[0], (uint32_t)second, (uint32_t)(first >> 32) ^ c[3] ^ k[1], (uint32_t)first};
    memcpy(c, next, sizeof c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c[token % 4];
}

static float NAME(gumbel)(uint32_t word) {
  uint32_t k = word >> 8;
  float exponential = k < 1u << 23 ? -logf(((float)k + 0.5f) * 0x1p-24f) : -log1pf(-((float)((1u << 24) - 1 - k) + 0.5f) * 0x1p-24f);
  return -logf(exponential);
}

INLINE void NAME(swap)(float *values, float *weights, int64_t i, int64_t j) {
  float value = values[i], weight = weights ? weights[i] : 0.0f;
  values[i] = values[j], values[j] = value;
  if (weights) weights[i] = weights[j], weights[j] = weight;
}

/* The largest of `values` such that those at or above it weigh `target` together, their least where all weigh less; weights
 * NULL: one each. Quickselect by three parts (larger, equal, smaller); both arrays change their order. */
static float NAME(heaviest)(float *values, float *weights, int64_t count, double target) {
  double above = 0; /* the weight of what is larger than all of [first, last), where the answer lies */
  int64_t first = 0, last = count;
  while (last - first > 1) {
    float a = values[first], b = values[(first + last) / 2], c = values[last - 1];
    float pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
    int64_t larger = first, smaller = last;
    double weight = 0, equal = 0;
    for (int64_t i = first; i < smaller;) {
      float own = weights ? weights[i] : 1.0f;
      if (values[i] > pivot) {
        weight += own;
        NAME(swap)(values, weights, i++, larger++);
      } else if (values[i] < pivot) {
        NAME(swap)(values, weights, i, --smaller);
      } else {
        equal += own;
        i++;
      }
    }
    if (above + weight >= target) {
      last = larger;
    } else if (above + weight + equal >= target || smaller == last) {
      return pivot;
    } else {
      above += weight + equal;
      first = smaller;
    }
  }
  return values[first];
}

/* First of sixteen places on, or of what is left of x, that may hold a value at or above the bound; `size` where none does. */
INLINE int64_t NAME(next_from)(const float *x, int64_t i, int64_t size, float bound) {
  while (i + 16 <= size && vf_largest(vf_load(x + i)) < bound) i += 16;
  return i;
}

/* The k-th largest value: a bound from the largest of each sixteen, then among those at or above it. */
static float NAME(kth_largest)(const float *x, int64_t size, int64_t k, float *room) {
  int64_t groups = 0, count = 0, i = 0;
  for (; i + 256 <= size; i += 256, groups += 16) {
    vf top = vf_load(x + i);
    for (int v = 1; v < 16; v++) top = vf_max(vf_load(x + i + 16 * v), top);
    vf_store(room + groups, top);
  }
  for (; i < size; i++) room[groups++] = x[i];
  float bound = groups >= k ? NAME(heaviest)(room, NULL, groups, (double)k) : -__builtin_inff();
  for (i = NAME(next_from)(x, 0, size, bound); i < size; i = NAME(next_from)(x, i, size, bound))
    for (int64_t end = i + 16 < size ? i + 16 : size; i < end; i++)
      if (x[i] >= bound) room[count++] = x[i];
  return NAME(heaviest)(room, NULL, count, (double)k);
}

/* Weight of what is at or above `least`, relative to the largest. */
static double NAME(mass_from)(const float *x, int64_t size, float largest, float least) {
  double total = 0;
  int64_t i = 0;
  for (int64_t start = 0; start + 16 <= size;) {
    vf sum = vf_set1(0.0f);
    for (int64_t end = start + 4096; i + 16 <= size && i < end; i += 16) {
      float weights[16];
      vf_store(weights, exponential(vf_sub(vf_load(x + i), vf_set1(largest))));
      for (int lane = 0; lane < 16; lane++) weights[lane] = x[i + lane] >= least ? weights[lane] : 0.0f;
      sum = vf_add(sum, vf_load(weights));
    }
    total += vf_sum(sum);
    start = i;
  }
  for (; i < size; i++) total += x[i] >= least ? expf(x[i] - largest) : 0.0f;
  return total;
}

static float NAME(nucleus)(const float *x, int64_t size, float largest, float least, float top_p, float *room) {
  double target = (double)top_p * NAME(mass_from)(x, size, largest, least);
  float bounds[] = {largest - 3.0f, largest - 6.0f, largest - 12.0f, -__builtin_inff()};
  for (int b = 0; b < 4; b++) {
    float bound = bounds[b] > least ? bounds[b] : least;
    int64_t count = 0;
    double mass = 0;
    for (int64_t i = NAME(next_from)(x, 0, size, bound); i < size; i = NAME(next_from)(x, i, size, bound))
      for (int64_t end = i + 16 < size ? i + 16 : size; i < end; i++)
        if (x[i] >= bound) {
          room[count] = x[i];
          room[size + count] = expf(x[i] - largest);
          mass += room[size + count++];
        }
    if (mass >= target || bound == least || b == 3) return NAME(heaviest)(room, room + size, count, target);
  }
  return least;
}

typedef struct {
  float sum;
  int64_t token;
} winner;

INLINE void NAME(try_token)(const draw_state *s, int64_t row, const float *x, int64_t token, winner *best) {
  float sum = x[token] + NAME(gumbel)(NAME(word_of)(s, row, token));
  if (sum > best->sum || (sum == best->sum && token < best->token)) *best = (winner){sum, token};
}

/* Words of 64 tokens from a multiple of 64 on, the 24 bits that noise is made of. */
INLINE void NAME(words_of_64)(const draw_state *s, int64_t row, int64_t first, uint32_t *out) {
  uint32_t c[4][16], k0 = s->key[0], k1 = s->key[1];
  for (int i = 0; i < 16; i++)
    c[0][i] = (uint32_t)(first / 4 + i), c[1][i] = (uint32_t)s->row_ids[row], c[2][i] = s->step, c[3][i] = s->how.site;
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < 16; i++) {
      uint64_t product0 = (uint64_t)0xD2511F53u * c[0][i], product1 = (uint64_t)0xCD9E8D57u * c[2][i];
      uint32_t one = c[1][i], three = c[3][i];
      c[0][i] = (uint32_t)(product1 >> 32) ^ one ^ k0, c[1][i] = (uint32_t)product1;
      c[2][i] = (uint32_t)(product0 >> 32) ^ three ^ k1, c[3][i] = (uint32_t)product0;
    }
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) out[4 * i + j] = c[j][i] >> 8;
}

/* What rounding may make of a sum: it is large where the temperature is tiny. */
INLINE float slack_of(const winner *best) { return 1e-3f + 5e-7f * __builtin_fabsf(best->sum); }

/* 64 tokens by one test without a logarithm: with u uniform, x - log(-log u) > best needs -log u < e^(x - best), and -log u is
 * at least 1 - u. Few pass it and are computed exactly. */
static void NAME(try_64)(const draw_state *s, int64_t row, const float *x, int64_t first, float least, float near, winner *best) {
  uint32_t words[64];
  float reach[64];
  NAME(words_of_64)(s, row, first, words);
  for (int v = 0; v < 4; v++)
    vf_store(reach + 16 * v, exponential(vf_sub(vf_load(x + first + 16 * v), vf_set1(best->sum - slack_of(best)))));
  uint32_t is_any = 0;
  for (int i = 0; i < 64; i++) is_any |= ((float)(0xffffffu - words[i]) + 0.5f) * 0x1p-24f < reach[i];
  if (!is_any) return;
  for (int i = 0; i < 64; i++) {
    int64_t token = first + i;
    if (((float)(0xffffffu - words[i]) + 0.5f) * 0x1p-24f < reach[i] && x[token] >= least && x[token] < near)
      NAME(try_token)(s, row, x, token, best);
  }
}

/* The most probable first: their sum rules most others out. */
static void NAME(draw_from)(const draw_state *s, int64_t row, const float *x, float largest, float least) {
  winner best = {-__builtin_inff(), 0};
  float near = largest - 2.0f > least ? largest - 2.0f : least;
  int64_t size = s->size, i = 0;
  for (i = NAME(next_from)(x, 0, size, near); i < size; i = NAME(next_from)(x, i, size, near))
    for (int64_t end = i + 16 < size ? i + 16 : size; i < end; i++)
      if (x[i] >= near) NAME(try_token)(s, row, x, i, &best);
  for (i = 0; i + 64 <= size; i += 64) {
    vf top = vf_max(vf_max(vf_load(x + i), vf_load(x + i + 16)), vf_max(vf_load(x + i + 32), vf_load(x + i + 48)));
    float most = vf_largest(top);
    if (most >= least && most >= best.sum - MOST_NOISE - slack_of(&best)) NAME(try_64)(s, row, x, i, least, near, &best);
  }
  for (; i < size; i++)
    if (x[i] >= least && x[i] < near && x[i] >= best.sum - MOST_NOISE - slack_of(&best)) NAME(try_token)(s, row, x, i, &best);
  s->out[row] = (int32_t)best.token;
}

static void NAME(draw_row)(const draw_state *s, int64_t row, float *x) {
  const float *logits = s->logits + row * s->size;
  float *room = x + s->size;
  vf top = vf_set1(-__builtin_inff());
  int is_nan = 0;
  for (int64_t i = 0; i < s->size; i++) {
    x[i] = logits[i] / s->how.temperature;
    is_nan |= x[i] != x[i];
  }
  int64_t whole = s->size / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) top = vf_max(vf_load(x + i), top);
  float largest = vf_largest(top), least = -__builtin_inff();
  for (int64_t i = whole; i < s->size; i++) largest = x[i] > largest ? x[i] : largest;
  s->out[row] = 0;
  if (is_nan) {
    while (x[s->out[row]] == x[s->out[row]]) s->out[row]++;
    return;
  }
  if (!(largest > -__builtin_inff() && largest < __builtin_inff())) { /* nothing to choose from, or one that is infinite */
    while (s->out[row] < s->size - 1 && x[s->out[row]] < largest) s->out[row]++;
    return;
  }
  if (s->how.top_k > 0 && s->how.top_k < s->size) least = NAME(kth_largest)(x, s->size, s->how.top_k, room);
  if (s->how.top_p < 1.0f) least = NAME(nucleus)(x, s->size, largest, least, s->how.top_p, room);
  if (s->how.min_p > 0.0f) {
    float bound = largest + logf(s->how.min_p);
    least = bound > least ? bound : least;
  }
  NAME(draw_from)(s, row, x, largest, least);
}

static void NAME(draw_worker)(void *context, int64_t worker) {
  draw_state *s = context;
  for (int64_t row; (row = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) < s->rows;)
    NAME(draw_row)(s, row, s->scratch + 3 * worker * s->size);
}

static int64_t NAME(draw_scratch)(int64_t threads, int64_t size) { return 3 * threads * size * (int64_t)sizeof(float); }

static void NAME(draw)(const float *logits, int64_t rows, int64_t size, const uint32_t *key, uint32_t step, const int32_t *row_ids,
                       sampling how, int32_t *out, team *t) {
  draw_state s = {logits, size, key, step, row_ids, how, out, team_scratch(t), rows};
  team_run(t, NAME(draw_worker), &s, team_threads(t));
}

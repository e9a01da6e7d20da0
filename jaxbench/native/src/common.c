/* What does not depend on the instruction set: sizes, checks, packing, embedding, and which kernels run here. */

#include <stdio.h>

#include "native.h"

int64_t tile_bytes(int32_t format, int64_t inputs) {
  int64_t groups = num_groups(inputs);
  switch (format) {
    case FORMAT_F32: return groups * GROUP * TILE * 4;
    case FORMAT_BF16: return groups * GROUP * TILE * 2;
    case FORMAT_INT8: return groups * GROUP * TILE + 4 * TILE;
    case FORMAT_Q8_0: return groups * (GROUP * TILE + 2 * TILE);
    case FORMAT_Q4_0: return groups * (GROUP * TILE / 2 + 2 * TILE);
    default: return groups * (GROUP * TILE / 2 + 4 * TILE);
  }
}

float f16_value(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u, out;
  float value;
  if (exponent == 31) {
    out = sign | 0x7f800000u | fraction << 13;
  } else if (exponent) {
    out = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    value = (float)fraction * 5.9604644775390625e-8f; /* 2^-24 */
    memcpy(&out, &value, 4);
    out |= sign;
  }
  memcpy(&value, &out, 4);
  return value;
}

/* Packing: `source` holds outputs x inputs; floats for FORMAT_F32, 16 bits for FORMAT_BF16, bytes q for FORMAT_INT8 (with
 * `scales`, one an output), and GGUF's blocks for the others. What lies outside the matrix is zero. */

static uint8_t *group_of(uint8_t *tile, int32_t format, int64_t g) {
  switch (format) {
    case FORMAT_INT8: return tile + 4 * TILE + g * GROUP * TILE;
    case FORMAT_Q8_0: return tile + g * (GROUP * TILE + 2 * TILE);
    case FORMAT_Q4_0: return tile + g * (GROUP * TILE / 2 + 2 * TILE);
    default: return tile + g * (GROUP * TILE / 2 + 4 * TILE);
  }
}

/* Where byte k of output o lies among a group's bytes: lanes of four inputs, sixteen outputs a line. */
INLINE int64_t byte_place(int64_t o, int64_t k) { return (k / 4 * 2 + o / 16) * 64 + o % 16 * 4 + k % 4; }
/* The same of four bits: inputs 8s to 8s + 3 in low halves, the next four in high halves. */
INLINE int64_t nibble_place(int64_t o, int64_t k) { return (k / 8 * 2 + o / 16) * 64 + o % 16 * 4 + k % 4; }

INLINE uint32_t word_at(const uint8_t *bytes) {
  uint32_t word;
  memcpy(&word, bytes, 4);
  return word;
}

/* Whether one of `count` numbers of 2 or 4 bytes has these bits, its exponent's, all set: it is infinite or NaN. */
INLINE int has_infinite(const void *numbers, int64_t count, int64_t size, uint32_t exponent) {
  int found = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = 0;
    memcpy(&bits, (const uint8_t *)numbers + i * size, (size_t)size);
    found |= (bits & exponent) == exponent;
  }
  return found;
}

/* These copy the outputs of a tile and return whether all numbers are finite. */
static int pack_floats(const matrix *m, uint8_t *tile, int64_t first, const void *source) {
  int64_t size = m->format == FORMAT_F32 ? 4 : 2;
  int is_bad = 0;
  for (int64_t o = 0; o < TILE && first + o < m->outputs; o++) {
    const uint8_t *from = (const uint8_t *)source + (first + o) * m->inputs * size;
    is_bad |= size == 4 ? has_infinite(from, m->inputs, 4, 0x7f800000) : has_infinite(from, m->inputs, 2, 0x7f80);
    for (int64_t k = 0; k < m->inputs; k++) { /* pairs of inputs; F32: first of both, then second of both */
      int64_t pair = (k / 2 * 2 + o / 16) * 32;
      int64_t place = m->format == FORMAT_F32 ? pair + k % 2 * 16 + o % 16 : pair + o % 16 * 2 + k % 2;
      memcpy(tile + place * size, from + k * size, (size_t)size);
    }
  }
  return !is_bad;
}

static int pack_bytes(const matrix *m, uint8_t *tile, int64_t first, const int8_t *source, const float *scales) {
  for (int64_t g = 0; g < num_groups(m->inputs); g++) memset(group_of(tile, m->format, g), 128, GROUP * TILE);
  for (int64_t o = 0; o < TILE && first + o < m->outputs; o++) {
    memcpy(tile + 4 * o, scales + first + o, 4);
    for (int64_t k = 0; k < m->inputs; k++)
      group_of(tile, m->format, k / GROUP)[byte_place(o, k % GROUP)] = (uint8_t)(source[(first + o) * m->inputs + k] + 128);
  }
  return !has_infinite(scales + first, m->outputs - first < TILE ? m->outputs - first : TILE, 4, 0x7f800000);
}

INLINE int pack_blocks(const matrix *m, uint8_t *tile, int64_t first, const uint8_t *source, const int is_byte, const int num_scales) {
  const int64_t block = 2 * num_scales + (is_byte ? 32 : 16), groups = num_groups(m->inputs);
  int is_bad = 0;
  for (int64_t g = 0; g < groups; g++) {
    uint8_t *to = group_of(tile, m->format, g), *values = to + 64 * num_scales;
    if (is_byte) memset(values, 128, GROUP * TILE);
    for (int64_t o = 0; o < TILE && first + o < m->outputs; o++) {
      const uint8_t *from = source + ((first + o) * groups + g) * block, *q = from + 2 * num_scales;
      for (int i = 0; i < num_scales; i++) memcpy(to + 64 * i + 2 * o, from + 2 * i, 2);
      is_bad |= has_infinite(from, num_scales, 2, 0x7c00);
      for (int64_t k = 0; is_byte && k < GROUP; k += 4) { /* four bytes at once: packing a file is most of its loading */
        uint32_t four = word_at(q + k) ^ 0x80808080u;
        memcpy(values + byte_place(o, k), &four, 4);
      }
      for (int64_t k = 0; !is_byte && k < GROUP; k += 8) { /* 4 low, 4 high: GGUF has k in q[k % 16], low halves first */
        int shift = k < 16 ? 0 : 4;
        uint32_t low = word_at(q + k % 16) >> shift & 0x0f0f0f0fu, high = word_at(q + k % 16 + 4) >> shift & 0x0f0f0f0fu;
        low |= high << 4;
        memcpy(values + nibble_place(o, k), &low, 4);
      }
    }
  }
  return !is_bad;
}

static int pack_gguf(const matrix *m, uint8_t *tile, int64_t first, const uint8_t *source) {
  if (m->format == FORMAT_Q8_0) return pack_blocks(m, tile, first, source, 1, 1);
  return m->format == FORMAT_Q4_0 ? pack_blocks(m, tile, first, source, 0, 1) : pack_blocks(m, tile, first, source, 0, 2);
}

int pack_matrix(matrix *m, uint8_t *packed, const void *source, const float *scales) {
  int64_t bytes = tile_bytes(m->format, m->inputs);
  int is_finite = 1;
  for (int64_t tile = 0; tile < num_tiles(m->outputs); tile++) {
    uint8_t *to = packed + tile * bytes;
    memset(to, 0, (size_t)bytes);
    if (m->format < FORMAT_INT8) is_finite &= pack_floats(m, to, tile * TILE, source);
    else if (m->format == FORMAT_INT8) is_finite &= pack_bytes(m, to, tile * TILE, source, scales);
    else is_finite &= pack_gguf(m, to, tile * TILE, source);
  }
  m->data = packed;
  return is_finite;
}

/* Outputs `tokens` of the matrix as rows: the embedding of a tied head. A token outside it gives zeros. */
void embed_rows(const matrix *m, const int32_t *tokens, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i++) {
    float *to = out + i * m->inputs;
    int64_t token = tokens[i], o = token % TILE;
    if (token < 0 || token >= m->outputs) {
      memset(to, 0, sizeof(float) * (size_t)m->inputs);
      continue;
    }
    const uint8_t *tile = m->data + token / TILE * tile_bytes(m->format, m->inputs);
    for (int64_t k = 0; k < m->inputs; k++) {
      int64_t pair = (k / 2 * 2 + o / 16) * 32, in_group = k % GROUP;
      if (m->format == FORMAT_F32) {
        memcpy(to + k, tile + 4 * (pair + k % 2 * 16 + o % 16), 4);
      } else if (m->format == FORMAT_BF16) {
        uint32_t bits = (uint32_t)((const uint16_t *)tile)[pair + o % 16 * 2 + k % 2] << 16;
        memcpy(to + k, &bits, 4);
      } else {
        const uint8_t *g = group_of((uint8_t *)tile, m->format, k / GROUP);
        uint16_t scale[2] = {0, 0};
        memcpy(scale, g + 2 * o, 2);
        memcpy(scale + 1, g + 64 + 2 * o, 2);
        if (m->format == FORMAT_INT8) {
          to[k] = (float)(g[byte_place(o, in_group)] - 128) * ((const float *)tile)[o];
        } else if (m->format == FORMAT_Q8_0) {
          to[k] = (float)(g[64 + byte_place(o, in_group)] - 128) * f16_value(scale[0]);
        } else {
          int is_high = in_group % 8 >= 4, q = g[(m->format == FORMAT_Q4_1 ? 128 : 64) + nibble_place(o, in_group)];
          q = is_high ? q >> 4 : q & 15;
          to[k] = m->format == FORMAT_Q4_0 ? (float)(q - 8) * f16_value(scale[0])
                                           : (float)q * f16_value(scale[0]) + f16_value(scale[1]);
        }
      }
    }
  }
}

const char *check_matrix(const matrix *m) {
  if (m->format < 0 || m->format >= NUM_FORMATS) return "unknown format of a matrix";
  if (m->inputs < 1 || m->outputs < 1) return "a matrix without inputs or outputs";
  return NULL;
}

const char *check_block(const block_call *c) {
  const matrix *all[7] = {&c->q_proj, &c->k_proj, &c->v_proj, &c->o_proj, &c->gate_proj, &c->up_proj, &c->down_proj};
  static _Thread_local char text[160];
  int64_t query = c->num_heads * c->head_dim, kv = c->num_kv_heads * c->head_dim, d = c->d_model, ff = c->d_ff;
  int64_t inputs[7] = {d, d, d, query, d, d, ff}, outputs[7] = {query, kv, kv, d, ff, ff, d};
  for (int i = 0; i < 7; i++) {
    if (i == 4 && c->activation == ACTIVATION_GELU) continue;
    const char *problem = check_matrix(all[i]);
    if (problem) return problem;
    if (all[i]->inputs != inputs[i] || all[i]->outputs != outputs[i]) return "a block's matrix does not have the size of its place";
  }
  if (c->cache.kind < CACHE_F32 || c->cache.kind > CACHE_INT8) return "unknown kind of cache";
  if (c->rows < 1 || c->rows > MAX_ROWS) return "a block takes 1 to 4096 rows";
  if (c->head_dim < 1 || c->head_dim > 1024) return "a block takes heads of 1 to 1024";
  if (c->cosine && c->head_dim % 2) return "rotary positions need an even head_dim";
  if (c->num_kv_heads < 1 || c->num_heads < 1 || c->num_heads % c->num_kv_heads) return "num_heads is not a multiple of num_kv_heads";
  if (!c->attention_norm.scale || !c->mlp_norm.scale) return "a block without its norms";
  if (c->planes != 1 && c->planes != 3) return "activations have 1 or 3 planes";
  if (c->cache.page_size < 1 || c->cache.page_size % 64) return "page_size is not a multiple of 64";
  int64_t room = c->cache.page_size * c->cache.max_pages;
  for (int64_t r = 0; r < c->rows; r++) {
    if (c->positions[r] < 0) continue;
    if (c->positions[r] >= room) {
      snprintf(text, sizeof text, "row %d: position %d, but its pages hold %lld", (int)r, c->positions[r], (long long)room);
      return text;
    }
    for (int64_t p = 0; p <= c->positions[r] / c->cache.page_size; p++) {
      int32_t page = c->cache.table[r * c->cache.max_pages + p];
      if (page < 0 || page >= c->cache.num_pages) {
        snprintf(text, sizeof text, "row %d: page %d of %lld", (int)r, page, (long long)c->cache.num_pages);
        return text;
      }
    }
  }
  return NULL;
}

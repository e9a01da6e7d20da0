/* What Python calls through ctypes: packing, and the kernels with threads of their own. PyTorch's side and the tests. */

#include "native.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int jaxbench_pack(int32_t format, int64_t inputs, int64_t outputs, const void *source, const float *scales, uint8_t *packed) {
  matrix m = {NULL, inputs, outputs, format};
  return pack_matrix(&m, packed, source, scales);
}

EXPORT void jaxbench_embed(const matrix *m, const int32_t *tokens, int64_t count, float *out) { embed_rows(m, tokens, count, out); }

EXPORT int64_t jaxbench_block_call_bytes(void) { return sizeof(block_call); }

/* 0, 1: not enough memory. */
EXPORT int jaxbench_linear(const matrix *m, const float *x, int64_t rows, const float *bias, int32_t planes, int64_t threads, float *out) {
  team *t = team_begin(threads, INSTRUCTION_SET.linear_scratch(m, rows, planes), own_pool_schedule, (void *)(intptr_t)threads);
  if (!t) return 1;
  INSTRUCTION_SET.linear(m, x, rows, bias, planes, out, t);
  team_end(t);
  return 0;
}

EXPORT int jaxbench_norm(const float *x, int64_t rows, int64_t size, const float *scale, const float *bias, float eps, int64_t threads, float *out) {
  team *t = team_begin(threads, 0, own_pool_schedule, (void *)(intptr_t)threads);
  if (!t) return 1;
  INSTRUCTION_SET.norm(x, rows, size, (norm){scale, bias}, eps, out, t);
  team_end(t);
  return 0;
}

EXPORT int jaxbench_largest(const float *logits, int64_t rows, int64_t size, int64_t threads, int32_t *out) {
  team *t = team_begin(threads, 0, own_pool_schedule, (void *)(intptr_t)threads);
  if (!t) return 1;
  INSTRUCTION_SET.largest(logits, rows, size, out, t);
  team_end(t);
  return 0;
}

EXPORT int jaxbench_draw(const float *logits, int64_t rows, int64_t size, const uint32_t *key, uint32_t step, const int32_t *row_ids,
                         const sampling *how, int64_t threads, int32_t *out) {
  team *t = team_begin(threads, INSTRUCTION_SET.draw_scratch(threads, size), own_pool_schedule, (void *)(intptr_t)threads);
  if (!t) return 1;
  INSTRUCTION_SET.draw(logits, rows, size, key, step, row_ids, *how, out, t);
  team_end(t);
  return 0;
}

/* Runs the blocks of a decoder for one token a row: x [rows, d_model] in place. calls: as prepared once, without what is given
 * here; is_local: which layers take the second pair of angles. NULL, or what is wrong. */
EXPORT const char *jaxbench_decode(block_call *calls, const uint8_t *is_local, int64_t count, float *x, int64_t rows,
                                   const int32_t *positions, const int32_t *table, const float *const angles[4], int64_t threads) {
  for (int64_t i = 0; i < count; i++) {
    block_call *c = calls + i;
    c->x = c->out = x;
    c->rows = rows;
    c->positions = positions;
    c->cosine = angles[is_local[i] ? 2 : 0];
    c->sine = angles[is_local[i] ? 3 : 1];
    c->cache.table = table;
    const char *problem = check_block(c);
    if (problem) return problem;
    team *t = team_begin(threads, INSTRUCTION_SET.block_scratch(c), own_pool_schedule, (void *)(intptr_t)threads);
    if (!t) return "not enough memory for a block";
    INSTRUCTION_SET.block(c, t);
    team_end(t);
  }
  return NULL;
}

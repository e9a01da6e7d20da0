/* What Python calls through ctypes: packing, the kernels with threads of their own, questions. PyTorch's side and the tests. */

#include "native.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT const char *jaxbench_instructions(void) { return INSTRUCTION_SET.name; }

EXPORT int64_t jaxbench_tile_bytes(int32_t format, int64_t inputs) { return tile_bytes(format, inputs); }

EXPORT void jaxbench_pack(int32_t format, int64_t inputs, int64_t outputs, const void *source, const float *scales, uint8_t *packed) {
  matrix m = {NULL, inputs, outputs, format};
  pack_matrix(&m, packed, source, scales);
}

EXPORT void jaxbench_embed(const matrix *m, const int32_t *tokens, int64_t count, float *out) { embed_rows(m, tokens, count, out); }

/* 0, 1: not enough memory. */
EXPORT int jaxbench_linear(const matrix *m, const float *x, int64_t rows, const float *bias, int32_t planes, int64_t threads, float *out) {
  team *t = team_begin(threads, INSTRUCTION_SET.linear_scratch(m, rows, planes), own_pool_schedule, (void *)(intptr_t)threads);
  if (!t) return 1;
  INSTRUCTION_SET.linear(m, x, rows, bias, planes, out, t);
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

/* Runs blocks one after another, each on the output of the one before: NULL, or what is wrong. */
EXPORT const char *jaxbench_blocks(const block_call *calls, int64_t count, int64_t threads) {
  for (int64_t i = 0; i < count; i++) {
    const char *problem = check_block(calls + i);
    if (problem) return problem;
    team *t = team_begin(threads, INSTRUCTION_SET.block_scratch(calls + i), own_pool_schedule, (void *)(intptr_t)threads);
    if (!t) return "not enough memory for a block";
    INSTRUCTION_SET.block(calls + i, t);
    team_end(t);
  }
  return NULL;
}

/* The kernels as XLA custom calls, on the plain C interface of XLA's FFI. jaxbench/native/calls.py makes the calls. */

#include <stdio.h>

#include "native.h"
#include "xla/ffi/api/c_api.h"

#define EXPORT __attribute__((visibility("default")))

static XLA_FFI_Error *failed(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* Non-zero where XLA asks for the version instead of calling. */
static int is_question(XLA_FFI_CallFrame *frame) {
  __typeof__(frame->extension_start) extension = frame->extension_start; /* jax 0.11 calls its type otherwise */
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

static const XLA_FFI_Buffer *argument(const XLA_FFI_CallFrame *f, int i) { return f->args.args[i]; }
static const XLA_FFI_Buffer *result(const XLA_FFI_CallFrame *f, int i) { return f->rets.rets[i]; }

/* Data of an argument; NULL where it is empty, which stands for none. */
static const void *data_of(const XLA_FFI_CallFrame *f, int i) {
  const XLA_FFI_Buffer *b = argument(f, i);
  for (int64_t d = 0; d < b->rank; d++)
    if (b->dims[d] == 0) return NULL;
  return b->data;
}

/* An attribute of the given name that is an array of `count` 64-bit values; NULL where it is not. */
static const void *attribute(const XLA_FFI_CallFrame *f, const char *name, size_t count) {
  for (int64_t i = 0; i < f->attrs.size; i++) {
    const XLA_FFI_ByteSpan *span = f->attrs.names[i];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len) && f->attrs.types[i] == XLA_FFI_AttrType_ARRAY) {
      const XLA_FFI_Array *array = f->attrs.attrs[i];
      if (array->size == count && (array->dtype == XLA_FFI_DataType_S64 || array->dtype == XLA_FFI_DataType_F64)) return array->data;
    }
  }
  return NULL;
}

static int schedule(void *host, void (*task)(void *), void *data) {
  const XLA_FFI_CallFrame *frame = host;
  XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, task, data};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
  return 1;
}

/* Threads to ask for: `wanted`, or as many as XLA's pool has. */
static int64_t threads_of(const XLA_FFI_CallFrame *frame, int64_t wanted) {
  int64_t found = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &found};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error) {
    XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    frame->api->XLA_FFI_Error_Destroy(&destroy);
    return 1;
  }
  return wanted > 0 && wanted < found ? wanted : found;
}

#define BLOCK_ARGUMENTS 33
#define BLOCK_INTS 15
#define BLOCK_FLOATS 3

static void read_block(const XLA_FFI_CallFrame *f, const int64_t *ints, const double *floats, block_call *c) {
  const XLA_FFI_Buffer *x = argument(f, 0), *keys = argument(f, 5), *table = argument(f, 2);
  *c = (block_call){.rows = x->dims[0], .d_model = x->dims[1], .d_ff = ints[0], .num_heads = ints[1],
                    .num_kv_heads = ints[2], .head_dim = ints[3], .window = ints[4], .activation = (int32_t)ints[5],
                    .planes = (int32_t)ints[6], .norm_eps = (float)floats[0], .query_scale = (float)floats[1],
                    .softcap = (float)floats[2], .x = x->data, .out = result(f, 0)->data,
                    .positions = data_of(f, 1), .cosine = data_of(f, 3), .sine = data_of(f, 4)};
  void *caches[4];
  for (int i = 0; i < 4; i++) { /* XLA gives the result the argument's place; a copy otherwise */
    const XLA_FFI_Buffer *from = argument(f, 5 + i), *to = result(f, 1 + i);
    caches[i] = data_of(f, 5 + i) ? to->data : NULL;
    int64_t bytes = from->dtype == XLA_FFI_DataType_S8 ? 1 : from->dtype == XLA_FFI_DataType_BF16 ? 2 : 4;
    for (int64_t d = 0; d < from->rank; d++) bytes *= from->dims[d];
    if (from->data != to->data) memcpy(to->data, from->data, (size_t)bytes);
  }
  int32_t kind = keys->dtype == XLA_FFI_DataType_S8 ? CACHE_INT8 : keys->dtype == XLA_FFI_DataType_BF16 ? CACHE_BF16 : CACHE_F32;
  c->cache = (kv_cache){caches[0], caches[1], caches[2], caches[3], table->data, keys->dims[0], keys->dims[3], table->dims[1], kind};
  norm *norms[6] = {&c->attention_norm, &c->mlp_norm, &c->attention_post_norm, &c->mlp_post_norm, &c->q_norm, &c->k_norm};
  for (int i = 0; i < 6; i++) {
    norms[i]->scale = data_of(f, i < 4 ? 9 + 2 * i : 13 + i);
    norms[i]->bias = i < 4 ? data_of(f, 10 + 2 * i) : NULL;
  }
  int64_t query = c->num_heads * c->head_dim, kv = c->num_kv_heads * c->head_dim, d = c->d_model, ff = c->d_ff;
  int64_t inputs[7] = {d, d, d, query, d, d, ff}, outputs[7] = {query, kv, kv, d, ff, ff, d};
  matrix *matrices[7] = {&c->q_proj, &c->k_proj, &c->v_proj, &c->o_proj, &c->gate_proj, &c->up_proj, &c->down_proj};
  const float **biases[7] = {&c->q_bias, &c->k_bias, &c->v_bias, &c->o_bias, &c->gate_bias, &c->up_bias, &c->down_bias};
  for (int i = 0; i < 7; i++) {
    *matrices[i] = (matrix){data_of(f, 19 + i), inputs[i], outputs[i], (int32_t)ints[8 + i]};
    *biases[i] = data_of(f, 26 + i);
  }
}

static int64_t count_of(const XLA_FFI_Buffer *b) {
  int64_t count = 1;
  for (int64_t d = 0; d < b->rank; d++) count *= b->dims[d];
  return count;
}

/* Types are not converted here: what has another one would be read past its end. */
static const char *check_types(const XLA_FFI_CallFrame *f) {
  XLA_FFI_DataType pages = argument(f, 5)->dtype;
  if (pages != XLA_FFI_DataType_F32 && pages != XLA_FFI_DataType_BF16 && pages != XLA_FFI_DataType_S8)
    return "jaxbench block: pages are not float32, bfloat16 or int8";
  for (int i = 0; i < BLOCK_ARGUMENTS; i++) {
    int is_index = i == 1 || i == 2, is_page = i == 5 || i == 6, is_packed = i >= 19 && i < 26;
    XLA_FFI_DataType wanted = is_index ? XLA_FFI_DataType_S32 : is_page ? pages : is_packed ? XLA_FFI_DataType_U8 : XLA_FFI_DataType_F32;
    if (argument(f, i)->dtype != wanted) return "jaxbench block: an argument has another type than its place";
  }
  if (argument(f, 0)->rank != 2 || argument(f, 1)->rank != 1 || argument(f, 2)->rank != 2 || argument(f, 5)->rank != 4 || argument(f, 6)->rank != 4)
    return "jaxbench block: an argument has another rank than its place";
  return NULL;
}

/* Angles, scales of pages, norms and biases must be as long as the call reads them, or empty. */
static const char *check_vectors(const XLA_FFI_CallFrame *f, const block_call *c) {
  int64_t query = c->num_heads * c->head_dim, kv = c->num_kv_heads * c->head_dim, d = c->d_model, ff = c->d_ff;
  int64_t angles = c->rows * (c->head_dim / 2), slots = c->cache.num_pages * c->num_kv_heads * c->cache.page_size;
  int64_t wanted[BLOCK_ARGUMENTS] = {[3] = angles, angles, [7] = slots, slots, d, d, d, d, d, d, d, d, c->head_dim, c->head_dim,
                                     [26] = query, kv, kv, d, ff, ff, d};
  for (int i = 3; i < BLOCK_ARGUMENTS; i++) {
    int64_t count = count_of(argument(f, i));
    if (wanted[i] && count && count != wanted[i]) return "jaxbench block: angles, scales, norms or biases do not have the size of their place";
  }
  if (!c->cosine != !c->sine) return "jaxbench block: cosine or sine alone";
  if (c->cache.kind == CACHE_INT8 && (!c->cache.key_scales || !c->cache.value_scales)) return "jaxbench block: an 8-bit cache without scales";
  return NULL;
}

/* The packed bytes must be those of the shape: a wrong format would be read past its end. */
static const char *check_bytes(const XLA_FFI_Buffer *b, const matrix *m) {
  if (check_matrix(m)) return check_matrix(m);
  if (b->rank != 1 || b->dims[0] != num_tiles(m->outputs) * tile_bytes(m->format, m->inputs))
    return "packed weights do not have the size of their shape and format";
  return NULL;
}

EXPORT XLA_FFI_Error *jaxbench_xla_block(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const int64_t *ints = attribute(frame, "ints", BLOCK_INTS);
  const double *floats = attribute(frame, "floats", BLOCK_FLOATS);
  if (frame->args.size != BLOCK_ARGUMENTS || frame->rets.size != 5 || !ints || !floats)
    return failed(frame, "jaxbench block: wrong number of arguments, results or attributes");
  if (check_types(frame)) return failed(frame, check_types(frame));
  block_call call;
  read_block(frame, ints, floats, &call);
  const XLA_FFI_Buffer *keys = argument(frame, 5), *values = argument(frame, 6);
  if (keys->dims[1] != call.num_kv_heads || keys->dims[2] != (call.head_dim + 15) / 16 * 16 ||
      keys->dims[0] != values->dims[0] || keys->dims[1] != values->dims[1] || keys->dims[2] != values->dims[3] || keys->dims[3] != values->dims[2])
    return failed(frame, "jaxbench block: pages do not have the heads of the model");
  if (argument(frame, 1)->dims[0] != call.rows || argument(frame, 2)->dims[0] != call.rows)
    return failed(frame, "jaxbench block: positions and page table do not have a line for each row");
  const char *problem = check_block(&call);
  if (!problem) problem = check_vectors(frame, &call);
  const matrix *matrices = &call.q_proj;
  for (int i = 0; i < 7 && !problem; i++)
    if (i != 4 || call.activation != ACTIVATION_GELU) problem = check_bytes(argument(frame, 19 + i), matrices + i);
  if (problem) return failed(frame, problem);
  team *t = team_begin(threads_of(frame, ints[7]), INSTRUCTION_SET.block_scratch(&call), schedule, frame);
  if (!t) return failed(frame, "jaxbench block: not enough memory");
  INSTRUCTION_SET.block(&call, t);
  team_end(t);
  return NULL;
}

/* x [rows, inputs], packed weights, bias or nothing -> [rows, outputs]; ints: inputs, outputs, format, planes, threads. */
EXPORT XLA_FFI_Error *jaxbench_xla_linear(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const int64_t *ints = attribute(frame, "ints", 5);
  if (frame->args.size != 3 || frame->rets.size != 1 || !ints) return failed(frame, "jaxbench linear: wrong arguments or attributes");
  const XLA_FFI_Buffer *x = argument(frame, 0);
  matrix w = {data_of(frame, 1), ints[0], ints[1], (int32_t)ints[2]};
  const char *problem = check_bytes(argument(frame, 1), &w);
  if (problem) return failed(frame, problem);
  int planes = (int)ints[3];
  if (planes != 1 && planes != 3) return failed(frame, "jaxbench linear: activations have 1 or 3 planes");
  if (x->rank != 2 || x->dims[1] != w.inputs) return failed(frame, "jaxbench linear: rows are not as wide as the weights");
  const XLA_FFI_Buffer *bias = argument(frame, 2);
  if (x->dtype != XLA_FFI_DataType_F32 || bias->dtype != XLA_FFI_DataType_F32) return failed(frame, "jaxbench linear: rows or bias are not float32");
  if (count_of(bias) && count_of(bias) != w.outputs) return failed(frame, "jaxbench linear: the bias is not as long as the outputs");
  team *t = team_begin(threads_of(frame, ints[4]), INSTRUCTION_SET.linear_scratch(&w, x->dims[0], planes), schedule, frame);
  if (!t) return failed(frame, "jaxbench linear: not enough memory");
  INSTRUCTION_SET.linear(&w, x->data, x->dims[0], data_of(frame, 2), planes, result(frame, 0)->data, t);
  team_end(t);
  return NULL;
}

/* tokens [count], packed weights -> [count, inputs]; ints: inputs, outputs, format. */
EXPORT XLA_FFI_Error *jaxbench_xla_embed(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const int64_t *ints = attribute(frame, "ints", 3);
  if (frame->args.size != 2 || frame->rets.size != 1 || !ints) return failed(frame, "jaxbench embed: wrong arguments or attributes");
  matrix w = {data_of(frame, 1), ints[0], ints[1], (int32_t)ints[2]};
  const char *problem = check_bytes(argument(frame, 1), &w);
  if (problem) return failed(frame, problem);
  embed_rows(&w, argument(frame, 0)->data, argument(frame, 0)->dims[0], result(frame, 0)->data);
  return NULL;
}

/* x [rows, size], scale, bias or nothing -> [rows, size]; floats: eps. */
EXPORT XLA_FFI_Error *jaxbench_xla_norm(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const double *floats = attribute(frame, "floats", 1);
  if (frame->args.size != 3 || frame->rets.size != 1 || !floats) return failed(frame, "jaxbench norm: wrong arguments or attributes");
  const XLA_FFI_Buffer *x = argument(frame, 0), *scale = argument(frame, 1), *bias = argument(frame, 2);
  if (x->rank != 2 || x->dtype != XLA_FFI_DataType_F32 || scale->dtype != XLA_FFI_DataType_F32 || bias->dtype != XLA_FFI_DataType_F32 ||
      count_of(scale) != x->dims[1] || (count_of(bias) && count_of(bias) != x->dims[1]))
    return failed(frame, "jaxbench norm: rows, scale or bias are not float32 of one width");
  team *t = team_begin(x->dims[0] > 2 ? threads_of(frame, 0) : 1, 0, schedule, frame);
  if (!t) return failed(frame, "jaxbench norm: not enough memory");
  norm n = {data_of(frame, 1), data_of(frame, 2)};
  INSTRUCTION_SET.norm(x->data, x->dims[0], x->dims[1], n, (float)floats[0], result(frame, 0)->data, t);
  team_end(t);
  return NULL;
}

/* logits [rows, size] -> index of the largest [rows]. */
EXPORT XLA_FFI_Error *jaxbench_xla_largest(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  if (frame->args.size != 1 || frame->rets.size != 1) return failed(frame, "jaxbench largest: wrong arguments");
  const XLA_FFI_Buffer *x = argument(frame, 0);
  team *t = team_begin(x->dims[0] > 1 ? threads_of(frame, 0) : 1, 0, schedule, frame);
  if (!t) return failed(frame, "jaxbench largest: not enough memory");
  INSTRUCTION_SET.largest(x->data, x->dims[0], x->dims[1], result(frame, 0)->data, t);
  team_end(t);
  return NULL;
}

/* weights [batch, heads, slots, tokens], k [batch], states [batch, tokens, width], hidden [batch, slots, width] -> [batch, heads, slots]. */
EXPORT XLA_FFI_Error *jaxbench_xla_external(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  if (frame->args.size != 4 || frame->rets.size != 1) return failed(frame, "jaxbench external: wrong arguments");
  const XLA_FFI_Buffer *w = argument(frame, 0), *k = argument(frame, 1), *states = argument(frame, 2), *hidden = argument(frame, 3);
  if (w->rank != 4 || k->rank != 1 || states->rank != 3 || hidden->rank != 3) return failed(frame, "jaxbench external: wrong ranks");
  external_call call = {w->data, states->data, hidden->data, k->data, result(frame, 0)->data,
                        w->dims[0], w->dims[1], w->dims[2], w->dims[3], states->dims[2]};
  if (k->dims[0] != call.batch || states->dims[0] != call.batch || states->dims[1] != call.tokens || hidden->dims[0] != call.batch ||
      hidden->dims[1] != call.slots || hidden->dims[2] != call.width)
    return failed(frame, "jaxbench external: sizes do not fit");
  int64_t threads = threads_of(frame, 0);
  team *t = team_begin(threads, INSTRUCTION_SET.external_scratch(&call, threads), schedule, frame);
  if (!t) return failed(frame, "jaxbench external: not enough memory");
  INSTRUCTION_SET.external(&call, threads, t);
  team_end(t);
  return NULL;
}

/* logits [rows, size], key [2], step, row ids [rows] -> token [rows]; ints: top_k, site, threads; floats: temperature, top_p, min_p. */
EXPORT XLA_FFI_Error *jaxbench_xla_draw(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const int64_t *ints = attribute(frame, "ints", 3);
  const double *floats = attribute(frame, "floats", 3);
  if (frame->args.size != 4 || frame->rets.size != 1 || !ints || !floats) return failed(frame, "jaxbench draw: wrong arguments or attributes");
  const XLA_FFI_Buffer *x = argument(frame, 0);
  if (x->rank != 2 || argument(frame, 3)->dims[0] != x->dims[0]) return failed(frame, "jaxbench draw: no row id for each row");
  if (!(floats[0] > 0)) return failed(frame, "jaxbench draw: the temperature is not above 0");
  sampling how = {(float)floats[0], (float)floats[1], (float)floats[2], ints[0], (uint32_t)ints[1]};
  int64_t threads = x->dims[0] > 1 ? threads_of(frame, ints[2]) : 1;
  team *t = team_begin(threads, INSTRUCTION_SET.draw_scratch(threads, x->dims[1]), schedule, frame);
  if (!t) return failed(frame, "jaxbench draw: not enough memory");
  INSTRUCTION_SET.draw(x->data, x->dims[0], x->dims[1], argument(frame, 1)->data, *(const uint32_t *)argument(frame, 2)->data,
                       argument(frame, 3)->data, how, result(frame, 0)->data, t);
  team_end(t);
  return NULL;
}

static narrow_matrix narrow_argument(const XLA_FFI_CallFrame *frame, int i, int64_t is_transposed) {
  const XLA_FFI_Buffer *b = argument(frame, i);
  return (narrow_matrix){b->data, b->dims[is_transposed ? 1 : 0], b->dims[is_transposed ? 0 : 1], (int)is_transposed};
}

/* left, right -> [rows, columns], bfloat16 all; ints: left is transposed, right is transposed, threads. */
EXPORT XLA_FFI_Error *jaxbench_xla_product(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const int64_t *ints = attribute(frame, "ints", 3);
  if (frame->args.size != 2 || frame->rets.size != 1 || !ints) return failed(frame, "jaxbench product: wrong arguments or attributes");
  for (int i = 0; i < 3; i++) {
    const XLA_FFI_Buffer *b = i < 2 ? argument(frame, i) : result(frame, 0);
    if (b->rank != 2 || b->dtype != XLA_FFI_DataType_BF16) return failed(frame, "jaxbench product: not matrices of bfloat16");
    if (!b->dims[0] || !b->dims[1]) return failed(frame, "jaxbench product: an empty matrix");
  }
  narrow_matrix a = narrow_argument(frame, 0, ints[0]), b = narrow_argument(frame, 1, ints[1]);
  const int64_t *out = result(frame, 0)->dims;
  if (a.columns != b.rows || out[0] != a.rows || out[1] != b.columns) return failed(frame, "jaxbench product: sizes do not fit");
  int64_t threads = threads_of(frame, ints[2]);
  team *t = team_begin(threads, INSTRUCTION_SET.product_scratch(&a, &b, threads), schedule, frame);
  if (!t) return failed(frame, "jaxbench product: not enough memory");
  INSTRUCTION_SET.product(&a, &b, result(frame, 0)->data, 0, threads, t);
  team_end(t);
  return NULL;
}

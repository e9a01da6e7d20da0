/* What the kernels' files share: packed matrices, the call of a decode block, threads, and the table of one instruction set. */

#ifndef JAXBENCH_NATIVE_H
#define JAXBENCH_NATIVE_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define TILE 32   /* outputs of a tile */
#define MAX_ROWS 4096 /* of a block */
#define GROUP 32  /* inputs that share one scale of the activations, and of grouped weights */
#define AHEAD 4096 /* bytes that the stream of weights is asked for in advance; without it int4 reads at half the rate */

/* Formats of packed weights; jaxbench/native/formats.py has the same numbers and says how a tile is laid out. */
enum { FORMAT_F32, FORMAT_BF16, FORMAT_INT8, FORMAT_Q8_0, FORMAT_Q4_0, FORMAT_Q4_1, NUM_FORMATS };
enum { CACHE_F32, CACHE_BF16, CACHE_INT8 };
enum { ACTIVATION_SWIGLU, ACTIVATION_GEGLU, ACTIVATION_GELU };

typedef struct {
  const uint8_t *data; /* tiles, one after another */
  int64_t inputs, outputs;
  int32_t format;
} matrix;

/* One group of activations as integers: x = scale * sum over planes of 256^plane * q. Three planes hold 24 bits. */
typedef struct {
  float scale, sum;    /* sum of the group's values */
  int32_t plane_sum[3];
  int32_t unused[3];
  int8_t q[][GROUP];
} group;

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t group_bytes(int planes) { return planes == 1 ? 64 : 128; }
INLINE int64_t num_groups(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
INLINE int64_t num_tiles(int64_t outputs) { return (outputs + TILE - 1) / TILE; }
int64_t tile_bytes(int32_t format, int64_t inputs);

/* Activations of `rows` rows: as floats, `stride` apart and zero up to whole groups, and narrower: as groups of integers, or
 * with is_bf16 (one plane) as bfloat16, 32 where a group would lie. */
typedef struct {
  const float *values;
  const uint8_t *groups;
  int64_t rows, stride, num_groups;
  int planes; /* 3: float32 activations, 1: 8 bits, or bfloat16 */
  int is_bf16;
} operand;

typedef struct {
  void *keys;                  /* [pages, kv_heads, width, page_size]; width = head_dim up to whole vectors */
  void *values;                /* [pages, kv_heads, page_size, width] */
  float *key_scales, *value_scales; /* [pages, kv_heads, page_size], of an 8-bit cache */
  const int32_t *table;        /* [rows, max_pages]: the page of each row's positions, in order */
  int64_t num_pages, page_size, max_pages;
  int32_t kind;
} kv_cache;

typedef struct {
  const float *scale, *bias; /* bias NULL: root mean square norm */
} norm;

typedef struct {
  int64_t rows, d_model, d_ff, num_heads, num_kv_heads, head_dim, window; /* window 0: none */
  int32_t activation, planes;
  float norm_eps, query_scale, softcap; /* query_scale: of scores, 1 / sqrt(head_dim) in it; softcap 0: none */
  const float *x;
  float *out;
  const int32_t *positions; /* -1: a row that is not computed; its output is its input */
  const float *cosine, *sine; /* [rows, head_dim / 2]; NULL: no rotary positions */
  norm attention_norm, mlp_norm, attention_post_norm, mlp_post_norm, q_norm, k_norm; /* scale NULL: none */
  matrix q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;
  const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias; /* NULL: none */
  kv_cache cache;
} block_call;

/* Values of bfloat16, row after row; is_transposed: column after column. */
typedef struct {
  const uint16_t *data;
  int64_t rows, columns;
  int is_transposed;
} narrow_matrix;

typedef struct {
  float temperature, top_p, min_p; /* above 0; 1: none; 0: none */
  int64_t top_k;                   /* 0: none */
  uint32_t site;                   /* of the random stream: jaxbench/philox.py */
} sampling;

/* Cosine of slots' hidden states and the sum of the states of the k tokens with the largest weights, and their ties. */
typedef struct {
  const float *weights; /* [batch, heads, slots, tokens], not negative; those of 0 never count */
  const float *states;  /* [batch, tokens, width] */
  const float *hidden;  /* [batch, slots, width] */
  const int32_t *k;     /* [batch], 1 to tokens */
  float *out;           /* [batch, heads, slots] */
  int64_t batch, heads, slots, tokens, width;
} external_call;
#define EXTERNAL_PARTS 4 /* of the work, for each thread */

/* A team: the calling thread and helpers that come when they can. See team.c. */
typedef struct team team;
typedef void (*chunk_function)(void *context, int64_t chunk);
typedef int (*schedule_function)(void *host, void (*task)(void *), void *data); /* 0: the task will run */
team *team_begin(int64_t threads, int64_t scratch_bytes, schedule_function schedule, void *host);
void *team_scratch(team *t);
int64_t team_threads(const team *t);
void team_run(team *t, chunk_function run, void *context, int64_t chunks);
void team_end(team *t);
int own_pool_schedule(void *host, void (*task)(void *), void *data);

/* What one instruction set offers. */
typedef struct {
  const char *name;
  int64_t (*block_scratch)(const block_call *call);
  void (*block)(const block_call *call, team *t);
  int64_t (*linear_scratch)(const matrix *w, int64_t rows, int planes);
  void (*linear)(const matrix *w, const float *x, int64_t rows, const float *bias, int planes, float *out, team *t);
  void (*norm)(const float *x, int64_t rows, int64_t size, norm n, float eps, float *out, team *t);
  void (*largest)(const float *logits, int64_t rows, int64_t size, int32_t *out, team *t);
  int64_t (*external_scratch)(const external_call *call, int64_t threads);
  void (*external)(const external_call *call, int64_t threads, team *t); /* threads: as the scratch was counted for */
  int64_t (*draw_scratch)(int64_t threads, int64_t size);
  void (*draw)(const float *logits, int64_t rows, int64_t size, const uint32_t *key, uint32_t step, const int32_t *row_ids,
               sampling how, int32_t *out, team *t);
  int64_t (*product_scratch)(const narrow_matrix *a, const narrow_matrix *b, int64_t threads);
  void (*product)(const narrow_matrix *a, const narrow_matrix *b, void *out, int is_f32, int64_t threads, team *t);
} kernels;

#ifndef INSTRUCTION_SET
#define INSTRUCTION_SET kernels_portable
#endif
extern const kernels INSTRUCTION_SET; /* this library's; which one a machine takes, build.py decides */
const char *check_block(const block_call *call);    /* NULL, or what is wrong with it */
const char *check_matrix(const matrix *w);
void embed_rows(const matrix *w, const int32_t *tokens, int64_t count, float *out);
int pack_matrix(matrix *w, uint8_t *packed, const void *source, const float *scales);
float f16_value(uint16_t bits);

#endif

/* Product of two bfloat16 matrices with sums in float32, of a training step's sizes. Part of kernels.h.
 *
 * Workers take pieces of the result. A piece goes through the inner axis in spans: both operands' parts are packed into pairs
 * of inner neighbours, and sums of PRODUCT_ROWS x 32 results stay in registers. A result is one sum from the first
 * pair to the last, whatever the pieces and threads: the same bits with any number of them. */

#define SPAN_PAIRS 288              /* pairs of the inner axis in a span */
#define ROW_PAIRS (SPAN_PAIRS + 16) /* where the next row's pairs begin: rows a power of two apart would share cache lines */
#define PANEL_STEP ((PRODUCT_ROWS + 15) / 16 * 16) /* where the next pair of a panel's rows lies */
#define PIECE_COLUMNS 288           /* of a piece, at most; the unit's: twice as many */
#define PIECE_ROWS 576
#define PANELS 8                    /* of panel_rows rows, packed at once */

typedef struct product_state product_state;
typedef void (*piece_function)(const product_state *, int64_t row, int64_t rows, int64_t column, int64_t columns, char *scratch);

struct product_state {
  const narrow_matrix *a, *b;
  void *out;
  int is_f32;
  int64_t rows, inner, columns, panel_rows, piece_rows, piece_columns, worker_bytes;
  piece_function piece;
  char *scratch;
  _Atomic int64_t next;
};

/* Both packers turn part of a matrix into pairs (2 p, 2 p + 1) of its inner axis, lines beyond the matrix being zero. First: lines
 * lie apart, each with its inner axis in a piece; they stay so. */
static void keep_lines(const uint16_t *from, int64_t stride, int64_t lines, int64_t inner, uint32_t *pairs) {
  for (int64_t i = 0; i < PRODUCT_ROWS; i++) {
    uint16_t *to = (uint16_t *)(pairs + i * ROW_PAIRS);
    if (i < lines) memcpy(to, from + i * stride, 2 * (size_t)inner);
    else memset(to, 0, 2 * (size_t)inner);
    if (inner % 2) memset(to + inner, 0, 2);
  }
}

/* The same, pairs p of all lines of a tile side by side. */
static void turn_lines(const uint16_t *from, int64_t stride, int64_t lines, int64_t inner, uint32_t *pairs) {
  int64_t whole = inner / 2;
  for (int64_t first = 0; first < TILE; first += 16) {
    int64_t p = 0;
#ifdef VECTOR_HAS_TRANSPOSE16
    for (; first + 16 <= lines && p + 16 <= whole; p += 16) {
      vi x[16];
      for (int i = 0; i < 16; i++) x[i] = vi_load(from + (first + i) * stride + 2 * p);
      vi_transpose16(x);
      for (int i = 0; i < 16; i++) vi_store(pairs + (p + i) * TILE + first, x[i]);
    }
#endif
    for (int64_t i = first; i < first + 16; i++) {
      const uint16_t *line = from + i * stride;
      for (int64_t q = p; q < (inner + 1) / 2; q++) {
        uint32_t pair = 0;
        if (i < lines) memcpy(&pair, line + 2 * q, q < whole ? 4 : 2);
        pairs[q * TILE + i] = pair;
      }
    }
  }
}

/* Lines lie side by side, the inner axis goes down: `parts` of `width` lines each, a part's pairs `step` apart, parts `next` apart.
 * Whole pages are read along before the next one is begun. */
INLINE void join_rows(const uint16_t *from, int64_t stride, int64_t lines, int64_t inner, uint32_t *pairs, int64_t parts,
                      const int64_t width, const int64_t step, int64_t next) {
  for (int64_t p = 0; p < (inner + 1) / 2; p++)
    for (int64_t part = 0; part < parts; part++) {
      const uint16_t *restrict even = from + 2 * p * stride + part * width, *restrict odd = even + stride;
      uint32_t *restrict to = pairs + part * next + p * step;
      int64_t there = lines - part * width;
      if (there >= step && 2 * p + 1 < inner) {
        for (int64_t i = 0; i < step; i++) to[i] = (uint32_t)even[i] | (uint32_t)odd[i] << 16;
        continue;
      }
      for (int64_t i = 0; i < step; i++) {
        uint32_t low = i < there ? even[i] : 0, high = i < there && 2 * p + 1 < inner ? odd[i] : 0;
        to[i] = low | high << 16;
      }
    }
}

INLINE void sum_pairs(const uint32_t *a, const int64_t row_step, const int64_t pair_step, const uint32_t *b, int64_t pairs, float *sums, int is_first) {
  vf s[PRODUCT_ROWS][2];
  for (int r = 0; r < PRODUCT_ROWS; r++)
    for (int v = 0; v < 2; v++) s[r][v] = is_first ? vf_set1(0.0f) : vf_load(sums + r * TILE + 16 * v);
  for (int64_t p = 0; p < pairs; p++, a += pair_step, b += TILE) {
    vi low = vi_load(b), high = vi_load(b + 16);
    for (int r = 0; r < PRODUCT_ROWS; r++) {
      s[r][0] = vf_dot_bf16(s[r][0], low, (int32_t)a[r * row_step]);
      s[r][1] = vf_dot_bf16(s[r][1], high, (int32_t)a[r * row_step]);
    }
  }
  for (int r = 0; r < PRODUCT_ROWS; r++)
    for (int v = 0; v < 2; v++) vf_store(sums + r * TILE + 16 * v, s[r][v]);
}

/* Rows of `a` lie in lines of pairs, or pairs of all rows of a panel lie side by side. */
NOINLINE void NAME(sums_of_lines)(const uint32_t *a, const uint32_t *b, int64_t pairs, float *sums, int is_first) {
  sum_pairs(a, ROW_PAIRS, 1, b, pairs, sums, is_first);
}
NOINLINE void NAME(sums_of_panel)(const uint32_t *a, const uint32_t *b, int64_t pairs, float *sums, int is_first) {
  sum_pairs(a, 1, PANEL_STEP, b, pairs, sums, is_first);
}

static void emit(const product_state *s, const float *sums, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = (row + r) * s->columns + column;
    const float *from = sums + r * TILE;
    if (s->is_f32) {
      memcpy((float *)s->out + at, from, sizeof(float) * (size_t)columns);
      continue;
    }
    uint16_t *to = (uint16_t *)s->out + at;
#ifdef VECTOR_HAS_TO_BF16
    if (columns == TILE) {
      store_bf16(to, vf_load(from), vf_load(from + 16));
      continue;
    }
#endif
    for (int64_t i = 0; i < columns; i++) to[i] = rounded_bf16(from[i]);
  }
}

/* A span of columns in tiles. */
static void pack_columns(const narrow_matrix *m, int64_t first, int64_t inner, int64_t column, int64_t columns, uint32_t *pairs) {
  int64_t tiles = (columns + TILE - 1) / TILE;
  if (!m->is_transposed) {
    join_rows(m->data + first * m->columns + column, m->columns, columns, inner, pairs, tiles, TILE, TILE, TILE * SPAN_PAIRS);
    return;
  }
  for (int64_t tile = 0; tile < tiles; tile++)
    turn_lines(m->data + (column + tile * TILE) * m->rows + first, m->rows, min_of(columns - tile * TILE, TILE), inner, pairs + tile * TILE * SPAN_PAIRS);
}

/* A span of rows in panels. */
static void pack_rows(const narrow_matrix *m, int64_t first, int64_t inner, int64_t row, int64_t rows, int64_t panels, uint32_t *pairs) {
  if (m->is_transposed) {
    join_rows(m->data + first * m->rows + row, m->rows, m->rows - row, inner, pairs, panels, PRODUCT_ROWS, PANEL_STEP, PANEL_STEP * ROW_PAIRS);
    return;
  }
  for (int64_t panel = 0; panel < panels; panel++, row += PRODUCT_ROWS, rows -= PRODUCT_ROWS)
    keep_lines(m->data + row * m->columns + first, m->columns, min_of(rows, PRODUCT_ROWS), inner, pairs + panel * PANEL_STEP * ROW_PAIRS);
}

/* Rows [row, row + rows) by columns [column, column + columns) of the result. */
static void NAME(product_piece)(const product_state *s, int64_t row, int64_t rows, int64_t column, int64_t columns, char *scratch) {
  int64_t tiles = (columns + TILE - 1) / TILE, panels = (rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS;
  uint32_t *b = (uint32_t *)scratch, *a = b + tiles * TILE * SPAN_PAIRS;
  float *kept = (float *)(a + PANELS * PANEL_STEP * ROW_PAIRS), own[PRODUCT_ROWS * TILE];
  for (int64_t first = 0; first < s->inner; first += 2 * SPAN_PAIRS) {
    int64_t inner = min_of(s->inner - first, 2 * SPAN_PAIRS), pairs = (inner + 1) / 2;
    int is_last = first + inner == s->inner;
    pack_columns(s->b, first, inner, column, columns, b);
    for (int64_t panel = 0; panel < panels; panel += PANELS) {
      int64_t end = min_of(panel + PANELS, panels);
      pack_rows(s->a, first, inner, row + panel * PRODUCT_ROWS, rows - panel * PRODUCT_ROWS, end - panel, a);
      for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t p = panel; p < end; p++) {
          float *sums = first == 0 && is_last ? own : kept + (p * tiles + tile) * PRODUCT_ROWS * TILE;
          const uint32_t *lines = a + (p - panel) * PANEL_STEP * ROW_PAIRS, *tile_pairs = b + tile * TILE * SPAN_PAIRS;
          (s->a->is_transposed ? NAME(sums_of_panel) : NAME(sums_of_lines))(lines, tile_pairs, pairs, sums, first == 0);
          if (is_last)
            emit(s, sums, row + p * PRODUCT_ROWS, column + tile * TILE, min_of(rows - p * PRODUCT_ROWS, PRODUCT_ROWS), min_of(columns - tile * TILE, TILE));
        }
    }
  }
}

#ifdef VECTOR_HAS_UNIT
#include "product_unit.h"
#endif

static void NAME(product_worker)(void *context, int64_t worker) {
  product_state *s = context;
  int64_t across = (s->columns + s->piece_columns - 1) / s->piece_columns, down = (s->rows + s->piece_rows - 1) / s->piece_rows;
  for (int64_t piece; (piece = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) < across * down;) {
    int64_t row = piece % down * s->piece_rows, column = piece / down * s->piece_columns;
    s->piece(s, row, min_of(s->rows - row, s->piece_rows), column, min_of(s->columns - column, s->piece_columns),
             s->scratch + worker * s->worker_bytes);
  }
}

/* Pieces: as large as is packed well, and at least two for each thread. */
static void cut(product_state *s, int64_t threads, int64_t most_columns) {
  int64_t down = (s->rows + PIECE_ROWS - 1) / PIECE_ROWS, across = (s->columns + most_columns - 1) / most_columns;
  while (threads > 1 && down * across < 2 * threads && (s->rows / down > 4 * s->panel_rows || s->columns / across > 2 * TILE)) {
    if (s->rows / down >= s->columns / across) down++;
    else across++;
  }
  s->piece_rows = up_to((s->rows + down - 1) / down, s->panel_rows);
  s->piece_columns = up_to((s->columns + across - 1) / across, TILE);
  s->worker_bytes = 4 * SPAN_PAIRS * s->piece_columns + 4 * PANELS * up_to(s->panel_rows, 16) * ROW_PAIRS;
  if (s->inner > 2 * SPAN_PAIRS) s->worker_bytes += 4 * s->piece_rows * s->piece_columns;
}

static product_state NAME(product_state)(const narrow_matrix *a, const narrow_matrix *b, int64_t threads) {
  product_state s = {.a = a, .b = b, .rows = a->rows, .inner = a->columns, .columns = b->columns,
                     .panel_rows = PRODUCT_ROWS, .piece = NAME(product_piece)};
  int64_t most_columns = PIECE_COLUMNS;
#ifdef VECTOR_HAS_UNIT
  if (has_unit) s.panel_rows = UNIT_ROWS, most_columns = 2 * PIECE_COLUMNS, s.piece = NAME(unit_piece);
#endif
  cut(&s, threads, most_columns);
  return s;
}

static int64_t NAME(product_scratch)(const narrow_matrix *a, const narrow_matrix *b, int64_t threads) {
  return threads * NAME(product_state)(a, b, threads).worker_bytes;
}

/* a [rows, inner] by b [inner, columns]; out in float32 or rounded to bfloat16. threads: as the scratch was counted for. */
static void NAME(product)(const narrow_matrix *a, const narrow_matrix *b, void *out, int is_f32, int64_t threads, team *t) {
  product_state s = NAME(product_state)(a, b, threads);
  s.out = out, s.is_f32 = is_f32, s.scratch = team_scratch(t);
  team_run(t, NAME(product_worker), &s, team_threads(t));
}

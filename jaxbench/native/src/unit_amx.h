/* AMX's matrix unit: products of sixteen rows by sixteen columns at once. Included by amx.c in front of kernels.h, whose files
 * use it where VECTOR_HAS_UNIT is defined and has_unit is set.
 *
 * A register holds up to sixteen lines of 64 bytes. Sums of up to 32 rows by 32 columns stay in registers 0 to 3, rows of the
 * left operand go through 4 and 5, of the right one through 6 and 7. The right operand's lines are sixteen columns' pairs of
 * bfloat16, or fours of bytes, of neighbouring inner places: packed weights lie so. */

#define VECTOR_HAS_UNIT
#define UNIT_ROWS 32
#define UNIT_WIDTH 256 /* of a head that it attends with, at most */

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#define XFEATURE_XTILEDATA 18
#ifndef ARCH_REQ_XCOMP_PERM /* a test asks for what Linux refuses */
#define ARCH_REQ_XCOMP_PERM 0x1023
#endif
#endif

/* Linux lets this process use the unit; otherwise vectors compute all, in which products of bfloat16 have other bits. Refused
 * where a thread has a signal stack that is too small for the unit's state; once granted, such stacks are refused. */
static int has_unit;

__attribute__((constructor)) static void request_unit(void) {
#ifdef __linux__
  has_unit = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
}

/* Compilers' intrinsics do not say all that they read and write (GCC 12): what comes before and after them in memory stays there. */
INLINE void unit_fence(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }

typedef struct {
  uint8_t palette_id, start_row, reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];
} tile_config;

/* Sets the registers' sizes for up to 32 rows of row_bytes and w_lines lines of the right operand. *configured: for how many rows
 * they are set, 0 at first. */
INLINE void configure_unit(int64_t *configured, int64_t rows, int64_t row_bytes, int64_t w_lines) {
  const int64_t top = min_of(rows, 16), bottom = rows - top, lines[8] = {top, top, bottom, bottom, top, bottom, w_lines, w_lines};
  tile_config t = {.palette_id = 1};
  if (*configured == rows) return;
  *configured = rows;
  for (int i = 0; i < 8; i++) {
    t.rows[i] = (uint8_t)lines[i];
    t.colsb[i] = (uint16_t)(!lines[i] ? 0 : i == 4 || i == 5 ? row_bytes : 64);
  }
  unit_fence(&t);
  _tile_loadconfig(&t);
}

/* Sums of up to 32 rows by 32 columns: from zero, or from what `sums` holds; rows lie `stride` sums apart. */
INLINE void unit_begin(const void *sums, int64_t rows, int64_t stride) {
  const int32_t *from = sums;
  unit_fence(sums);
  if (!sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) return;
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, from, 4 * stride);
  _tile_loadd(1, from + 16, 4 * stride);
  if (rows <= 16) return;
  _tile_loadd(2, from + 16 * stride, 4 * stride);
  _tile_loadd(3, from + 16 * stride + 16, 4 * stride);
}

/* Stores the first 32 or 16 columns. */
INLINE void unit_end(void *sums, int64_t rows, int64_t stride, int64_t columns) {
  int32_t *to = sums;
  _tile_stored(0, to, 4 * stride);
  if (columns > 16) _tile_stored(1, to + 16, 4 * stride);
  if (rows > 16) {
    _tile_stored(2, to + 16 * stride, 4 * stride);
    if (columns > 16) _tile_stored(3, to + 16 * stride + 16, 4 * stride);
  }
  unit_fence(sums);
}

/* Adds products of bfloat16, 32 inner places a step: even and odd places apart, then both, to a sum. x: rows row_bytes apart;
 * w: lines of 32 columns. */
INLINE void unit_bf16(const uint8_t *w, const uint8_t *x, int64_t row_bytes, int64_t steps, int64_t rows, const int is_stream) {
  unit_fence(w);
  unit_fence(x);
  for (int64_t k = 0; k < steps; k++, w += 64 * TILE, x += 64) {
    if (is_stream)
      for (int line = 0; line < 32; line++) __builtin_prefetch(w + 64 * line + AHEAD);
    _tile_loadd(6, w, 128);
    _tile_loadd(4, x, row_bytes);
    _tile_loadd(7, w + 64, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > 16) {
      _tile_loadd(5, x + 16 * row_bytes, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

/* A group of stored weights as signed bytes, in lines of 32 columns. */
INLINE void unit_weights(const uint8_t *from, uint8_t *to, const int is_byte, const int offset) {
  const __m512i by = _mm512_set1_epi8((char)offset);
  for (int line = 0; line < (is_byte ? 16 : 8); line++) {
    __m512i x = _mm512_loadu_si512(from + 64 * line);
    if (is_byte) {
      _mm512_storeu_si512(to + 64 * line, _mm512_sub_epi8(x, by));
      continue;
    }
    uint8_t *low = to + 128 * (line - line % 2) + 64 * (line % 2); /* lines 0, 1 hold inputs 0 to 3 low and 4 to 7 high */
    _mm512_storeu_si512(low, _mm512_sub_epi8(vi_low_nibbles(x), by));
    _mm512_storeu_si512(low + 128, _mm512_sub_epi8(vi_high_nibbles(x), by));
  }
}

/* Products of bytes of one group of 32 inputs. */
INLINE void unit_bytes(const uint8_t *w, const int8_t *x, int64_t row_bytes, int64_t rows) {
  unit_fence(w);
  unit_fence(x);
  _tile_loadd(6, w, 128);
  _tile_loadd(4, x, row_bytes);
  _tile_loadd(7, w + 64, 128);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  if (rows > 16) {
    _tile_loadd(5, x + 16 * row_bytes, row_bytes);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

/* The kernels in terms of the vectors of one instruction set: included once by each file that names one.
 *
 * The including file defines INSTRUCTIONS (its name) and includes its vector_*.h first. */

#define JOINED(a, b) a##_##b
#define JOINED_LATER(a, b) JOINED(a, b)
#define NAME(x) JOINED_LATER(x, INSTRUCTIONS)
#define TEXT(x) #x
#define TEXT_LATER(x) TEXT(x)

#include "products.h"
#include "attention.h"
#include "block_state.h"
#include "spans.h"
#include "block.h"
#include "linear.h"
#include "external.h"
#include "sample.h"
#include "product.h"

const kernels NAME(kernels) = {
    .name = TEXT_LATER(INSTRUCTIONS),
    .block_scratch = NAME(block_scratch),
    .block = NAME(block),
    .linear_scratch = NAME(linear_scratch),
    .linear = NAME(linear),
    .norm = NAME(norm_rows),
    .largest = NAME(largest),
    .external_scratch = NAME(external_scratch),
    .external = NAME(external),
    .draw_scratch = NAME(draw_scratch),
    .draw = NAME(draw),
    .product_scratch = NAME(product_scratch),
    .product = NAME(product),
};

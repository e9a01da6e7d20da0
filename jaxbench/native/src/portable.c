/* Plain C, for every machine. */

#include "native.h"
#define INSTRUCTIONS portable
#include "vector_portable.h"
#include "kernels.h"

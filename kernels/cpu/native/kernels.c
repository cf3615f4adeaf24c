/* CPU kernels behind a plain C ABI, loaded by ctypes. One translation unit; kernels/cpu/compile.py builds it. */

#include "attention_core.h"
#include "interface.h"
#include "vectors.h"

#define EXPORT __attribute__((visibility("default")))
#define PARALLEL_WORK 16384 /* elements below which waking the threads costs more than the work */

#define PASTE2(a, b) a##_##b
#define PASTE(a, b) PASTE2(a, b)
#define FN(name) PASTE(name, S)
#define LOAD16 PASTE(load16, S)
#define STORE16 PASTE(store16, S)
#define LOAD1 PASTE(load1, S)
#define STORE1 PASTE(store1, S)
#define LOAD_TAIL PASTE(load_tail, S)
#define STORE_TAIL PASTE(store_tail, S)

#define S f32
#define E float
#include "attention.h"
#include "elementwise.h"
#include "argmax.h"
#undef S
#undef E

#define S bf16
#define E uint16_t
#include "attention.h"
#include "elementwise.h"
#include "argmax.h"
#undef S
#undef E

#ifdef HAVE_F16
#define S f16
#define E _Float16
#include "attention.h"
#include "elementwise.h"
#include "argmax.h"
#undef S
#undef E
#endif

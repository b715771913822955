// One level. Compiled once for each, with DOGE_LEVEL_NAME and the flags of its instruction set.

#include "accumulate.h"
#include "gram.h"
#include "weighted_sum.h"

#define DOGE_TEXT_OF(name) #name
#define DOGE_TEXT(name) DOGE_TEXT_OF(name)

namespace doge_fast::DOGE_LEVEL_NAME {

extern const Level LEVEL;
const Level LEVEL{DOGE_TEXT(DOGE_LEVEL_NAME), gram_add, gram_end, weighted_sum, accumulate};

}  // namespace doge_fast::DOGE_LEVEL_NAME

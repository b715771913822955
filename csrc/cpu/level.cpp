// Which of the compiled levels this CPU can run.

#include "level.h"

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../check.h"

// The builder defines DOGE_LEVELS as DOGE_LEVEL(name) ..., worst first.
#define DOGE_LEVEL(name)              \
  namespace doge_fast::name {         \
  extern const ::doge_fast::Level LEVEL; \
  }
DOGE_LEVELS
#undef DOGE_LEVEL

namespace doge_fast {
namespace {

#define DOGE_LEVEL(name) &name::LEVEL,
const Level* const LEVELS[] = {DOGE_LEVELS};
#undef DOGE_LEVEL

bool can_run(const char* name) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(name, "avx2")) return has_avx2;
  if (!std::strcmp(name, "avx512")) return has_avx512;
  if (!std::strcmp(name, "avx512bf16")) return has_avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return !std::strcmp(name, "baseline");
}

std::string names_of_those_that_run() {
  std::string names;
  for (const Level* each : LEVELS)
    if (can_run(each->name)) names += (names.empty() ? "" : ", ") + std::string(each->name);
  return names;
}

const Level* choose() {
  const char* wish = std::getenv("DOGE_FAST_CPU_LEVEL");
  const bool is_free = wish == nullptr || *wish == 0;
  const Level* best = nullptr;
  for (const Level* each : LEVELS)
    if (can_run(each->name) && (is_free || !std::strcmp(wish, each->name))) best = each;
  DOGE_CHECK(best != nullptr, "DOGE_FAST_CPU_LEVEL must name a level that this CPU runs, one of ",
             names_of_those_that_run(), "; it is ", wish == nullptr ? "" : wish, ". Unset it.");
  return best;
}

std::string level_name() { return level().name; }

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) { library.def("level() -> str"); }
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("level", TORCH_BOX(&level_name));
}

}  // namespace

const Level& level() {
  static const Level* const chosen = choose();
  return *chosen;
}

}  // namespace doge_fast

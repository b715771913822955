// torch's threads as ThreadSanitizer can follow them. Those of torch are started and joined by an
// OpenMP runtime that was compiled without it, so that every result that one thread leaves for
// another would look like a race. Loaded before torch, these two functions take the place of its.
#include <cstdint>
#include <thread>
#include <vector>

using Body = void (*)(int64_t, int64_t, void*);

constexpr int64_t NUM_THREADS = 4;

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t, Body body, void* context) {
  const int64_t share = (end - begin + NUM_THREADS - 1) / NUM_THREADS;
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += share)
    threads.emplace_back(body, first, first + share < end ? first + share : end, context);
  for (auto& thread : threads) thread.join();
  return 0;
}

extern "C" int32_t torch_get_num_threads(uint32_t* number) {
  *number = NUM_THREADS;
  return 0;
}

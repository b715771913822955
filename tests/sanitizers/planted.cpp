// One fault for each sanitizer, so that a run which finds nothing is known to have looked.
#include <cstdint>
#include <thread>

#define VISIBLE extern "C" __attribute__((visibility("default")))

VISIBLE int64_t address(int64_t past) {
  auto* numbers = new int64_t[4]{};
  const int64_t found = numbers[3 + past];
  delete[] numbers;
  return found;
}

VISIBLE int32_t undefined(int32_t more) { return INT32_MAX + more; }

VISIBLE int64_t race(int64_t by) {
  int64_t sum = 0;
  const auto add = [&] {
    for (int64_t i = 0; i < 1000; ++i) sum += by;
  };
  std::thread one(add), other(add);
  one.join();
  other.join();
  return sum;
}

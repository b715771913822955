// The place of an inner product in the partial results of a program.
//
// A kernel writes its sums in the order in which its threads hold them. The reduction reads them in that order,
// adjacent lanes at adjacent addresses, and finds here which product each one is.
#pragma once

#include "launch.cuh"

namespace doge_fast::cuda {

// The chunks of program `program`; there are P = `num_programs` <= C programs for C chunks.
//
// Every program has one chunk. Of the C - P others, programs p and later share (C - P) ((P - p) / P)^3, so each
// program has fewer chunks than the one before. A GPU starts programs in order. If it runs a third of them at a
// time or fewer, the last ones are small, and all multiprocessors finish at about the same time. The number of
// multiprocessors does not enter, so sums are the same on every GPU.
struct ProgramChunks {
  int64_t first;
  int64_t last;

  static __device__ __forceinline__ int64_t left_from(int64_t program, int64_t num_programs,
                                                      int64_t num_chunks) {
    const int64_t programs_left = num_programs - program;
    int64_t left = num_chunks - num_programs;
    for (int i = 0; i < 3; ++i) left = left * programs_left / num_programs;
    return left + programs_left;
  }
  static __device__ __forceinline__ ProgramChunks of(int64_t program, int64_t num_programs,
                                                     int64_t num_chunks) {
    return {num_chunks - left_from(program, num_programs, num_chunks),
            num_chunks - left_from(program + 1, num_programs, num_chunks)};
  }
};

struct Entry {
  int row;
  int column;
};

// A lower triangle, row by row.
struct Triangle {
  static __device__ __forceinline__ constexpr int row_of(int index) {
    int row = 0;
    while ((row + 1) * (row + 2) / 2 <= index) ++row;
    return row;
  }
  static __device__ __forceinline__ Entry entry(int index) {
    const int row = row_of(index);
    return {row, index - row * (row + 1) / 2};
  }
};

// Tiles of 16 rows by 8 columns of float32 sums in the lanes of a warp, without the tiles above the diagonal: 16
// rows are two groups of 8, and are multiplied by these two groups and all groups before.
struct Tiles {
  // Sums of a tile in each lane.
  static constexpr int SUMS = 4;
  static __host__ __device__ constexpr int entries(int groups) { return tiles(groups) * SUMS * LANES; }
  static __host__ __device__ constexpr int tiles(int groups) {
    return (groups + 1) / 2 * ((groups + 1) / 2 - 1) + groups;
  }
  static __device__ __forceinline__ constexpr int tile(int tall, int group) { return tall * (tall + 1) + group; }
  static __device__ __forceinline__ constexpr int tall_of(int tile_index) {
    int tall = 0;
    while (tile(tall + 1, 0) <= tile_index) ++tall;
    return tall;
  }
  static __device__ __forceinline__ Entry entry(int index) {
    const int lane = index % LANES;
    const int sum = index / LANES % SUMS;
    const int tall = tall_of(index / LANES / SUMS);
    const int group = index / LANES / SUMS - tile(tall, 0);
    return {16 * tall + 8 * (sum / 2) + lane / 4, 8 * group + 2 * (lane % 4) + sum % 2};
  }
};

}  // namespace doge_fast::cuda

// Where an inner product stands in the partial results of a program.
//
// Each kernel leaves its sums in the order in which its threads hold them; the reduction reads them in
// that order, adjacent lanes at adjacent addresses, and asks here which product each one is.
#pragma once

#include "launch.cuh"

namespace doge_fast::cuda {

// Chunks of program `program` of P = `num_programs`, which are as many as there are chunks at most.
//
// Every program has one chunk; of the C - P others, (C - P) ((P - p) / P)^3 are left from program p on, so
// that each gets fewer than the one before it. Programs start in this order, and a
// GPU that runs a third of them at a time or fewer has small ones left when the last begin: its
// multiprocessors end together. No number of multiprocessors is asked for, so that sums are the same on
// every GPU.
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

// Tiles of 16 rows by 8 of float32 sums in the lanes of a warp; those above the diagonal are left out:
// a tall tile meets its own two groups of 8 rows and all before.
struct Tiles {
  // Of a tile, in each lane.
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

// The K x K step in one launch of one block: clipping factors, W, score, mirror step, averages, combined
// norm, overflow flag and the commit of the new state. float64 throughout; nothing waits for the host.
//
// Reads two R x R matrices once each, writes one; everything else is a vector, in shared memory.

#include <cmath>
#include <tuple>

#include "launch.cuh"

namespace doge_fast::cuda {
namespace {

// What torch.nn.utils.clip_grad_norm_ adds to the norm it divides by.
constexpr double NORM_FLOOR = 1e-6;
constexpr int FEW_ROWS = 32;
constexpr int FEW_THREADS = 128;
constexpr int MANY_THREADS = 512;
constexpr int MAX_WARPS = MANY_THREADS / LANES;
// Vectors of R in shared memory.
constexpr int SHARED_VECTORS = 4;
constexpr int64_t MAX_ROWS = 1024;

// In the order of kernels/reweight/packing.py.
struct Settings {
  double lr;
  double mu;
  double grad_scale;
  double scale_by_mean_norm;
  double low;
  double high;
  double domain_max_grad_norm;
  double max_grad_norm;
  double smoothing;
};
constexpr int64_t NUM_SETTINGS = sizeof(Settings) / sizeof(double);

struct Problem {
  int num_rows;
  int num_domains;
  const double* gram_RR;
  const double* full_RR;
  const double* tau_R;
  const bool* present_R;
  const Settings* settings;
  // alpha[K] | alpha_mean[K] | gain[K] | num_steps | num_skipped
  double* state_S;
  // gram[R, R] | coefficients[R] | norms[R] | gain[K] | influence[K] | difficulty[K] | alpha[K] | norm
  double* values_V;
  bool* skipped;
  float* found_inf;
};

__device__ __forceinline__ double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + NORM_FLOOR);
  // Written so that a NaN stays one.
  return factor > 1 ? 1 : factor;
}

__device__ __forceinline__ double cut(double value, double low, double high) {
  if (value < low) return low;
  return value > high ? high : value;
}

// False for NaN too.
__device__ __forceinline__ bool is_finite(double x) { return fabs(x) < INFINITY; }

struct Plus {
  __device__ __forceinline__ double operator()(double x, double y) const { return x + y; }
};
struct Larger {
  __device__ __forceinline__ double operator()(double x, double y) const { return x > y ? x : y; }
};

// The same bits in every thread of the block, whatever the order in which warps arrive.
template <typename Combine>
__device__ double block_reduce(double x, double start, Combine combine) {
  __shared__ double of_warp[MAX_WARPS];
  DOGE_UNROLL
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    x = combine(x, from_lane_xor(x, distance));
  // Every thread has read the last results.
  __syncthreads();
  if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = x;
  __syncthreads();
  double result = start;
  for (unsigned warp = 0; warp < blockDim.x / LANES; ++warp) result = combine(result, of_warp[warp]);
  return result;
}
__device__ __forceinline__ double block_sum(double x) { return block_reduce(x, 0, Plus{}); }
__device__ __forceinline__ double block_max(double x) { return block_reduce(x, -INFINITY, Larger{}); }
__device__ __forceinline__ bool block_any(bool x) { return block_max(x ? 1 : 0) > 0; }

__global__ void __launch_bounds__(MANY_THREADS) reweight(const Problem of) {
  const int R = of.num_rows;
  const int K = of.num_domains;
  const int thread = threadIdx.x;
  const int num_threads = blockDim.x;
  const int lane = thread % LANES;
  const int warp = thread / LANES;
  const int num_warps = num_threads / LANES;
  auto* shared = reinterpret_cast<double*>(dynamic_shared());
  double* clip_R = shared;
  double* gain_K = clip_R + R;
  double* moved_K = gain_K + R;
  double* coefficients_R = moved_K + R;
  double* const coefficients_out_R = of.values_V + static_cast<int64_t>(R) * R;
  double* const norms_out_R = coefficients_out_R + R;
  double* const gain_out_K = norms_out_R + R;
  double* const influence_out_K = gain_out_K + K;
  double* const difficulty_out_K = influence_out_K + K;
  double* const alpha_out_K = difficulty_out_K + K;
  double* const alpha_K = of.state_S;
  double* const alpha_mean_K = alpha_K + K;
  double* const carried_K = alpha_mean_K + K;
  double* const counts = carried_K + K;
  const Settings& settings = *of.settings;
  const double unit = 1 / (settings.grad_scale * settings.grad_scale);
  const double rate = settings.lr / settings.mu;
  bool is_bad = false;

  // Norms over all columns, and what clipping leaves of each row.
  for (int r = thread; r < R; r += num_threads) {
    const double norm = sqrt(of.full_RR[static_cast<int64_t>(r) * (R + 1)] * unit);
    norms_out_R[r] = norm;
    clip_R[r] = clip_factor(norm, settings.domain_max_grad_norm);
    is_bad = is_bad || !is_finite(norm);
  }
  __syncthreads();

  // W, a row per warp.
  for (int i = warp; i < R; i += num_warps) {
    const int64_t row = static_cast<int64_t>(i) * R;
    double gain = 0;
    for (int j = lane; j < R; j += LANES) {
      const double clipped = clip_R[i] * (of.gram_RR[row + j] * unit) * clip_R[j];
      of.values_V[row + j] = clipped;
      gain += clipped * of.tau_R[j];
    }
    gain = warp_sum(gain);
    if (lane == 0 && i < K) gain_K[i] = gain;
  }
  __syncthreads();

  // Its two parts; what the score is divided by.
  double norm_sum = 0;
  double norm_count = 0;
  for (int k = thread; k < K; k += num_threads) {
    const double own = clip_R[k] * (of.gram_RR[static_cast<int64_t>(k) * (R + 1)] * unit) * clip_R[k];
    const double difficulty = of.tau_R[k] * own;
    difficulty_out_K[k] = difficulty;
    influence_out_K[k] = gain_K[k] - difficulty;
    if (of.present_R[k]) {
      norm_sum += sqrt(own);
      norm_count += 1;
    }
  }
  double divisor = 1;
  if (settings.scale_by_mean_norm != 0) {
    norm_sum = block_sum(norm_sum);
    norm_count = block_sum(norm_count);
    divisor = norm_sum / (norm_count > 1 ? norm_count : 1) + NORM_FLOOR;
  }
  // Where a target row is absent, every W lacks a term.
  bool is_missing = false;
  for (int r = K + thread; r < R; r += num_threads)
    is_missing = is_missing || (!of.present_R[r] && of.tau_R[r] != 0);
  const bool is_whole = !block_any(is_missing);

  // The mirror step, as a softmax of logarithms.
  double largest = -INFINITY;
  for (int k = thread; k < K; k += num_threads) {
    const double score = cut(gain_K[k] / divisor, settings.low, settings.high);
    gain_K[k] = of.present_R[k] && is_whole ? score : carried_K[k];
    gain_out_K[k] = gain_K[k];
    moved_K[k] = log(alpha_K[k]) + rate * gain_K[k];
    largest = Larger{}(largest, moved_K[k]);
  }
  largest = block_max(largest);
  double sum = 0;
  for (int k = thread; k < K; k += num_threads) {
    moved_K[k] = exp(moved_K[k] - largest);
    sum += moved_K[k];
  }
  sum = block_sum(sum);
  for (int r = thread; r < R; r += num_threads) {
    double coefficient = 0;
    if (r < K) {
      double moved = moved_K[r] / sum;
      moved = (1 - settings.smoothing) * moved + settings.smoothing / K;
      moved_K[r] = moved;
      is_bad = is_bad || !is_finite(moved);
      if (of.present_R[r]) coefficient = moved * clip_R[r];
    }
    coefficients_R[r] = coefficient;
  }
  __syncthreads();

  // sqrt(c^T F c), a row per warp.
  double squared_norm = 0;
  for (int i = warp; i < R; i += num_warps) {
    const int64_t row = static_cast<int64_t>(i) * R;
    double product = 0;
    for (int j = lane; j < R; j += LANES) product += of.full_RR[row + j] * unit * coefficients_R[j];
    squared_norm += coefficients_R[i] * product;
  }
  squared_norm = block_sum(squared_norm);
  const double combined_norm = sqrt(squared_norm < 0 ? 0 : squared_norm);
  const bool is_skipped = block_any(is_bad);

  // NaN, so that a scaler or a clipping loop sees the overflow too.
  const double factor = is_skipped ? NAN : clip_factor(combined_norm, settings.max_grad_norm);
  for (int r = thread; r < R; r += num_threads) coefficients_out_R[r] = coefficients_R[r] * factor;
  const double num_steps = counts[0] + 1;
  for (int k = thread; k < K; k += num_threads) {
    if (!is_skipped) {
      alpha_mean_K[k] += (moved_K[k] - alpha_mean_K[k]) / num_steps;
      alpha_K[k] = moved_K[k];
      carried_K[k] = gain_K[k];
    }
    alpha_out_K[k] = alpha_K[k];
  }
  // Every thread has read the counts.
  __syncthreads();
  if (thread == 0) {
    if (is_skipped)
      counts[1] += 1;
    else
      counts[0] = num_steps;
    alpha_out_K[K] = combined_norm;
    *of.skipped = is_skipped;
    *of.found_inf = is_skipped ? 1.0F : 0.0F;
  }
}

void check(const Tensor& tensor, const char* name_of, ScalarType dtype, int64_t size) {
  DOGE_CHECK(tensor.is_contiguous() && tensor.scalar_type() == dtype && tensor.numel() == size,
             "reweight needs ", name_of, " contiguous, ", size, " elements of ", name(dtype),
             "; received shape ", shape(tensor), " of ", name(tensor.scalar_type()), ".");
}

std::tuple<Tensor, Tensor, Tensor> run(Tensor gram_RR, Tensor full_RR, Tensor state_S, Tensor tau_R,
                                       Tensor present_R, Tensor settings_C) {
  const int64_t num_rows = tau_R.numel();
  const int64_t num_domains = (state_S.numel() - 2) / 3;
  DOGE_CHECK(1 <= num_domains && num_domains <= num_rows && num_rows <= MAX_ROWS,
             "reweight needs at least one domain, a row for each and at most ", MAX_ROWS, " rows; received ",
             num_domains, " domains, ", num_rows, " rows.");
  check(gram_RR, "gram_RR", ScalarType::Double, num_rows * num_rows);
  check(full_RR, "full_RR", ScalarType::Double, num_rows * num_rows);
  check(state_S, "state_S", ScalarType::Double, 3 * num_domains + 2);
  check(tau_R, "tau_R", ScalarType::Double, num_rows);
  check(present_R, "present_R", ScalarType::Bool, num_rows);
  check(settings_C, "settings_C", ScalarType::Double, NUM_SETTINGS);

  const Launcher launch(gram_RR);
  const int64_t num_values = num_rows * num_rows + 2 * num_rows + 4 * num_domains + 1;
  Tensor values_V = torch::stable::new_empty(gram_RR, {num_values});
  Tensor skipped = torch::stable::new_empty(gram_RR, {}, ScalarType::Bool);
  Tensor found_inf = torch::stable::new_empty(gram_RR, {}, ScalarType::Float);
  const Problem problem{static_cast<int>(num_rows),
                        static_cast<int>(num_domains),
                        static_cast<const double*>(gram_RR.const_data_ptr()),
                        static_cast<const double*>(full_RR.const_data_ptr()),
                        static_cast<const double*>(tau_R.const_data_ptr()),
                        static_cast<const bool*>(present_R.const_data_ptr()),
                        static_cast<const Settings*>(settings_C.const_data_ptr()),
                        static_cast<double*>(state_S.mutable_data_ptr()),
                        static_cast<double*>(values_V.mutable_data_ptr()),
                        static_cast<bool*>(skipped.mutable_data_ptr()),
                        static_cast<float*>(found_inf.mutable_data_ptr())};
  launch(reweight, 1, 1, num_rows <= FEW_ROWS ? FEW_THREADS : MANY_THREADS,
         SHARED_VECTORS * num_rows * sizeof(double), problem);
  return {values_V, skipped, found_inf};
}

STABLE_TORCH_LIBRARY_FRAGMENT(DOGE_LIBRARY, library) {
  library.def(
      "reweight(Tensor gram_RR, Tensor full_RR, Tensor(a!) state_S, Tensor tau_R, Tensor present_R, "
      "Tensor settings_C) -> (Tensor values_V, Tensor skipped, Tensor found_inf)");
}
STABLE_TORCH_LIBRARY_IMPL(DOGE_LIBRARY, CompositeExplicitAutograd, library) {
  library.impl("reweight", TORCH_BOX(&run));
}

}  // namespace
}  // namespace doge_fast::cuda

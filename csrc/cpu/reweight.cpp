// The K x K step: from the Gram matrix to new domain weights, their mean and the coefficients.
//
// Reads two R x R matrices, writes one; everything else is a vector. All in float64, in one pass of
// plain loops: at the sizes of a mixture the thirty operations it replaces cost their calls alone.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "../check.h"

namespace doge_fast {
namespace {

// What torch.nn.utils.clip_grad_norm_ adds to the norm it divides by.
constexpr double NORM_FLOOR = 1e-6;
constexpr double NAN64 = std::numeric_limits<double>::quiet_NaN();

double clip_factor(double norm, double max_norm) {
  if (std::isinf(max_norm)) return 1;
  const double factor = max_norm / (norm + NORM_FLOOR);
  // Written so that a NaN stays one.
  return factor > 1 ? 1 : factor;
}

double cut(double value, double low, double high) {
  if (value < low) return low;
  return value > high ? high : value;
}

// [3 K + 2]: what lasts from step to step.
struct State {
  double* alpha_K;
  double* alpha_mean_K;
  double* gain_K;
  double* num_steps;
  double* num_skipped;

  State(double* state_S, int64_t num_domains)
      : alpha_K(state_S),
        alpha_mean_K(alpha_K + num_domains),
        gain_K(alpha_mean_K + num_domains),
        num_steps(gain_K + num_domains),
        num_skipped(num_steps + 1) {}
};

// [R^2 + 2 R + 4 K + 1]: what one step yields.
struct Values {
  double* gram_RR;
  double* coefficients_R;
  double* norms_R;
  double* gain_K;
  double* influence_K;
  double* difficulty_K;
  double* alpha_K;
  double* combined_norm;

  Values(double* values_V, int64_t num_rows, int64_t num_domains)
      : gram_RR(values_V),
        coefficients_R(gram_RR + num_rows * num_rows),
        norms_R(coefficients_R + num_rows),
        gain_K(norms_R + num_rows),
        influence_K(gain_K + num_domains),
        difficulty_K(influence_K + num_domains),
        alpha_K(difficulty_K + num_domains),
        combined_norm(alpha_K + num_domains) {}

  static int64_t size(int64_t num_rows, int64_t num_domains) {
    return num_rows * num_rows + 2 * num_rows + 4 * num_domains + 1;
  }
};

struct Rule {
  double mu;
  bool scale_by_mean_norm;
  double low;
  double high;
  double domain_max_grad_norm;
  double max_grad_norm;
  double smoothing;
};

struct Problem {
  int64_t num_rows;
  int64_t num_domains;
  const double* gram_RR;
  const double* full_RR;
  const double* tau_R;
  const bool* present_R;
  double lr;
  double grad_scale;
};

// The mean norm of the present training rows, by which the published code divides.
double mean_norm(const Problem& of, const double* clipped_RR) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t k = 0; k < of.num_domains; ++k) {
    sum += std::sqrt(clipped_RR[k * of.num_rows + k]) * of.present_R[k];
    count += of.present_R[k];
  }
  return sum / static_cast<double>(std::max<int64_t>(count, 1));
}

// Without a measured row that the objective needs, nobody's W is whole.
bool has_targets(const Problem& of) {
  for (int64_t r = of.num_domains; r < of.num_rows; ++r)
    if (!of.present_R[r] && of.tau_R[r] != 0) return false;
  return true;
}

void estimate(const Problem& of, const Rule& rule, const State& state, Values& to) {
  for (int64_t k = 0; k < of.num_domains; ++k) {
    double gain = 0;
    for (int64_t r = 0; r < of.num_rows; ++r) gain += to.gram_RR[k * of.num_rows + r] * of.tau_R[r];
    to.difficulty_K[k] = of.tau_R[k] * to.gram_RR[k * of.num_rows + k];
    to.influence_K[k] = gain - to.difficulty_K[k];
    to.gain_K[k] = gain;
  }
  const double divisor = rule.scale_by_mean_norm ? mean_norm(of, to.gram_RR) + NORM_FLOOR : 1;
  const bool is_whole = has_targets(of);
  for (int64_t k = 0; k < of.num_domains; ++k) {
    const double score = cut(to.gain_K[k] / divisor, rule.low, rule.high);
    to.gain_K[k] = of.present_R[k] && is_whole ? score : state.gain_K[k];
  }
}

// alpha'_K, as a softmax of logarithms.
std::vector<double> mirror_step(const Problem& of, const Rule& rule, const State& state,
                                const Values& at) {
  std::vector<double> alpha_K(of.num_domains);
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t k = 0; k < of.num_domains; ++k) {
    alpha_K[k] = std::log(state.alpha_K[k]) + of.lr / rule.mu * at.gain_K[k];
    largest = std::max(largest, alpha_K[k]);
  }
  double sum = 0;
  for (double& weight : alpha_K) sum += weight = std::exp(weight - largest);
  const double share = rule.smoothing / static_cast<double>(of.num_domains);
  for (double& weight : alpha_K) {
    weight /= sum;
    if (rule.smoothing > 0) weight = (1 - rule.smoothing) * weight + share;
  }
  return alpha_K;
}

// sqrt(c^T F c), F unscaled.
double combined_norm(const Problem& of, const double* coefficients_R) {
  const double unit = 1 / (of.grad_scale * of.grad_scale);
  double total = 0;
  for (int64_t i = 0; i < of.num_rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < of.num_rows; ++j)
      sum += of.full_RR[i * of.num_rows + j] * unit * coefficients_R[j];
    total += coefficients_R[i] * sum;
  }
  return std::sqrt(total < 0 ? 0 : total);
}

void commit(const std::vector<double>& alpha_K, const Values& at, bool is_finite, State& state) {
  if (!is_finite) {
    *state.num_skipped += 1;
    return;
  }
  *state.num_steps += 1;
  for (size_t k = 0; k < alpha_K.size(); ++k) {
    state.alpha_mean_K[k] += (alpha_K[k] - state.alpha_mean_K[k]) / *state.num_steps;
    state.alpha_K[k] = alpha_K[k];
    state.gain_K[k] = at.gain_K[k];
  }
}

// Returns whether everything was finite.
bool step(const Problem& of, const Rule& rule, State& state, Values& to) {
  const int64_t R = of.num_rows;
  const double unit = 1 / (of.grad_scale * of.grad_scale);
  std::vector<double> clip_R(R);
  bool is_finite = true;
  for (int64_t r = 0; r < R; ++r) {
    to.norms_R[r] = std::sqrt(of.full_RR[r * R + r] * unit);
    clip_R[r] = clip_factor(to.norms_R[r], rule.domain_max_grad_norm);
    is_finite = is_finite && std::isfinite(to.norms_R[r]);
  }
  for (int64_t i = 0; i < R; ++i)
    for (int64_t j = 0; j < R; ++j)
      to.gram_RR[i * R + j] = clip_R[i] * (of.gram_RR[i * R + j] * unit) * clip_R[j];
  estimate(of, rule, state, to);
  const std::vector<double> alpha_K = mirror_step(of, rule, state, to);
  for (const double weight : alpha_K) is_finite = is_finite && std::isfinite(weight);
  for (int64_t r = 0; r < R; ++r)
    to.coefficients_R[r] =
        r < of.num_domains && of.present_R[r] ? alpha_K[r] * clip_R[r] : 0;
  *to.combined_norm = combined_norm(of, to.coefficients_R);
  // NaN, so that a scaler or a clipping loop sees the overflow too.
  const double factor =
      is_finite ? clip_factor(*to.combined_norm, rule.max_grad_norm) : NAN64;
  for (int64_t r = 0; r < R; ++r) to.coefficients_R[r] *= factor;
  commit(alpha_K, to, is_finite, state);
  std::copy_n(state.alpha_K, of.num_domains, to.alpha_K);
  return is_finite;
}

void check(const Tensor& tensor, const char* name_of, ScalarType dtype, int64_t size) {
  DOGE_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == dtype &&
                 tensor.numel() == size,
             "reweight needs ", name_of, " contiguous on the CPU, ", size, " elements of ",
             name(dtype), "; received shape ", shape(tensor), " of ", name(tensor.scalar_type()), ".");
}

std::tuple<Tensor, Tensor, Tensor> reweight(
    Tensor gram_RR, Tensor full_RR, Tensor state_S, Tensor tau_R, Tensor present_R, Tensor lr,
    Tensor grad_scale, double mu, bool scale_by_mean_norm, double low, double high,
    double domain_max_grad_norm, double max_grad_norm, double smoothing) {
  const int64_t num_rows = tau_R.numel();
  const int64_t num_domains = (state_S.numel() - 2) / 3;
  DOGE_CHECK(1 <= num_domains && num_domains <= num_rows,
             "reweight needs at least one domain and a row for each; received ", num_domains,
             " domains, ", num_rows, " rows.");
  check(gram_RR, "gram_RR", ScalarType::Double, num_rows * num_rows);
  check(full_RR, "full_RR", ScalarType::Double, num_rows * num_rows);
  check(state_S, "state_S", ScalarType::Double, 3 * num_domains + 2);
  check(tau_R, "tau_R", ScalarType::Double, num_rows);
  check(present_R, "present_R", ScalarType::Bool, num_rows);
  check(lr, "lr", ScalarType::Double, 1);
  check(grad_scale, "grad_scale", ScalarType::Double, 1);

  Tensor values_V = torch::stable::new_empty(gram_RR, {Values::size(num_rows, num_domains)});
  Tensor skipped = torch::stable::new_empty(gram_RR, {}, ScalarType::Bool);
  Tensor found_inf = torch::stable::new_empty(gram_RR, {}, ScalarType::Float);
  const Problem problem{num_rows,
                        num_domains,
                        static_cast<const double*>(gram_RR.const_data_ptr()),
                        static_cast<const double*>(full_RR.const_data_ptr()),
                        static_cast<const double*>(tau_R.const_data_ptr()),
                        static_cast<const bool*>(present_R.const_data_ptr()),
                        *static_cast<const double*>(lr.const_data_ptr()),
                        *static_cast<const double*>(grad_scale.const_data_ptr())};
  const Rule rule{mu,   scale_by_mean_norm, low, high, domain_max_grad_norm, max_grad_norm,
                  smoothing};
  State state(static_cast<double*>(state_S.mutable_data_ptr()), num_domains);
  Values values(static_cast<double*>(values_V.mutable_data_ptr()), num_rows, num_domains);
  const bool is_finite = step(problem, rule, state, values);
  *static_cast<bool*>(skipped.mutable_data_ptr()) = !is_finite;
  *static_cast<float*>(found_inf.mutable_data_ptr()) = is_finite ? 0.0F : 1.0F;
  return {values_V, skipped, found_inf};
}

STABLE_TORCH_LIBRARY_FRAGMENT(doge_fast_cpp, library) {
  library.def(
      "reweight(Tensor gram_RR, Tensor full_RR, Tensor(a!) state_S, Tensor tau_R, Tensor present_R, "
      "Tensor lr, Tensor grad_scale, float mu, bool scale_by_mean_norm, float low, float high, "
      "float domain_max_grad_norm, float max_grad_norm, float smoothing) "
      "-> (Tensor values_V, Tensor skipped, Tensor found_inf)");
}
// Whatever the device, so that a tensor elsewhere gets our message, not the dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(doge_fast_cpp, CompositeExplicitAutograd, library) {
  library.impl("reweight", TORCH_BOX(&reweight));
}

}  // namespace
}  // namespace doge_fast

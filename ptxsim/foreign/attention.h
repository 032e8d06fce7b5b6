// What the host programs beside this file share: random inputs, copies to the device, and attention in double.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

using Doubles = std::vector<double>;

struct Problem {
    int queries, keys, heads, head, head_v;
    bool causal;

    Problem(char** argv, int head, int head_v, bool causal)
        : queries(atoi(argv[1])),
          keys(atoi(argv[2])),
          heads(atoi(argv[3])),
          head(head),
          head_v(head_v),
          causal(causal) {}
    double scale() const { return 1 / std::sqrt(double(head)); }
    // The mask is aligned to the last query and the last key.
    int seen(int i) const { return causal ? std::max(0, std::min(keys, keys - queries + i + 1)) : keys; }
};

template <typename T>
std::vector<T> random_values(size_t count) {
    std::vector<T> values(count);
    for (auto& value : values) value = T(float(rand()) / RAND_MAX * 2 - 1);
    return values;
}

template <typename T>
T* on_device(const std::vector<T>& host) {
    T* device = nullptr;
    cudaMalloc(&device, sizeof(T) * host.size());
    cudaMemcpy(device, host.data(), sizeof(T) * host.size(), cudaMemcpyHostToDevice);
    return device;
}

// Memory without values: the simulator reports what is read before it is written.
template <typename T>
T* allocate(size_t count) {
    T* device = nullptr;
    cudaMalloc(&device, sizeof(T) * count);
    return device;
}

template <typename T>
Doubles to_double(const std::vector<T>& values) {
    Doubles result;
    for (const auto& value : values) result.push_back(float(value));
    return result;
}

template <typename T>
Doubles from_device(const void* device, size_t count) {
    std::vector<T> host(count);
    cudaMemcpy(host.data(), device, sizeof(T) * count, cudaMemcpyDeviceToHost);
    return to_double(host);
}

struct Forward {
    Doubles out, lse;
};

inline double dot(const double* a, const double* b, int count) {
    double sum = 0;
    for (int c = 0; c < count; c++) sum += a[c] * b[c];
    return sum;
}

inline void add(double* to, double weight, const double* from, int count) {
    for (int c = 0; c < count; c++) to[c] += weight * from[c];
}

// Attention of [row][head][column] arrays; lse is [head][row].
inline Forward forward(const Problem& p, const Doubles& q, const Doubles& k, const Doubles& v) {
    Forward result{Doubles(size_t(p.queries) * p.heads * p.head_v), Doubles(size_t(p.heads) * p.queries)};
    Doubles weights(p.keys);
    for (int h = 0; h < p.heads; h++)
        for (int i = 0; i < p.queries; i++) {
            const double* row = &q[(size_t(i) * p.heads + h) * p.head];
            double sum = 0;
            for (int j = 0; j < p.seen(i); j++)
                sum += weights[j] = std::exp(p.scale() * dot(row, &k[(size_t(j) * p.heads + h) * p.head], p.head));
            for (int j = 0; j < p.seen(i); j++)
                add(&result.out[(size_t(i) * p.heads + h) * p.head_v], weights[j] / sum,
                    &v[(size_t(j) * p.heads + h) * p.head_v], p.head_v);
            result.lse[size_t(h) * p.queries + i] = std::log(sum);
        }
    return result;
}

struct Gradients {
    Doubles q, k, v;
};

inline Gradients backward(const Problem& p, const Doubles& q, const Doubles& k, const Doubles& v, const Doubles& dout) {
    const auto [out, lse] = forward(p, q, k, v);
    Gradients d{Doubles(q.size()), Doubles(k.size()), Doubles(v.size())};
    for (int h = 0; h < p.heads; h++)
        for (int i = 0; i < p.queries; i++) {
            const size_t at_q = (size_t(i) * p.heads + h) * p.head, at_o = (size_t(i) * p.heads + h) * p.head_v;
            const double delta = dot(&dout[at_o], &out[at_o], p.head_v);
            for (int j = 0; j < p.seen(i); j++) {
                const size_t at_k = (size_t(j) * p.heads + h) * p.head, at_v = (size_t(j) * p.heads + h) * p.head_v;
                const double weight =
                    std::exp(p.scale() * dot(&q[at_q], &k[at_k], p.head) - lse[size_t(h) * p.queries + i]);
                const double dscore = weight * (dot(&dout[at_o], &v[at_v], p.head_v) - delta) * p.scale();
                add(&d.v[at_v], weight, &dout[at_o], p.head_v);
                add(&d.q[at_q], dscore, &k[at_k], p.head);
                add(&d.k[at_k], dscore, &q[at_q], p.head);
            }
        }
    return d;
}

// Print the largest difference, relative to the largest expected value; return whether it is too large (or a NaN).
inline bool differs(const char* name, const Doubles& values, const Doubles& expected, double tolerance) {
    double worst = 0, largest = 0;
    for (size_t at = 0; at < values.size(); at++) {
        const double error = std::abs(values[at] - expected[at]);
        if (!(error <= worst)) worst = error;
        largest = std::max(largest, std::abs(expected[at]));
    }
    printf("%s: largest error %.2e of %.2e\n", name, worst, largest);
    return !(worst <= tolerance * largest);
}

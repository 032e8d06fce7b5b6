// Runs CUB's inclusive scan of pairs, whose tiles pass their sums on through flags, and compares with a loop.
// See run.py for how it is compiled and run.
#include <cub/device/device_scan.cuh>

#include "attention.h"

// Too large for one word with a flag in it: a tile stores its sum, then releases the flag.
struct Pair {
    double a, b;
};

struct Add {
    __host__ __device__ Pair operator()(const Pair& x, const Pair& y) const { return {x.a + y.a, x.b + y.b}; }
};

int main(int, char** argv) {
    const int count = atoi(argv[1]);
    std::vector<Pair> values;
    for (int i = 0; i < count; i++) values.push_back({double(i % 7), double(i % 5)});
    const Pair* in = on_device(values);
    Pair* out = allocate<Pair>(count);
    size_t bytes = 0;
    cub::DeviceScan::InclusiveScan(nullptr, bytes, in, out, Add{}, count);
    cub::DeviceScan::InclusiveScan(allocate<char>(bytes), bytes, in, out, Add{}, count);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    std::vector<Pair> sums(count);
    cudaMemcpy(sums.data(), out, sizeof(Pair) * count, cudaMemcpyDeviceToHost);
    Pair sum = {0, 0};
    for (int i = 0; i < count; i++) {
        sum = Add{}(sum, values[i]);
        if (sums[i].a != sum.a || sums[i].b != sum.b) return 2;
    }
    return 0;
}

# ruff: noqa: E501 (lines of CUDA are kept whole)
"""CUDA kernels that branch, call and meet again: run by the tests and recorded on a GPU."""

SOURCE = r"""
extern "C" __global__ void loops(const int *x, int *y) {
    int i = threadIdx.x, v = 0;
    for (int k = 0; k < x[i]; k++) {
        if (k == 5) continue;
        if (k > 20) break;
        for (int j = 0; j < k % 3; j++) v += j * i;
        v += k;
    }
    if (v % 7 == 0) { y[i] = -v; return; }
    y[i] = v;
}
extern "C" __global__ void choose(const int *x, int *y) {
    int i = threadIdx.x, v = x[i];
    switch (v) {
    case 0: v = 17; break; case 1: v = v * 3; break; case 2: v = 99; case 3: v += 5; break; case 4: v = i; break;
    case 5: v = -1; break; case 7: v = 70; break; case 9: v = 90; break; case 12: v = 1200; break; case 19: v = 5; break;
    default: v = 1000 + v;
    }
    y[i] = v;
}
extern "C" __global__ void ping_pong(int *y) {
    __shared__ volatile int turn;
    if (threadIdx.x == 0) turn = 0;
    __syncthreads();
    if (threadIdx.x < 2)
        for (int n = 0; n < 10; n++) {
            while (turn % 2 != threadIdx.x) ;
            turn = turn + 1;
        }
    __syncthreads();
    y[threadIdx.x] = turn;
}
__device__ __noinline__ int power(int b, int n) { int r = 1; for (int i = 0; i < n; i++) r *= b; return r; }
struct Pair { int a; long long b; };
__device__ __noinline__ Pair both(Pair p, int k) { p.a += k; p.b *= k; return p; }
extern "C" __global__ void calls(int *y) {
    int t = threadIdx.x, table[8];
    for (int i = 0; i < 8; i++) table[i] = power(i, t % 4);
    Pair p = both(Pair{t, t + 1}, 3);
    y[t] = table[t % 8] + p.a + (int)p.b;
}
extern "C" __global__ void block_sum(const float *x, float *y) {
    __shared__ float part[8];
    int t = threadIdx.x; float v = x[t];
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    if (t % 32 == 0) part[t / 32] = v;
    __syncthreads();
    if (t < 8) { float a = part[t]; for (int o = 4; o; o >>= 1) a += __shfl_down_sync(0xff, a, o); if (!t) *y = a; }
}
__constant__ int lut[4] = {3, 1, 4, 1};
__device__ int counter = 5;
__device__ int *pointer = &counter;
extern "C" __global__ void symbols(int *y) { y[threadIdx.x] = lut[threadIdx.x & 3] + *pointer; atomicAdd(&counter, 1); }
extern "C" __global__ void count(int *y) { int n = __syncthreads_count(threadIdx.x % 3 == 0); int o = __syncthreads_or(threadIdx.x == 5);
    y[threadIdx.x] = n * 2 + (o != 0); }
extern "C" __global__ void partial(int *y) { unsigned m = __activemask(); if (threadIdx.x & 1) m = __ballot_sync(0xaaaaaaaa, threadIdx.x > 8);
    y[threadIdx.x] = m; }
"""

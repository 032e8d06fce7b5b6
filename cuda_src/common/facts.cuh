// Facts: numbers that the host needs and only the kernel knows (sizes, threads, layout of the parameter struct). Each
// is a constant in the cubin, read from its ELF without a GPU, so the host never recomputes a size.
#pragma once

#define MLA_FACT(name, value) extern "C" __constant__ const int mla_fact_##name = (int)(value)
#define MLA_FACT_LIST(name, ...) extern "C" __constant__ const int mla_fact_##name[] = {__VA_ARGS__}
#define MLA_OFFSET(Struct, field) ((int)__INTADDR__(&((Struct*)0)->field))  // the front end's own offsetof

"""The real vLLM engine on a CPU, with an H200's answers where it asks for the GPU, and the NumPy kernels as decode.

Real are its scheduler, its manager of the cache, its model runners, its MLA layers and the builder of their metadata,
its DeepSeek models and its sampler. Stand-ins are what the modules of this package say: the platform's answers, the
operators that are compiled for a GPU, the prefill kernel, and as reference the definition of MLA decode.
"""

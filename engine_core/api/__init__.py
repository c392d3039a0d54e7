"""What a frontend may see of the engine: settings, sampling parameters, custom kernels, GGUF headers.

Never imports torch.
"""

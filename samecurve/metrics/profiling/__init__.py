"""Where the time of a few steps goes: PyTorch's profiler around them, and what its traces say."""

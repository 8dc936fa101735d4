"""Profiling of a few training steps with PyTorch's profiler, and analysis of its traces."""

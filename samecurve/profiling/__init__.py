"""Where the time of a few steps goes: PyTorch's profiler around them, and a page that says what it saw.

recorder.py   records the steps that profile.steps asks for      operators.py       which operator is what kind of work
trace.py      a recorded trace -> seconds by kind of work        deepspeed_log.py   DeepSpeed's own log of collectives
page.py       both as text
"""

# samecurve for NVIDIA GPUs, with the versions of constraints.txt. Never built by the tests, which only read it.
#   docker build -t samecurve .
#   docker run --gpus all --ipc host -v "$PWD":/work samecurve python -m samecurve.train recipes/lora.yaml --strategy fsdp --num_processes 8
# devel: DeepSpeed's offload compiles operators with nvcc, of the CUDA version that torch 2.13's wheels on PyPI are for
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# python3-dev: Triton builds launchers against Python.h; libaio-dev: zero3_nvme
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv python3-dev g++ libaio-dev \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/samecurve PATH=/opt/samecurve/bin:$PATH
COPY constraints.txt requirements.txt /src/
RUN python3 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir -c /src/constraints.txt -r /src/requirements.txt ninja

COPY pyproject.toml setup.py README.md LICENSE train.py /src/
COPY samecurve /src/samecurve
COPY recipes /src/recipes
COPY configs /src/configs
COPY ds_configs /src/ds_configs
COPY docs /src/docs
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[deepspeed,quantization,gguf]"

# ubuntu, user 1000 of the base image; caches of models, data and compiled kernels lie in its home
USER ubuntu
WORKDIR /work
CMD ["samecurve", "--help"]

# syntax=docker/dockerfile:1
# docker build -t lorakeet .                                  for NVIDIA GPUs (and CPUs)
# docker build -t lorakeet:cpu --build-arg ACCELERATOR=cpu .  for CPUs: some gigabytes smaller
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
ARG ACCELERATOR=cuda
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/lorakeet
ENV PATH=/opt/lorakeet/bin:$PATH
# torch on its own layer: it is most of the image and changes least. PyPI's wheels bring CUDA along.
RUN if [ "$ACCELERATOR" = cpu ]; then set -- --index-url "$CPU_TORCH_INDEX"; else set --; fi; \
    pip install "$@" 'torch>=2.11,<2.14'
WORKDIR /src
COPY pyproject.toml README.md ./
COPY configs configs
COPY kernels kernels
COPY lora lora
COPY models models
COPY server server
RUN pip install .

FROM python:${PYTHON_VERSION}-slim AS runtime
ARG ACCELERATOR=cuda
# Triton compiles its launchers with a C compiler when it runs on a GPU.
RUN if [ "$ACCELERATOR" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
      rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 lorakeet && mkdir /cache /adapters && \
    chown lorakeet /cache /adapters
COPY --from=build /opt/lorakeet /opt/lorakeet
ENV PATH=/opt/lorakeet/bin:$PATH \
    LORAKEET_CACHE=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER lorakeet
WORKDIR /home/lorakeet
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["lorakeet"]
CMD ["serve", "--host", "0.0.0.0"]

# docker build -t lorakeet .                                  for NVIDIA GPUs (and CPUs)
# docker build -t lorakeet:cpu --build-arg ACCELERATOR=cpu .  for CPUs: some gigabytes smaller
# How to run it: docs/docker.md
ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim AS base

# The dependencies alone: an edit of pyproject.toml that leaves them alone costs no download.
FROM base AS requirements
COPY pyproject.toml .
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > /requirements.txt

FROM base AS environment
ARG ACCELERATOR=cuda
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/lorakeet
ENV PATH=/opt/lorakeet/bin:$PATH PIP_CACHE_DIR=/var/cache/pip
COPY --from=requirements /requirements.txt /
# PyPI's torch brings CUDA and Triton along; the CPU's own index has one without.
RUN --mount=type=cache,target=/var/cache/pip \
    if [ "$ACCELERATOR" = cpu ]; then set -- --index-url "$CPU_TORCH_INDEX"; fi; \
    pip install "$@" "$(grep '^torch' /requirements.txt)" && pip install -r /requirements.txt

# The package alone, under the paths it is to have: the last and smallest layer of the image.
FROM environment AS package
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/var/cache/pip pip install --no-deps --root /installed .

FROM base
ARG ACCELERATOR=cuda
# tini, for the kernel hides signals from a first process that is still importing. On a GPU, Triton
# compiles small C modules when it first runs.
RUN if [ "$ACCELERATOR" = cuda ]; then compiler='gcc libc6-dev'; fi; \
    apt-get update && apt-get install -y --no-install-recommends tini $compiler && \
    rm -rf /var/lib/apt/lists/*
# Any user may write to the cache: `docker run --user` works.
RUN useradd --create-home --uid 10001 lorakeet && install -d -o lorakeet -m 1777 /cache
ENV PATH=/opt/lorakeet/bin:$PATH \
    LORAKEET_CACHE=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=environment /opt/lorakeet /opt/lorakeet
COPY --from=package /installed /
USER lorakeet
WORKDIR /home/lorakeet
VOLUME /cache
EXPOSE 8000
# http.client, for it ignores the proxy variables that Docker may pass on.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); exit(c.getresponse().status != 200)"]
# Arguments of `docker run` are those of `lorakeet serve`.
ENTRYPOINT ["tini", "--", "lorakeet", "serve", "--host", "0.0.0.0"]

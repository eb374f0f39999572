# splitserve on NVIDIA GPUs: build from the repository's root, run with the NVIDIA container toolkit.
#
#   docker build -f deploy/docker/cuda.Dockerfile -t splitserve:cuda .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v /models:/models -p 8000:8000 \
#     splitserve:cuda up /models/v4-flash.toml
#
# `--ipc host`: engines in several containers write into each other's GPUs by CUDA IPC, and UCX keeps queues in /dev/shm.
# torch's own wheel brings the CUDA libraries; the base image brings what the toolkit looks at. gcc stays in the image:
# Triton compiles a small launcher for each kernel at its first use.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/splitserve
ENV PATH=/opt/splitserve/bin:$PATH PYTHONUNBUFFERED=1 XDG_RUNTIME_DIR=/run/splitserve
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY splitserve ./splitserve
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[cuda,deepseek,fetch]"
RUN useradd --uid 10001 --create-home splitserve && install -d -m 700 -o splitserve /run/splitserve
USER 10001
EXPOSE 8000
ENTRYPOINT ["splitserve"]

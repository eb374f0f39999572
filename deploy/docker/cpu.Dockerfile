# splitserve on CPUs: build from the repository's root.
#
#   docker build -f deploy/docker/cpu.Dockerfile -t splitserve:cpu .
#   docker run --rm --shm-size=1g -v /models:/models -p 8000:8000 splitserve:cpu up /models/demo.toml
#
# Two stages: what builds stays behind. Each process of a deployment may also run in a container of its own
# (`splitserve render kubernetes`); then the entry point's words are `serve ...` and `router ...`.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/splitserve
ENV PATH=/opt/splitserve/bin:$PATH
# The CPU build of torch first, so that the next line does not bring the one with CUDA.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0"
COPY pyproject.toml README.md LICENSE ./
COPY splitserve ./splitserve
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[cpu,deepseek,fetch]"

FROM python:3.11-slim-bookworm
COPY --from=build /opt/splitserve /opt/splitserve
ENV PATH=/opt/splitserve/bin:$PATH PYTHONUNBUFFERED=1 XDG_RUNTIME_DIR=/run/splitserve
RUN useradd --uid 10001 --create-home splitserve && install -d -m 700 -o splitserve /run/splitserve
USER 10001
EXPOSE 8000
ENTRYPOINT ["splitserve"]

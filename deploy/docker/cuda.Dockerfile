# cairn for NVIDIA GPUs: docs/containers.md. From the repository's root:
#
#   docker build -f deploy/docker/cuda.Dockerfile -t cairn:cuda .
#
# torch's wheels bring the CUDA libraries along, the host's container toolkit brings the driver.
FROM python:3.11.14-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Triton compiles what launches a kernel with the machine's C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --create-home cairn \
    && install --directory --owner cairn --group cairn /models /cache

WORKDIR /src
# A layer of its own: it is the largest, and changes least.
COPY constraints.txt ./
RUN pip install -c constraints.txt "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt ".[cuda,nixl]"

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A container's own loopback can be reached by nobody else.
ENV CAIRN_HOST=0.0.0.0 CAIRN_PROXY_HOST=0.0.0.0 HF_HOME=/models XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/triton
WORKDIR /models
USER 10001:10001
EXPOSE 8000 5600
# Loading may take as long as --start-timeout. Not urllib: it would ask the environment's proxy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=1800s --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["cairn"]
CMD ["--help"]

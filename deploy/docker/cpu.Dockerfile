# cairn on the CPU: docs/containers.md. From the repository's root:
#
#   docker build -f deploy/docker/cpu.Dockerfile -t cairn:cpu .
FROM python:3.11.14-slim-bookworm

# PyTorch's index of CPU builds. pip's ordinary build brings several gigabytes of CUDA libraries along.
ARG TORCH_INSTALL_ARGS="--index-url https://download.pytorch.org/whl/cpu"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

RUN useradd --uid 10001 --user-group --create-home cairn \
    && install --directory --owner cairn --group cairn /models /cache

WORKDIR /src
# A layer of its own: it is the largest, and changes least.
COPY constraints.txt ./
RUN pip install ${TORCH_INSTALL_ARGS} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt ".[nixl]"

# A container's own loopback can be reached by nobody else.
ENV CAIRN_HOST=0.0.0.0 CAIRN_PROXY_HOST=0.0.0.0 HF_HOME=/models XDG_CACHE_HOME=/cache
WORKDIR /models
USER 10001:10001
EXPOSE 8000 5600
# Loading may take as long as --start-timeout. Not urllib: it would ask the environment's proxy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=1800s --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["cairn"]
CMD ["--help"]

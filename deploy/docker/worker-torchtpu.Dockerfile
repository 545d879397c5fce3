# A worker on TPUs through torch_tpu.
#     docker build --file deploy/docker/worker-torchtpu.Dockerfile --tag ostrya/worker-torchtpu:0.1.0 .
# The tag is exact; the release workflow passes it with its digest (no image registry can be reached from where it was
# written).
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# Where packages come from, if not from pip's default index alone. The CPU build of torch comes from PyTorch's own
# index, for instance: pass it as PIP_EXTRA_INDEX_URL. What is accepted, the hashes decide.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ONLY_BINARY=:all: \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY deploy/docker/locks/build.txt deploy/docker/locks/worker-torchtpu.txt locks/

# The tools that build and install; they stay in this stage.
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes -r locks/build.txt

# What Ostrya needs, in a venv without pip.
RUN python -m venv --without-pip /opt/ostrya \
 && /opt/build/bin/pip --python /opt/ostrya/bin/python install --require-hashes -r locks/worker-torchtpu.txt

# Ostrya itself. Its dependencies are all there, so none is looked for.
COPY pyproject.toml README.md LICENSE ./
COPY services services
RUN /opt/build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/build/bin/pip --python /opt/ostrya/bin/python install --no-index --no-deps /wheels/ostrya-*.whl

# torch loads torch_tpu by itself wherever it is installed, and torch_tpu wants a TPU: not while an image is built.
RUN export TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
 && /opt/ostrya/bin/python -c "import torch; assert torch.version.cuda is None" \
 && /opt/ostrya/bin/ostrya worker --help

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ostrya/worker-torchtpu" \
      org.opencontainers.image.description="Worker of Ostrya on TPUs through torch_tpu" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/ostrya /opt/ostrya
# Nothing is written but below /tmp and /dev/shm: the root file system may be read-only.
ENV PATH=/opt/ostrya/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 65532:65532
EXPOSE 50052 9401
STOPSIGNAL SIGTERM
ENTRYPOINT ["ostrya"]

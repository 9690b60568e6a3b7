# Fedloom for a server or a site of a federation, or for simulations:
#   docker build -t fedloom .
#   docker run --rm -v "$PWD":/work fedloom run quickstart
# examples/federation/compose.yaml has a whole federation to try.
FROM python:3.12-slim

# Options of pip for the installation, such as another index with builds of torch for a CPU or an older GPU.
ARG PIP_OPTIONS=""
# Extras of pyproject.toml; federate is `serve`, `site` and ONNX files.
ARG EXTRAS="federate"

WORKDIR /opt/fedloom
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ${PIP_OPTIONS} -c constraints.txt ".[${EXTRAS}]"

# Not as root. What is mounted at /work must be writable for this user: build with --build-arg USER_ID=$(id -u).
ARG USER_ID=1000
RUN useradd --uid "${USER_ID}" --create-home fedloom
USER fedloom
WORKDIR /work
ENTRYPOINT ["fedloom"]
CMD ["--help"]

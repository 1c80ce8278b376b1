# Two images from one file:
#   docker build --target cpu -t impala_llm:cpu .     learner and actors on the embedded engine, no GPU needed
#   docker build --target gpu -t impala_llm:gpu .     the same with SGLang and CUDA
# Processes of one host meet in /dev/shm, which Docker keeps at 64 MB: run with --shm-size=8g (or --ipc=host).
# A short training run ends each build: it tries the image out, and compiles the loops. Their code is kept beside the
# package, and is good for hosts with the same kind of CPU as the one that built the image. On others each start compiles
# again, unless the user may write into the package or sets NUMBA_CACHE_DIR, to a folder that nobody else can write to.
# Process 1 is tini: it passes signals on, which a process 1 without handlers ignores, and collects orphans that end.

# SGLang's own image carries the CUDA toolkit that its kernels are compiled with at run time.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.21

FROM python:3.11-slim AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/impala_llm
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu --no-deps "torch==2.13.0+cpu"
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY impala_llm impala_llm
RUN pip install --no-cache-dir -c constraints.txt '.[lora]'
RUN --mount=type=tmpfs,target=/dev/shm \
    impala-llm train experiment=corridor learner.total_updates=2 model.device=cpu run.terminal=false run.dir=/tmp/trial \
 && rm -r /tmp/trial
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "impala-llm"]

FROM ${SGLANG_IMAGE} AS gpu
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/impala_llm
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY impala_llm impala_llm
# The image's own packages are what SGLang was built against: they bind here, constraints.txt does not. SGLang itself is
# there already; the last line ends the build if this Python does not find it, as another SGLANG_IMAGE might have it.
RUN pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' > /tmp/image.txt \
 && pip install --no-cache-dir -c /tmp/image.txt '.[lora]' \
 && rm /tmp/image.txt \
 && python3 -c "from importlib.metadata import version; print('SGLang', version('sglang'))"
RUN --mount=type=tmpfs,target=/dev/shm \
    impala-llm train experiment=corridor learner.total_updates=2 model.device=cpu run.terminal=false run.dir=/tmp/trial \
 && rm -r /tmp/trial
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "impala-llm"]

# Pretraining on NVIDIA GPUs:
#   docker build -f docker/cuda.Dockerfile -t bert-jax:cuda .
#   mkdir -p runs && chmod a+rwx runs      # the image runs as user 1000
#   docker run --gpus all -v "$PWD/runs:/app/runs" bert-jax:cuda --config configs/quickstart.yaml
# CUDA and cuDNN come with the extra gpu as Python packages; the NVIDIA driver is the host's (NVIDIA Container Toolkit).
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app
# Dependencies first: they change less often than the code.
COPY setup.cfg pyproject.toml README.md LICENSE requirements.lock ./
RUN mkdir bert_jax data_pipeline \
    && touch bert_jax/__init__.py data_pipeline/__init__.py \
    && pip install -c requirements.lock -e '.[quickstart,gpu,gcs]'
COPY bert_jax bert_jax
COPY data_pipeline data_pipeline
COPY configs configs
COPY run_pretrain.py ./

RUN useradd --create-home --uid 1000 bert && mkdir data runs && chown bert data runs
USER bert

# Exit codes and signals are those of run_pretrain.py: it is process 1, so SIGTERM reaches it.
ENTRYPOINT ["python", "run_pretrain.py"]
CMD ["--help"]

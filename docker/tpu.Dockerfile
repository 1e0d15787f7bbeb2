# Pretraining on Cloud TPU (GKE, or docker on a TPU VM):
#   docker build -f docker/tpu.Dockerfile -t bert-jax:tpu .
#   docker run --privileged --network host bert-jax:tpu --config configs/quickstart.yaml --workdir gs://BUCKET/runs/quickstart
# libtpu comes with the extra tpu; the image holds no drivers and no credentials.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app
# Dependencies first: they change less often than the code.
COPY setup.cfg pyproject.toml README.md LICENSE requirements.lock ./
RUN mkdir bert_jax data_pipeline \
    && touch bert_jax/__init__.py data_pipeline/__init__.py \
    && pip install -c requirements.lock -e '.[quickstart,tpu,gcs]'
COPY bert_jax bert_jax
COPY data_pipeline data_pipeline
COPY configs configs
COPY run_pretrain.py ./

# Where the chips' device files belong to root alone: docker run --user root, or runAsUser: 0 in a pod.
RUN useradd --create-home --uid 1000 bert && mkdir data runs && chown bert data runs
USER bert

# Exit codes and signals are those of run_pretrain.py: it is process 1, so SIGTERM reaches it.
ENTRYPOINT ["python", "run_pretrain.py"]
CMD ["--help"]

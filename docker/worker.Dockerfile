# A worker on a GPU. CUDA comes with torch's wheels, the driver from the host; Triton and Inductor need a C++ compiler.
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kitsune && install -d -o kitsune /data
WORKDIR /opt/kitsune
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kitsune kitsune
COPY tuner tuner
COPY server server
COPY migrations migrations
RUN pip install --no-cache-dir -c constraints.txt '.[tuner,postgres]' && rm -rf /opt/kitsune/*

USER kitsune
# Compiled code outlives the container.
ENV KITSUNE_HOME=/data TORCHINDUCTOR_CACHE_DIR=/data/compiled
WORKDIR /data
VOLUME /data
# SIGTERM gives the current run back to the queue.
STOPSIGNAL SIGTERM
CMD ["kitsune", "worker"]

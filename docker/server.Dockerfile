# The server and the migration job. Neither ever imports torch; the package asks for it, so the small CPU build goes in.
FROM python:3.12-slim

RUN useradd --create-home --uid 10001 kitsune && install -d -o kitsune /data
WORKDIR /opt/kitsune
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kitsune kitsune
COPY tuner tuner
COPY server server
COPY migrations migrations
RUN grep '^torch==' constraints.txt > torch.txt \
    && pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu -r torch.txt \
    && pip install --no-cache-dir -c constraints.txt '.[server,postgres]' \
    && rm -rf /opt/kitsune/*

USER kitsune
ENV KITSUNE_HOME=/data
WORKDIR /data
VOLUME /data
EXPOSE 8537
CMD ["kitsune", "serve", "--host", "0.0.0.0", "--allow-remote"]

# An image with the command spearpp. The build needs no network, only a base image with Python and a folder of wheels:
#
#     python -m pip wheel --constraint constraints.txt --wheel-dir dist/wheels .
#     docker build --network none --tag spearpp .
#     docker run --rm --network none --volume "$PWD:/data" spearpp audit before.pt after.pt --model mlp
#
# The wheels must fit the Python version and the processor of the base image.
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY dist/wheels /wheels
RUN python -m pip install --no-cache-dir --no-index --find-links /wheels spearpp \
    && useradd --create-home auditor
USER auditor
WORKDIR /data
ENTRYPOINT ["spearpp"]
CMD ["--help"]

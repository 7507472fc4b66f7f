# distill-run: the wheel of `make dist`, with the versions of constraints.txt.
#   make dist && docker build -t distill-run .
# Without arguments, torch is the build that pip takes by default; on x86 this has CUDA, and it runs on CPUs too. torch's
# own indexes have builds without CUDA, in a much smaller image, and for other versions of CUDA:
#   docker build -t distill-run:cpu --build-arg TORCH_INDEX=<address of torch's index that ends in /whl/cpu> .
#   docker build -t distill-run:wandb --build-arg EXTRAS=wandb,export .
FROM python:3.12-slim
ARG TORCH_INDEX=
ARG EXTRAS=
COPY constraints.txt dist/*.whl /tmp/dist/
RUN cd /tmp/dist \
 && if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"; fi \
 && pip install --no-cache-dir -c constraints.txt "$(ls ./*.whl)${EXTRAS:+[$EXTRAS]}" \
 && rm -r /tmp/dist
RUN useradd --create-home --uid 1000 app && install -d -o app /data
USER app
# A volume in /data keeps the store, the runs and what was downloaded.
WORKDIR /data
ENV DISTILL_STORE_DIR=/data/store HF_HOME=/data/huggingface MPLCONFIGDIR=/tmp
ENTRYPOINT ["distill-run"]
CMD ["--help"]

# lorawgpu with Mesa's drivers: AMD and Intel GPUs, and the software adapter where there is none.
#
#   docker build -t lorawgpu .
#   docker run --rm --device /dev/dri -v "$PWD:/work" lorawgpu doctor
#   docker run --rm --device /dev/dri -v "$PWD:/work" lorawgpu train CONFIG.yaml
#
# NVIDIA: instead of --device, with the NVIDIA Container Toolkit, `--gpus all -e NVIDIA_DRIVER_CAPABILITIES=all`, which
# brings the Vulkan part of the host's driver.
FROM python:3.12-slim-bookworm
ENV VENV=/opt/lorawgpu-env HF_HOME=/work/.cache/huggingface
COPY . /opt/lorawgpu
RUN bash /opt/lorawgpu/scripts/install_image.sh
WORKDIR /work
ENTRYPOINT ["lorawgpu"]

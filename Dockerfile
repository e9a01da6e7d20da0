# The server of docs/serving.md on the default model: docker build -t jaxbench . && docker run -p 8000:8000 -e JAXBENCH_API_KEY=... jaxbench
# Native kernels are compiled at the first start for the machine that it starts on; keep ~/.cache in a volume.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev make && rm -rf /var/lib/apt/lists/*
WORKDIR /jaxbench
COPY pyproject.toml constraints.txt README.md LICENSE* ./
COPY .ci .ci
COPY jaxbench jaxbench
COPY torch_ref torch_ref
RUN pip install --no-cache-dir -c constraints.txt ".[serve]"
COPY experiments experiments
COPY configs configs
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready')"
CMD ["python", "experiments/serve.py", "--set=host=0.0.0.0"]

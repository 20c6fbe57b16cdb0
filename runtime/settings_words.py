"""What each setting decides, in a few words, for `tenuto up --help`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WORDS: Final[Mapping[str, str]] = {
    "TENUTO_HOME": "where data, keys and logs are",
    "TENUTO_MODELS": "where models are kept",
    "TENUTO_MODEL": "a name from `tenuto model list`, a GGUF file or a Hugging Face directory",
    "TENUTO_POSTGRES_DSN": "a Postgres of yours, in place of the embedded one",
    "TENUTO_TEMPORAL_ADDRESS": "a Temporal of yours, in place of the embedded one",
    "TENUTO_TEMPORAL_NAMESPACE": "its namespace",
    "TENUTO_API_HOST": "the address that the API listens on",
    "TENUTO_API_PORT": "its port; 8300 by default, 0 for any",
    "TENUTO_API_URL": "where clients find the API",
    "TENUTO_API_KEY": "the key that clients send",
    "TENUTO_SECRETS_KEY": "what secrets are sealed with: 32 bytes in base64",
    "TENUTO_ENGINE_ADDRESS": "an engine of yours, in place of the one that is started",
    "TENUTO_ENGINE_THREADS": "threads that the engine computes with",
    "TENUTO_ENGINE_DTYPE": "bf16, fp32, w4a8, and on a GPU w4a16, w8a16, w8a8",
    "TENUTO_ENGINE_BACKEND": "auto, triton, cpu or torch",
    "TENUTO_KV_DTYPE": "auto, or e4m3 on a GPU",
    "TENUTO_KV_TOKENS": "tokens whose KV the device holds",
    "TENUTO_HOST_KV_BYTES": "the host tier's size",
    "TENUTO_NVME_KV_BYTES": "the NVMe tier's size",
    "TENUTO_KV_COMPRESSION": "of the tiers: off, zlib or zstd",
    "TENUTO_KV_ENCRYPTION": "of the tiers: off or on",
    "TENUTO_SPECULATION": "drafts that are verified where it pays: auto or off",
    "TENUTO_KV_DECISIONS": "a file for every decision about pages",
    "TENUTO_SHARED_KV": "a directory or s3://BUCKET/PREFIX that nodes share pages in",
    "TENUTO_SHARED_KV_BYTES": "its size",
    "TENUTO_SANDBOX": "docker or bubblewrap; the best that there is by default",
    "TENUTO_SANDBOX_VOLUMES": "directories that every tool sees: /here:/there[:ro], separated by commas",
    "TENUTO_SANDBOX_IMAGES": "images that sessions may name, or *",
    "TENUTO_SANDBOX_PULL": "whether Docker fetches them: never or missing",
    "TENUTO_SANDBOX_COLD_START_S": "seconds that a claim of a sandbox may take",
    "TENUTO_SANDBOX_SPARES": "sandboxes kept ready at most",
    "TENUTO_SANDBOX_IDLE_S": "seconds until one that nothing uses is given up",
    "TENUTO_SANDBOX_EGRESS_ALLOW": "hosts that sessions may open their sandboxes to",
    "TENUTO_EGRESS_ALLOW": "hosts that HTTP tools, MCP servers and webhooks may reach",
    "TENUTO_NODES": "nodes, each with an engine of its own",
    "TENUTO_WORKERS": "processes that run workflows",
    "TENUTO_RETENTION_DAYS": "days for which records of ended sessions are kept",
    "TENUTO_PRICES": "a file of prices, for `tenuto usage`",
    "TENUTO_NODE_ID": "the node's name",
    "TENUTO_LOG_LEVEL": "debug, info, warning or error",
}

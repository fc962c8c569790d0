"""Links from bugs, as they are cited, to their threads on GitHub."""

from __future__ import annotations

import re

HOMES = {
    "accelerate": "huggingface",
    "diffusers": "huggingface",
    "guided-diffusion": "openai",
    "keras": "keras-team",
    "lingua": "facebookresearch",
    "mlx-lm": "ml-explore",
    "mmcv": "open-mmlab",
    "mmf": "facebookresearch",
    "ms-swift": "modelscope",
    "mxnet": "apache",
    "nanochat": "karpathy",
    "opacus": "pytorch",
    "open-instruct": "allenai",
    "openWakeWord": "dscripka",
    "open_clip": "mlfoundations",
    "prime-rl": "PrimeIntellect-ai",
    "pytorch": "pytorch",
    "rslearn": "allenai",
    "sentence-transformers": "UKPLab",
    "torchtitan": "pytorch",
    "torchtune": "pytorch",
    "transformers": "huggingface",
    "trl": "huggingface",
    "unsloth": "unslothai",
    "yolov5": "ultralytics",
    "DeepSpeed": "deepspeedai",
    "GradCache": "luyug",
    "Liger-Kernel": "linkedin",
    "LLMs-from-scratch": "rasbt",
    "LlamaFactory": "hiyouga",
    "Megatron-LM": "NVIDIA",
    "OpenNMT-py": "OpenNMT",
    "Primus": "AMD-AGI",
    "RAE": "bytetriper",
    "TransformerEngine": "NVIDIA",
}
"""Repository on GitHub, as bugs are cited by it -> its owner."""
OTHER_NAMES = {
    "Lightning": "Lightning-AI/pytorch-lightning",
    "NeMo Automodel": "NVIDIA-NeMo/Automodel",
    "pytorch/examples": "pytorch/examples",
}
"""What bugs are cited by -> the repository, where that is not its name."""
REPOSITORIES = {**{name: f"{owner}/{name}" for name, owner in HOMES.items()}, **OTHER_NAMES}
_CITED = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, sorted(REPOSITORIES, key=len, reverse=True)))})#(\d+)\b")


def with_links(html: str) -> str:
    """Return HTML text in which every cited bug of a known repository is a link that tells no one where it was."""
    link = '<a href="https://github.com/{}/issues/{}" rel="noreferrer">{}</a>'
    return _CITED.sub(lambda found: link.format(REPOSITORIES[found[1]], found[2], found[0]), html)

"""attention: which backend computes scaled_dot_product_attention."""

from torch.nn.attention import SDPBackend, sdpa_kernel

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Attention(Technique):
    name = "attention"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if facts.attention is False:
            return "the model does not call scaled_dot_product_attention"
        if facts.device != "cuda" and choice in ("cudnn", "efficient"):
            return "this backend exists on CUDA only"
        if choice == "cudnn" and facts.compute_capability < (8, 0):
            return "cuDNN's attention needs compute capability 8.0"
        return None

    def apply(self, choice: Choice, build: Build) -> None:
        backend = BACKENDS[str(choice)]
        build.forward_contexts.append(lambda: sdpa_kernel(backend))

    def blames(self, error: BaseException) -> bool:
        return "No available kernel" in str(error) or "No viable backend for scaled_dot_product" in str(error)


TECHNIQUE = Attention()

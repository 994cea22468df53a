"""What the fingerprint of an archive depends on, and what it does not."""

import pytest
import torch

from kitsune.submission.exporting.export import fingerprint_of, to_archive
from kitsune.workload import Workload
from tests.unit.kitsune.submission.hf_steps import bert
from tests.unit.kitsune.submission.steps import archive_of, lenet, llama, make, mlp, resnet


@pytest.mark.minutes
def test_masks_of_transformers_are_in_the_fingerprint_as_eager_found_them():
    assert fingerprint_of(make("causal")) == archive_of("causal").fingerprint
    causal = make("translator")
    causal.batch[0][2].copy_(causal.batch[0][3])
    assert fingerprint_of(causal) != archive_of("translator").fingerprint


# Found by torch 2.11 and by 2.13. Plans are looked up by them: they change with the format of the archive alone.
FINGERPRINTS = {
    "mlp": "09392c80988a0b5a", "lenet": "4b06d3a493388a1b", "resnet": "38d653ec57fca662",
    "resnet_channels_last": "2c70de0bccba4a93", "inception": "c889c52ddfc7d387", "llama": "16fb06e705cc9d63",
    "vit": "297160d3df4651e3", "lstm": "07e7aeac54230f4c", "encoder": "729d70671b36a428",
    "causal": "f89ac3796e1b28eb", "translator": "cbb924a826446da5", "graph": "c80f7fac238c270d",
    "towers": "419a1fb405892272", "mixed": "4440e553010544fd", "own_loss": "c0837f6bfa5861cc",
    "frozen_norms": "7fcf992f151f0906", "fixed_batch": "8b1255c2f8bee543", "double": "90a227676a673b3e",
}  # fmt: skip


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprint_is_the_same_in_every_version_of_torch(name):
    assert archive_of(name).fingerprint[:16] == FINGERPRINTS[name]


def fingerprint(workload: Workload) -> str:
    return to_archive(workload).fingerprint


@pytest.mark.parametrize(
    "kind", [mlp, resnet, llama, *(pytest.param(kind, marks=pytest.mark.minutes) for kind in (lenet, bert))]
)
def test_fingerprint_does_not_depend_on_the_batch_size(kind):
    assert fingerprint(kind(batch=4)) == fingerprint(kind(batch=6))


def test_fingerprint_differs_for_width_dropout_dtype_mode_and_optimizer():
    def changed(change) -> str:
        workload = mlp()
        return fingerprint(change(workload) or workload)

    def with_optimizer(kind, **options):
        return lambda w: Workload(w.model, w.loss_fn, kind(w.model.parameters(), **options), w.batch)

    base = fingerprint(mlp())
    assert changed(with_optimizer(torch.optim.SGD, lr=0.7, momentum=0.5)) == base
    others = [
        fingerprint(mlp(width=17)),
        fingerprint(mlp(p=0.2)),
        fingerprint(make("double")),
        changed(lambda w: w.model.eval() and None),
        changed(lambda w: w.model.first.requires_grad_(False) and None),
        changed(with_optimizer(torch.optim.SGD, lr=0.1)),
        changed(with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
        changed(with_optimizer(torch.optim.AdamW)),
    ]
    assert len({base, *others}) == len(others) + 1

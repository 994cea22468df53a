"""Graphs and what the rest of the process does to the libraries they use."""

import torch

from kitsune import Plan, TrainStep


def matmul_net(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def losses(device, disturb):
    model, optimizer = matmul_net(device)
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(256, 512, device=device, generator=generator)
    y = torch.randint(64, (256,), device=device, generator=generator)
    step = TrainStep(
        model, torch.nn.functional.cross_entropy, optimizer, Plan.by_hand(capture="step", precision="bf16")
    )
    found = []
    for number in range(40):
        found.append(step(x, y))
        if number >= 5:
            disturb()
    assert step.is_settled
    assert step.report.applied["capture"] == "step"
    return [loss.item() for loss in found]


def test_a_graph_does_not_depend_on_the_workspaces_of_others(device):
    """Inductor's own graphs clear cuBLAS's table of workspaces; what was there is then anybody's memory."""
    kept = []

    def disturb():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        kept.append(torch.full((16 << 20,), float("nan"), device=device))
        if len(kept) > 8:
            kept.pop(0)

    assert losses(device, disturb) == losses(device, lambda: None)


def test_a_graph_lives_beside_graphs_of_inductor(device):
    model, optimizer = matmul_net(device)
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.randn(256, 512, device=device)

    def other():
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    assert losses(device, other) == losses(device, lambda: None)

"""The sizes in which models ask for the kernels of suite kernels, by the names of the models."""

#: The rate of dropout, in shapes and in operations.
DROPPED = 0.1
TOKENS = {"bert_base-2x128": 256, "bert_base-16x128": 2048, "gpt2_small-8x512": 4096, "vit_b16-64": 64 * 197}
LLAMA_TOKENS = {"llama_8b-1x2048": 2048, "llama_8b-4x2048": 8192}
#: (rows, hidden)
HIDDEN = {name: (rows, 768) for name, rows in TOKENS.items()} | {
    name: (rows, 4096) for name, rows in LLAMA_TOKENS.items()
}
#: (rows, width within the feed-forward block)
INNER = {name: (rows, 3072) for name, rows in TOKENS.items()} | {
    name: (rows, 14336) for name, rows in LLAMA_TOKENS.items()
}
#: (rows, hidden, width within the block)
BLOCKS = {name: (rows, 768, 3072) for name, rows in TOKENS.items()} | {
    "bert_large-16x128": (2048, 1024, 4096),
    "wide-8x512": (4096, 2048, 8192),
}
#: The same
GATED_BLOCKS = {
    "llama_125m-1x1024": (1024, 768, 2048),
    "llama_125m-8x1024": (8192, 768, 2048),
    "tinyllama-1x2048": (2048, 2048, 5632),
    "llama_1b-2x2048": (4096, 2048, 8192),
    "llama_8b-1x2048": (2048, 4096, 14336),
    "llama_wide-2x2048": (4096, 4096, 14336),
}
GATED = {
    "tinyllama-1x2048": (2048, 5632),
    "llama_1b-1x2048": (2048, 8192),
    "llama_1b-8x2048": (16384, 8192),
    "llama_8b-1x512": (512, 14336),
    "llama_8b-1x2048": (2048, 14336),
    "llama_8b-4x2048": (8192, 14336),
}
#: (batch, heads, tokens)
CAUSAL = {
    "gpt2_small-1x128": (1, 12, 128),
    "gpt2_small-2x256": (2, 12, 256),
    "gpt2_small-8x512": (8, 12, 512),
    "gpt2_small-8x1024": (8, 12, 1024),
    "gpt2_medium-4x1000": (4, 16, 1000),
    "llama_8b-1x2048": (1, 32, 2048),
}
MASKED = {
    "bert_base-2x128": (2, 12, 128),
    "bert_base-16x128": (16, 12, 128),
    "bert_base-16x384": (16, 12, 384),
    "bert_base-16x500": (16, 12, 500),
    "bert_large-8x512": (8, 16, 512),
    "llama_8b-2x2048": (2, 32, 2048),
}
#: (batch, heads, tokens, elements of a head)
HEADS = {
    "modernbert_base-2x128": (2, 12, 128, 64),
    "modernbert_base-16x512": (16, 12, 512, 64),
    "llama_1b-1x2048": (1, 32, 2048, 64),
    "llama_1b-8x2048": (8, 32, 2048, 64),
    "llama_8b-1x2048": (1, 32, 2048, 128),
    "llama_8b-4x2048": (4, 32, 2048, 128),
}
#: (batch, heads, tokens, elements of a head, dropout, causal)
PROJECTED = {
    "vit_b16-64": (64, 12, 197, 64, 0.0, False),
    "vit_s32-64": (64, 6, 50, 64, 0.0, False),
    "bert_base-2x128": (2, 12, 128, 64, DROPPED, False),
    "bert_base-16x128": (16, 12, 128, 64, DROPPED, False),
    "bert_large-16x128": (16, 16, 128, 64, DROPPED, False),
    "gpt2_small-16x256": (16, 12, 256, 64, DROPPED, True),
    "llama_125m-32x256": (32, 12, 256, 64, 0.0, True),
}
#: (rows, hidden, classes)
HIDDEN_CLASSES = {
    "bert_base-2x128": (256, 768, 30522),
    "bert_base-16x128": (2048, 768, 30522),
    "gpt2_small-2x512": (1024, 768, 50257),
    "gpt2_small-8x512": (4096, 768, 50257),
    "llama_1b-1x2048": (2048, 2048, 128256),
    "llama_8b-1x2048": (2048, 4096, 128256),
}
CLASSES = {name: (rows, classes) for name, (rows, _, classes) in HIDDEN_CLASSES.items() if name != "llama_1b-1x2048"}
CLASSES |= {"llama_8b-4x2048": (8192, 128256)}
#: (batch, channels, height, width); ResNet-18 on images of 32 x 32, ResNet-50 of 224 x 224
STAGES = {
    "resnet18-128-stage1": (128, 64, 32, 32),
    "resnet18-128-stage2": (128, 128, 16, 16),
    "resnet18-128-stage4": (128, 512, 4, 4),
    "resnet50-64-stem": (64, 64, 112, 112),
    "resnet50-64-stage3": (64, 256, 14, 14),
    "resnet50-64-stage4": (64, 512, 7, 7),
}
#: (batch, channels, height, width, side of a window, stride, padding)
POOLS = {
    "resnet50-64": (64, 64, 112, 112, 3, 2, 1),
    "resnet50-256": (256, 64, 112, 112, 3, 2, 1),
    "resnet18-128": (128, 64, 32, 32, 2, 2, 0),
    "densenet121-16": (16, 64, 64, 64, 3, 2, 1),
    "googlenet-16": (16, 192, 56, 56, 3, 2, 1),
    "vgg16-64": (64, 64, 224, 224, 2, 2, 0),
}
#: (batch, side, channels of the result, side of a window, stride, padding)
STEMS = {
    "resnet50-64": (64, 224, 64, 7, 2, 3),
    "resnet50-256": (256, 224, 64, 7, 2, 3),
    "resnet18-128": (128, 32, 64, 3, 1, 1),
    "vgg16-64": (64, 224, 64, 3, 1, 1),
    "densenet121-16": (16, 128, 64, 7, 2, 3),
    "efficientnet_b0-64": (64, 224, 32, 3, 2, 1),
}
#: (batch, channels, channels of the result, side)
BOTTLENECKS = {
    "resnet50-64-stage1-in": (64, 64, 64, 56),
    "resnet50-64-stage1-out": (64, 64, 256, 56),
    "resnet50-64-stage1-next": (64, 256, 64, 56),
    "resnet50-64-stage2-next": (64, 512, 128, 28),
    "resnet50-64-stage2-out": (64, 128, 512, 28),
    "resnet50-64-stage3-out": (64, 256, 1024, 14),
    "resnet50-64-stage4-out": (64, 512, 2048, 7),
    "resnet50-256-stage1-out": (256, 64, 256, 56),
}
#: (batch, channels, side, channels of the result, side of a patch)
PATCHES = {
    "vit_b16-4": (4, 3, 224, 768, 16),
    "vit_b16-64": (64, 3, 224, 768, 16),
    "vit_s32-64": (64, 3, 224, 384, 32),
    "convnext_tiny-64-stem": (64, 3, 224, 96, 4),
    "convnext_tiny-64-stage2": (64, 96, 56, 192, 2),
    "convnext_tiny-64-stage4": (64, 384, 14, 768, 2),
}
#: Models of the zoo, whose parameters are updated or cast.
MODELS = {name: name for name in ("lenet5", "resnet18", "resnet50", "bert_base", "vit_b16", "gpt2_small")}

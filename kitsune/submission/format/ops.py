"""The allowlist of operators in a submission. Names are checked before torch is called.

It lists forward operators of torch that compute on their arguments. Excluded are operators that read or write files
(`save`, `from_file`), replace or resize storage (`set_`, `resize_`, every `out=` form), make views without bounds
checks (`as_strided`, `_unsafe_index`), do not validate sizes (`native_batch_norm`), print, use streams, or are
internal. `guards.py` checks the arguments of operators that need it.
"""

import re
from typing import Final

_POINTWISE = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp
clamp_max clamp_min clip complex conj conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc
erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu glu greater
greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac imag isclose isfinite
isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2
log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish mul
multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polar polygamma positive pow prelu rad2deg real
reciprocal relu relu6 remainder resolve_conj resolve_neg round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc
sinh softplus softshrink sqrt square sub subtract tan tanh threshold true_divide trunc where xlogy __and__ __or__
__xor__ __lshift__ __rshift__ special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv
special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_i0e
special_i1 special_i1e special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp special_ndtr
special_ndtri special_polygamma special_psi special_round special_sinc special_softmax special_xlog1py special_xlogy
special_zeta special_bessel_j0 special_bessel_j1
"""
_REDUCTIONS = """
all amax amin aminmax any argmax argmin count_nonzero cov corrcoef cummax cummin cumprod cumsum dist frobenius_norm
kthvalue linalg_norm linalg_vector_norm linalg_matrix_norm log_softmax logcumsumexp logsumexp max mean median min mode
nanmean nanmedian nanquantile nansum norm nuclear_norm prod quantile renorm softmax std std_mean sum sum_to_size
trapezoid trapz cumulative_trapezoid var var_mean _softmax _log_softmax
"""
_ALGEBRA = """
addbmm addmm addmv addr baddbmm bilinear bmm cdist chain_matmul cholesky cholesky_inverse cholesky_solve
cosine_similarity cross det diag diag_embed diagflat diagonal dot einsum ger inner inverse kron linalg_cholesky
linalg_cholesky_ex linalg_cross linalg_det linalg_diagonal linalg_eigh linalg_eigvalsh linalg_householder_product
linalg_inv linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matmul linalg_matrix_exp
linalg_matrix_power linalg_multi_dot linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
linalg_solve_triangular linalg_svd linalg_svdvals linalg_vander linalg_vecdot logdet matmul matrix_exp matrix_power mm
mv outer pairwise_distance pdist pinverse qr slogdet tensordot trace triangular_solve tril triu vander vdot
_linalg_det _linalg_slogdet _linalg_svd _linalg_eigh _linalg_solve_ex
"""
_LAYERS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool3d batch_norm channel_shuffle col2im
constant_pad_nd conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution embedding
embedding_bag embedding_renorm fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2
fft_ifftn fft_ifftshift fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn _fft_c2c
_fft_c2r _fft_r2c fractional_max_pool2d fractional_max_pool3d grid_sampler grid_sampler_2d grid_sampler_3d group_norm
gru gru_cell im2col instance_norm istft layer_norm linear lstm lstm_cell max_pool1d max_pool1d_with_indices max_pool2d
max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d
native_group_norm native_layer_norm pad _pad_circular _pad_enum pixel_shuffle pixel_unshuffle reflection_pad1d
reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d rms_norm _fused_rms_norm
rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention _scaled_dot_product_flash_attention
_scaled_dot_product_efficient_attention
_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math stft upsample_bicubic2d upsample_bilinear2d
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa
_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm
norm_except_dim
"""
_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_INDEXING = """
argsort argwhere bincount bucketize gather histc index index_add index_copy index_fill index_put index_reduce
index_select isin masked_fill masked_scatter masked_select msort nonzero nonzero_static put repeat_interleave scatter
scatter_add scatter_reduce searchsorted select_scatter slice_scatter diagonal_scatter sort take take_along_dim topk
unique_consecutive unique_dim _unique2
"""
_SHAPES = """
adjoint alias atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cartesian_prod cat chunk
clone column_stack combinations concat concatenate contiguous copy detach dsplit dstack expand expand_as fill
fill_diagonal flatten flip fliplr flipud gradient diff hsplit hstack lift_fresh lift_fresh_copy mH mT matrix_H
meshgrid moveaxis movedim narrow numpy_T one_hot permute ravel repeat requires_grad reshape reshape_as roll rot90
row_stack select slice split split_with_sizes squeeze stack swapaxes swapdims t tensor_split tile to transpose type_as
unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view view_as view_as_complex
view_as_real vsplit vstack zero permute_copy view_copy slice_copy select_copy transpose_copy unsqueeze_copy
squeeze_copy expand_copy _to_copy _conj _neg_view numel item
"""
_CREATION = """
arange bartlett_window blackman_window empty empty_like eye full full_like hamming_window hann_window kaiser_window
linspace logspace new_empty new_full new_ones new_zeros ones ones_like range scalar_tensor tril_indices triu_indices
zeros zeros_like
"""
_RANDOM = """
alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout feature_dropout geometric log_normal
multinomial native_dropout normal poisson rand rand_like randint randint_like randn randn_like random randperm rrelu
rrelu_with_noise uniform _sample_dirichlet _standard_gamma
"""
_SIZES = "sym_size sym_numel sym_stride"

_NAMES = (_POINTWISE, _REDUCTIONS, _ALGEBRA, _LAYERS, _LOSSES, _INDEXING, _SHAPES, _CREATION, _RANDOM, _SIZES)
_PYTHON_BY_ARGUMENTS: Final = {
    1: "neg abs not_ sym_float sym_int sym_not sym_sum sym_sqrt ceil floor trunc sqrt round",
    2: "getitem add sub mul truediv floordiv mod eq ne lt le gt ge and_ or_ sym_max sym_min round",
    3: "sym_ite",
}

ATEN: Final = frozenset(name for group in _NAMES for name in group.split())
"""Base names in the aten namespace; the in-place form of each (`relu_`) is allowed too."""

_PYTHON_CALLS: Final = frozenset(
    (f"py.{name}", count) for count, names in _PYTHON_BY_ARGUMENTS.items() for name in names.split()
)
PYTHON: Final = frozenset(name for name, _ in _PYTHON_CALLS)
"""Arithmetic on sizes, and selecting one of several results. No power and no shift: both can build huge numbers."""

ASSERTIONS: Final = frozenset(
    (
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    )
)
"""Assertions that export inserts; they compute nothing and are left out of an archive."""

DROPOUT: Final = {
    "aten.dropout.default": ("p", 1),
    "aten.dropout_.default": ("p", 1),
    "aten.feature_dropout.default": ("p", 1),
    "aten.feature_dropout_.default": ("p", 1),
    "aten.alpha_dropout.default": ("p", 1),
    "aten.alpha_dropout_.default": ("p", 1),
    "aten.feature_alpha_dropout.default": ("p", 1),
    "aten.feature_alpha_dropout_.default": ("p", 1),
    "aten.native_dropout.default": ("p", 1),
    "aten.scaled_dot_product_attention.default": ("dropout_p", 4),
    "aten._scaled_dot_product_flash_attention.default": ("dropout_p", 3),
    "aten._scaled_dot_product_efficient_attention.default": ("dropout_p", 5),
    "aten._scaled_dot_product_cudnn_attention.default": ("dropout_p", 5),
    "aten._scaled_dot_product_attention_math.default": ("dropout_p", 4),
    "aten.lstm.input": ("dropout", 5),
    "aten.gru.input": ("dropout", 5),
    "aten.rnn_tanh.input": ("dropout", 5),
    "aten.rnn_relu.input": ("dropout", 5),
}
"""Operators with dropout -> the name and position of the probability among their arguments."""

# Operators on packed sequences: torch cannot export them, and validates their arguments only in Python.
_PACKED = frozenset(("aten.lstm.data", "aten.gru.data", "aten.rnn_tanh.data", "aten.rnn_relu.data"))
_TARGET = re.compile(r"aten\.((?:__)?[A-Za-z][A-Za-z0-9_]*|_[a-z][A-Za-z0-9_]*)\.([A-Za-z][A-Za-z0-9_]*)", re.ASCII)


def is_allowed(target: str) -> bool:
    """Whether `aten.name.overload` or `py.name` may be a node of an archive."""
    if target in PYTHON:
        return True
    match = _TARGET.fullmatch(target)
    if match is None:
        return False
    name, overload = match.groups()
    if overload == "out" or overload.endswith("_out") or target in _PACKED:
        return False
    return name in ATEN or (name.endswith("_") and not name.endswith("__") and name[:-1] in ATEN)


def takes(target: str, positional: int, named: int) -> bool:
    """Whether an allowed `py.` operator takes so many arguments. torch checks its own operators when called."""
    return target not in PYTHON or (not named and (target, positional) in _PYTHON_CALLS)
